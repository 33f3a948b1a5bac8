"""Allocation: which scheme each group of linears gets, so that a model of a given size loses least.

Three steps follow one another. Candidates are schemes that the format holds and the engine loads (`search_of`); each is
planned alone, which tells sizes and refuses what does not fit, and a choice in which they take turns is planned before
anything is measured, because formats and engines may take each of two schemes and no model that has both. Then
`quantforge.api.allocate` measures what each costs each linear. `solve` chooses: every group has some options, each
with its bytes and its loss (nats that its error costs at the output of the model, which add up); options that a mixture
of two others beats in both are dropped, and the rest is a multiple-choice knapsack, solved exactly by dynamic
programming over bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from quantforge.arguments import as_list
from quantforge.artifacts.manifest import small_files
from quantforge.artifacts.number_text import size
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.files.hub import resolve
from quantforge.files.reader import Checkpoint
from quantforge.formats import GGUF, KEEP, load_format
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.formats.open_model import open_model
from quantforge.grids import INTEGER_BITS
from quantforge.notation import ALIASES, parse
from quantforge.planning import naming
from quantforge.planning.format_choice import chosen_format
from quantforge.planning.gradient_options import quantized_linears, refuse_guide
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.size_target import (
    AskedSize,
    SizeTarget,
    budget_of,
    parse_target,
    size_like,
)
from quantforge.planning.source_views import source_as_read, without_dropped_heads
from quantforge.plans import EngineVerdict, TensorPlan
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe, Rule
from quantforge.settings import Settings

# Steps of the bytes that options differ by: what is rounded up of each option is less than one of them.
STEPS = 1 << 15
CURVE_POINTS = 33
EVERY = "re:.*"  # every linear of blocks: a scheme alone would be a mixture in GGUF
_ANY = "{}"


# ---- the search


@dataclass(frozen=True)
class MixtureSearch:
    """A search that can begin, as far as headers tell.

    Attributes:
        asked: the size.
        source: the model as `quantize` would read it.
        before: its small files, by name: size and digest.
        settings: how it runs, with the files that the recipe cites.
        wanted: what is asked for beside the size, with its format.
        target: the size.
        plans: of each candidate alone, by its scheme.
        left_out: which usual schemes are no candidates, and why.
        groups: the linears that get one scheme, by canonical name.
        planned: returns the plan of a scheme for all of these, with rules before it, called by the size.
    """

    asked: AskedSize
    source: Checkpoint
    before: Mapping[str, Any]
    settings: Settings
    wanted: Recipe
    target: SizeTarget
    plans: Mapping[str, Planned]
    left_out: Mapping[str, str]
    groups: tuple[tuple[str, ...], ...]
    planned: Callable[..., Planned]

    @cached_property
    def first(self) -> Planned:
        """Return the plan of the first candidate."""
        return next(iter(self.plans.values()))

    @cached_property
    def tables(self) -> Mapping[str, Mapping[str, TensorPlan]]:
        """Return the plan of every linear of blocks under each candidate."""
        return {
            name: quantized_linears(one.plan.tensors, one.model_layout)
            for name, one in self.plans.items()
        }

    @cached_property
    def linears(self) -> Mapping[str, TensorPlan]:
        """Return the plan of every linear of blocks under the first candidate."""
        return next(iter(self.tables.values()))

    @cached_property
    def weights(self) -> Mapping[str, int]:
        """Return how many weights each linear has."""
        return {name: math.prod(one.shape) for name, one in self.linears.items()}

    @cached_property
    def room(self) -> int:
        """Return the bytes that the size leaves for the linears.

        Raises:
            RefusedError: the target is below the smallest choice or above the largest.
        """
        sizes = [[self._bytes(group, name) for name in self.plans] for group in self.groups]
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        budget = budget_of(self.target, self.first)
        if not least <= budget.room <= most:
            small = budget.room < least
            side = "below the smallest" if small else "above the largest"
            among = f"{', '.join(self.plans)}{why_not_candidates(self.left_out)}"
            largest = max(zip(map(sum, zip(*sizes, strict=True)), self.plans, strict=True))[1]
            more = (
                budget.memory_parts(least)
                if small
                else f"; {largest} for all of it fits without a size"
            )
            raise RefusedError(
                f"{self.target.text}: it is {side} choice of the candidates {among}",
                f"{budget.reach(least, most)}{more}",
            )
        return budget.room

    def check_mixed(self) -> None:
        """Refuse candidates that the format or the engine takes one at a time, but not together."""
        names, engine = [*self.plans], self.wanted.engine
        turns = itertools.islice(itertools.cycle(names), len(self.groups))
        every = Mixture(0.0, tuple(Option(name, 0, 0.0) for name in turns))
        try:
            self.planned(names[0], *self._rules(names[0], every))
        except RefusedError as error:
            said = f"no mixture of {', '.join(names)}: {error.message}"
            if engine is None:
                raise RefusedError(said, error.hint) from error
            raise RefusedError(f"--for {engine}: {said}", _one_width(engine)) from error

    def found(self, nats: Mapping[str, Sequence[float]]) -> Allocated:
        """Return the mixture that loses least; ``nats`` are of each linear under each candidate."""
        options = self._options(nats)
        mixture, final = self._best(options)
        alone = {
            name: mixture_of([one[place] for one in options])
            for place, name in enumerate(self.plans)
        }
        return Allocated(
            recipe=self._recipe(mixture),
            target=self.asked.text,
            nbytes=final.plan.output_bytes,
            bits=self._bits(mixture),
            nats=mixture.nats,
            groups=self.groups,
            chosen=tuple(one.scheme for one in mixture.chosen),
            shares=self._shares(mixture),
            uniform={n: (self._files(one), self._bits(one), one.nats) for n, one in alone.items()},
            front=tuple((self._files(one), one.nats) for one in best_mixtures(options)),
            left_out=self.left_out,
            engines=final.plan.engines,
        )

    def likely(self, first: Sequence[str] = (), measured: int = 0) -> tuple[Recipe, Planned]:
        """Return a mixture of the size that is asked for, and its plan, before anything is measured.

        ``first`` and ``measured`` are as of `make_plan`.

        Errors are taken to be a quarter with each bit more, everywhere alike.
        """
        nats = {
            linear: [
                weights * 4.0 ** (-8 * one[linear].output_bytes / weights)
                for one in self.tables.values()
            ]
            for linear, weights in self.weights.items()
        }
        mixture, final = self._best(self._options(nats), first, measured)
        return self._recipe(mixture), final

    def likely_plan(self) -> Planned:
        """Return the plan of a mixture of that size, with a note on what is measured first."""
        rows, names = self.wanted.calibration, [*self.plans]
        note = (
            f"measured first: what each of {len(names)} schemes ({', '.join(names)}) costs each of"
            f" {len(self.groups)} groups of linears, on {rows.samples:,} rows of {rows.length:,} tokens,"
            " forward and backward; which gets which is found then, and with it which engines load it: this is another"
            " mixture of that size"
        )
        return self.likely((note,), len(names))[1]

    def _best(
        self,
        options: Sequence[Sequence[Option]],
        first: Sequence[str] = (),
        measured: int = 0,
    ) -> tuple[Mixture, Planned]:
        """Return the best choice and its plan; its files, rules in their headers included, are no larger than asked."""
        room = self.room
        while True:
            mixture = solve(options, room)
            base = self._base(mixture)
            found = self.planned(base, *self._rules(base, mixture), first=first, measured=measured)
            over = found.plan.output_bytes - self.target.nbytes if self.target.of_files else 0
            if over <= 0:
                return mixture, found
            room -= math.ceil(over)

    def _options(self, nats: Mapping[str, Sequence[float]]) -> list[list[Option]]:
        """Return the options of each group; ``nats`` are those of each linear under each candidate."""
        return [
            [
                Option(
                    name,
                    self._bytes(group, name),
                    math.fsum(nats[linear][place] for linear in group),
                )
                for place, name in enumerate(self.plans)
            ]
            for group in self.groups
        ]

    def _recipe(self, mixture: Mixture) -> Recipe:
        base = self._base(mixture)
        rules = (*self._rules(base, mixture), Rule(EVERY, base))
        return replace(self.wanted, scheme=base, rules=rules)

    def _base(self, mixture: Mixture) -> str:
        """Return the scheme that most weights get."""
        shares = self._shares(mixture)
        return max(shares, key=lambda scheme: (shares[scheme], scheme))

    def _rules(self, base: str, mixture: Mixture) -> tuple[Rule, ...]:
        """Return rules for the linears whose scheme is not ``base``."""
        schemes = {
            name: one.scheme
            for one, group in zip(mixture.chosen, self.groups, strict=True)
            for name in group
            if one.scheme != base
        }
        model_layout, linears = self.first.model_layout, self.linears
        places = {}
        for name in schemes:
            block = model_layout.block_name(linears[name].block)
            before, number = block[: block.rindex(".") + 1], block.rpartition(".")[2]
            after = re.escape(_kind(name.removeprefix(block), linears[name].expert))
            places[name] = (re.escape(before), number, after.replace(re.escape(_ANY), "[0-9]+"))
        return tuple(Rule(*rule) for rule in patterns_of(schemes, places))

    def _shares(self, mixture: Mixture) -> dict[str, int]:
        """Return how many weights each scheme gets."""
        shares: dict[str, int] = {}
        for one, group in zip(mixture.chosen, self.groups, strict=True):
            count = sum(self.weights[name] for name in group)
            shares[one.scheme] = shares.get(one.scheme, 0) + count
        return shares

    def _bytes(self, group: Sequence[str], scheme: str) -> int:
        """Return the bytes of a group under a candidate."""
        return sum(self.tables[scheme][name].output_bytes for name in group)

    def _files(self, mixture: Mixture) -> int:
        """Return the bytes of all weight files."""
        first = sum(one.output_bytes for one in self.linears.values())
        return self.first.plan.output_bytes - first + mixture.nbytes

    def _bits(self, mixture: Mixture) -> float:
        """Return bits per weight inside of blocks."""
        return 8 * mixture.nbytes / sum(self.weights.values())


def search_of(
    model: str | Path, asked: AskedSize, settings: Settings, out: Path | None
) -> MixtureSearch:
    """Plan a search, and refuse what headers tell to be impossible.

    Args:
        model: as of `quantize`.
        asked: the size, and what is wanted beside it.
        settings: how it runs.
        out: of a result that is to be made at once: its name may decide the format.

    Raises:
        UsageError: the target is no size.
        RefusedError: it is out of reach, or of another model; the format or the engine takes no mixture.
    """
    other, recipe = None, asked.recipe
    if asked.like is not None:
        other = open_model(resolve(str(asked.like), settings.offline))
        if not (recipe.format or recipe.engine):
            recipe = replace(recipe, format=GGUF if other.path.is_file() else "")
    target = None
    if asked.target is not None:
        target = parse_target(asked.target, settings.serving.cache, recipe.tensor_parallel)
    read, own = strip_local_paths(chosen_format(recipe, out)[0], settings)
    key = read.format
    opened = open_model(resolve(str(model), settings.offline))
    source = without_dropped_heads(source_as_read(opened, read, None, own), read)
    name = naming.sized(source, read.method, key, naming.word_for(asked.target, asked.like))

    def planned(scheme: str, *rules: Rule, first: Sequence[str] = (), measured: int = 0) -> Planned:
        wanted = replace(read, scheme=scheme, rules=(*rules, Rule(EVERY, scheme)))
        return make_plan(wanted, source, None, own, name=name, first=first, measured=measured)

    typed = as_list(asked.candidates)
    given = [(name,) for one in typed for name in str(one).split(",") if name]
    together = key != GGUF  # what engines join gets one scheme: linears of an input, experts
    plans, left_out = plan_candidates(
        source,
        planned,
        given or usual_schemes(key),
        read.engine,
        given=bool(given),
        together=together,
    )
    first = plans[next(iter(plans))]
    if other is not None:
        target = size_like(other, first.model_layout)
    assert target is not None
    # An engine that the format does not list loads none of its mixtures: `check_mixed` says so.
    loader = load_format(key).INFO.engines.get(read.engine or "")
    alike = loader is not None and bool(loader.mixed_experts)
    groups: dict[object, list[str]] = {}
    for linear, tensor in quantized_linears(first.plan.tensors, first.model_layout).items():
        groups.setdefault(_group(linear, tensor, together, alike), []).append(linear)
    search = MixtureSearch(
        asked,
        source,
        small_files(source),
        own,
        replace(recipe, format=key),
        target,
        plans,
        left_out,
        tuple(map(tuple, groups.values())),
        planned,
    )
    search.room  # noqa: B018 - refuses a size that is out of reach
    search.check_mixed()
    return search


def usual_schemes(key: str) -> list[Sequence[str]]:
    """Return the schemes of whole bits: the one with a name of its own, else what ``--bits`` means in a format."""
    found: list[Sequence[str]] = []
    for bits in INTEGER_BITS:
        named = ALIASES.get(f"W{bits}A16") if key != GGUF else None
        try:
            default = load_format(key).default_scheme(bits)
        except QuantForgeError:  # it has no such width
            continue
        found.append((named, default) if named and named != default else (default,))
    return found


def plan_candidates(
    source: Checkpoint,
    planned: Callable[[str], Planned],
    candidates: Sequence[Sequence[str]],
    engine: str | None,
    *,
    given: bool,
    together: bool,
) -> tuple[dict[str, Planned], dict[str, str]]:
    """Return a plan for the first scheme that has one of each candidate, and why others are left out.

    A candidate that is ``given`` has to have one. ``together``: linears of a shared input get one scheme.
    """
    plans: dict[str, Planned] = {}
    left_out: dict[str, str] = {}
    for texts in candidates:
        for text in texts:
            if text == KEEP:
                raise UsageError(
                    f"--candidates {text}: 16 bits are not chosen among",
                    "--ignore PATTERN leaves layers as they are",
                )
            try:
                name = str(parse(text))
                found = planned(name)
            except QuantForgeError as error:
                if given and engine and isinstance(error, RefusedError):
                    hint = f"leave it out; without --candidates those that {engine} loads are taken"
                    raise RefusedError(f"--candidates {text}: {error.message}", hint) from error
                if given:
                    raise
                left_out[text] = error.message
                continue
            schemes = [
                one.scheme
                for one in quantized_linears(found.plan.tensors, found.model_layout).values()
            ]
            if not together and any(one and one.weight.joint for one in schemes):
                # Matrices that share parameters may get others, and errors would not add up.
                raise UsageError(
                    f"--candidates {name}: matrices share its parameters",
                    "a scheme by rows or groups",
                )
            plans[name] = replace(found, model_layout=drop_tied_copy(found.model_layout, source))
            left_out = {other: why for other, why in left_out.items() if other not in texts}
            break
    if len(plans) < 2:
        _refuse_few([*plans], left_out, engine)
    first = next(iter(plans.values()))
    refuse_guide(
        1,
        (GPTQ,),
        first.plan.tensors,
        first.model_layout,
        "allocate",
        "one width for all: quantforge quantize MODEL --bits 4",
    )
    linears = quantized_linears(first.plan.tensors, first.model_layout).keys()
    for name, one in plans.items():
        if quantized_linears(one.plan.tensors, one.model_layout).keys() != linears:
            raise RefusedError(
                f"{name}: it rounds other linears than the other candidates", "leave it out"
            )
    return plans, left_out


def _refuse_few(names: Sequence[str], left_out: Mapping[str, str], engine: str | None) -> NoReturn:
    """Refuse candidates among which there is nothing to choose."""
    said = f"fewer than two candidates: {', '.join(names) or 'none'}"
    if engine and left_out:
        raise RefusedError(
            f"--for {engine}: {said}{why_not_candidates(left_out)}", _one_width(engine)
        )
    more = "name more schemes: --candidates int3:g128:sym,int4:g128:sym"
    raise UsageError(said, next(iter(left_out.values()), more))


def _one_width(engine: str) -> str:
    return f"one width for all: quantforge quantize MODEL --for {engine}"


def why_not_candidates(left_out: Mapping[str, str]) -> str:
    """Return the end of a sentence that names the candidates: which is none, and why."""
    if not left_out:
        return ""
    name, why = next(iter(left_out.items()))
    more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
    return f"; {name} is none: {why}{more}"


# ---- the knapsack


@dataclass(frozen=True, slots=True)
class Option:
    """Scheme for a group of linears: the bytes that it counts, and what its error costs in nats per token."""

    scheme: str
    nbytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """Choice of an option for every group, with its nats."""

    nats: float
    chosen: tuple[Option, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all groups."""
        return sum(option.nbytes for option in self.chosen)


def _group(name: str, tensor: TensorPlan, together: bool, alike: bool) -> object:
    """Return what tells the linears that get one scheme: engines compute the experts of a layer in one product.

    A GGUF file holds each of their matrices in one tensor.
    """
    if tensor.expert >= 0:
        return -1 if alike else tensor.block, "" if together else _kind(name, tensor.expert)
    return (tensor.block, tensor.shared) if together and tensor.shared else name


def _kind(name: str, expert: int) -> str:
    """Return the name of a linear of an expert with `_ANY` for the number of the expert; others as they are."""
    before, number, behind = name.rpartition(f".{expert}.") if expert >= 0 else (name, "", "")
    return f"{before}.{_ANY}.{behind}" if number else name


def patterns_of(
    schemes: Mapping[str, str], places: Mapping[str, tuple[str, str, str]]
) -> list[tuple[str, str]]:
    """Return rules ``(pattern, scheme)`` that give linears their schemes: one for each kind of linear and scheme.

    Args:
        schemes: of linears, by canonical name.
        places: of each, a pattern for what stands before the number of its block, this number, and one for the rest.
    """
    together: dict[tuple[str, str, str], dict[str, None]] = {}
    for name, scheme in schemes.items():
        before, number, behind = places[name]
        together.setdefault((before, behind, scheme), {})[number] = None
    return [
        (f"re:{before}({'|'.join(numbers)}){behind}", scheme)
        for (before, behind, scheme), numbers in together.items()
    ]


def solve(groups: Sequence[Sequence[Option]], room: int) -> Mixture:
    """Return the options of all groups with the least sum of nats whose bytes are at most ``room``.

    Of equal sums the one with fewer bytes wins, then the earlier options of earlier groups.

    Raises:
        RefusedError: even the smallest options take more.
    """
    import numpy as np

    hulls = [_hull(options) for options in groups]
    least = sum(options[0].nbytes for options in hulls)
    if least > room:
        raise RefusedError(
            f"the smallest options take {least:,} bytes of {room:,}", "a larger target"
        )
    spread = sum(options[-1].nbytes for options in hulls) - least
    unit = max(1, -(-min(room - least, spread) // STEPS))
    width = min(room - least, spread) // unit + 1
    best = np.zeros(width)
    picks = np.zeros((len(hulls), width), dtype=np.int8)
    for number, options in enumerate(hulls):
        sums = np.full((len(options), width), np.inf)
        for place, option in enumerate(options):
            more = -(-(option.nbytes - options[0].nbytes) // unit)
            if more < width:
                sums[place, more:] = best[: width - more] + option.nats
        picks[number] = sums.argmin(0)
        best = sums.min(0)
    left = int(best.argmin())
    chosen: list[Option] = []
    for options, row in zip(reversed(hulls), picks[::-1], strict=True):
        option = options[int(row[left])]
        left -= -(-(option.nbytes - options[0].nbytes) // unit)
        chosen.append(option)
    return mixture_of(chosen[::-1])


def mixture_of(chosen: Sequence[Option]) -> Mixture:
    """Return a choice with its sum of nats."""
    return Mixture(math.fsum(option.nats for option in chosen), tuple(chosen))


def best_mixtures(groups: Sequence[Sequence[Option]]) -> list[Mixture]:
    """Return the best choices from the least size to the most; each loses less than the one before."""
    least, most = (
        sum(pick(one.nbytes for one in options) for options in groups) for pick in (min, max)
    )
    found: list[Mixture] = []
    for number in range(CURVE_POINTS):
        one = solve(groups, least + (most - least) * number // (CURVE_POINTS - 1))
        if not found or one.nats < found[-1].nats:
            found.append(one)
    return found


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options that no mixture of two others beats, by growing bytes."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.nats)):
        if kept and option.nats >= kept[-1].nats:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-2], option):
            kept.pop()
        kept.append(option)
    return kept


def _slope(first: Option, second: Option) -> float:
    return (second.nats - first.nats) / max(1, second.nbytes - first.nbytes)


# ---- the outcome


@dataclass(frozen=True, slots=True)
class Allocated:
    """Outcome of an allocation.

    Attributes:
        recipe: gives every linear its scheme.
        target: as it was asked for.
        nbytes: of all weight files of the result, as planned.
        bits: bits per weight inside of the blocks.
        nats: of divergence per token that the errors inside of blocks are expected to cause.
        groups: the linears of each group.
        chosen: of each group, its scheme.
        shares: weights that each scheme gets.
        uniform: bytes, bits and nats of each candidate alone, by its scheme.
        front: bytes and nats of the best choices from the least size to the most.
        left_out: candidates that the format does not hold or the engine does not load, and why.
        engines: which of them load what the recipe makes.
    """

    recipe: Recipe
    target: str
    nbytes: int
    bits: float
    nats: float
    groups: tuple[tuple[str, ...], ...]
    chosen: tuple[str, ...]
    shares: Mapping[str, int]
    uniform: Mapping[str, tuple[int, float, float]]
    front: tuple[tuple[int, float], ...]
    left_out: Mapping[str, str]
    engines: tuple[EngineVerdict, ...]

    def written(self) -> bytes:
        """Return the recipe as a file, behind a line on what it makes, in the figures that `quantize` ends with."""
        planned = f"{self.bits:.3f} bits per weight in blocks, files {size(self.nbytes)}"
        return f"# planned: {planned}\n\n{self.recipe.to_toml()}".encode()

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "target": self.target,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits,
            "nats": self.nats,
            "groups": [
                {"linears": linears, "scheme": scheme}
                for linears, scheme in zip(self.groups, self.chosen, strict=True)
            ],
            "uniform": [
                {"scheme": name, "bytes": size, "bits_per_weight": bits, "nats": nats}
                for name, (size, bits, nats) in self.uniform.items()
            ],
            "front": [{"bytes": size, "nats": nats} for size, nats in self.front],
            "left_out": dict(self.left_out),
            "engines": [asdict(verdict) for verdict in self.engines],
        }
