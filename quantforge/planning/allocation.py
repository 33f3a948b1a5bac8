"""Allocation: which scheme each group of linears gets, so that a model of a given size loses least.

Three steps follow one another. Candidates are schemes that the format holds and the engine loads (`plans_of`); each is
planned alone, which tells sizes and refuses what does not fit, and a choice in which they take turns is planned before
anything is measured, because formats and engines may take each of two schemes and no model that has both. `Allocation`
groups the linears and says what a target leaves for them. `solved` chooses: every group has some options, each with its
bytes and its loss (nats that its error costs at the output of the model, which add up); options that a mixture of two
others beats in both are dropped, and the rest is a multiple-choice knapsack, solved exactly by dynamic programming over
bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.formats import GGUF, KEEP, format_of
from quantforge.formats.matching import drop_tied_copy
from quantforge.formats.targets import preferred_formats
from quantforge.grids import INTEGER_BITS
from quantforge.notation import ALIASES, parse
from quantforge.planning.gradients import quantized_linears, refuse_guide
from quantforge.planning.planner import Planned
from quantforge.planning.size_target import MemoryUse, Scale
from quantforge.plans import EngineVerdict, TensorPlan
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe, Rule
from quantforge.results.significant import size

# Steps of the bytes that options differ by: what is rounded up of each option is less than one of them.
STEPS = 1 << 15
CURVE_POINTS = 33
_ANY = "{}"


def usual(key: str) -> list[Sequence[str]]:
    """Return the schemes of whole bits: the one with a name of its own, else what ``--bits`` means in a format."""
    found: list[Sequence[str]] = []
    for bits in INTEGER_BITS:
        named = ALIASES.get(f"W{bits}A16") if key != GGUF else None
        try:
            default = format_of(key).default_scheme(bits)
        except QuantForgeError:  # it has no such width
            continue
        found.append((named, default) if named and named != default else (default,))
    return found


def least_bits(
    key: str, plans: Mapping[str, Planned], final: Planned, bits: Mapping[str, float]
) -> dict[str, float]:
    """Return the least bits of a mixture that an engine loads, for engines that do not load the final one.

    Args:
        key: the format.
        plans: of each candidate alone.
        final: the plan of the mixture that was found.
        bits: per weight of each candidate alone.
    """
    known = format_of(key).ABOUT.engines
    found = {}
    for engine in (one.engine for one in final.plan.engines if one.loads is False):
        taken = [
            name
            for name, alone in plans.items()
            if any(one.engine == engine and one.loads is not False for one in alone.plan.engines)
        ]
        if key in preferred_formats(engine) and not known[engine].mixture and len(taken) > 1:
            found[engine] = min(bits[name] for name in taken)
    return found


def plans_of(
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
            _check_apart(
                name, quantized_linears(found.plan.tensors, found.matched), together=together
            )
            plans[name] = replace(found, matched=drop_tied_copy(found.matched, source))
            left_out = {other: why for other, why in left_out.items() if other not in texts}
            break
    if len(plans) < 2:
        _refuse_few([*plans], left_out, engine)
    first = next(iter(plans.values()))
    refuse_guide(
        1,
        (GPTQ,),
        first.plan.tensors,
        first.matched,
        "allocate",
        "one width for all: quantforge quantize MODEL --bits 4",
    )
    tables = {name: quantized_linears(one.plan.tensors, one.matched) for name, one in plans.items()}
    for name, table in tables.items():
        if table.keys() != tables[next(iter(tables))].keys():
            raise RefusedError(
                f"{name}: it rounds other linears than the other candidates", "leave it out"
            )
    return plans, left_out


def check_mixed(
    planned: Callable[..., Planned],
    allocation: Allocation,
    names: Sequence[str],
    engine: str | None,
) -> None:
    """Refuse candidates that the format or the engine takes one at a time, but not together."""
    try:
        planned(names[0], *allocation.rules(names[0], allocation.every()))
    except RefusedError as error:
        said = f"no mixture of {', '.join(names)}: {error.message}"
        if engine is None:
            raise RefusedError(said, error.hint) from error
        raise RefusedError(f"--for {engine}: {said}", _one_width(engine)) from error


def _refuse_few(names: Sequence[str], left_out: Mapping[str, str], engine: str | None) -> NoReturn:
    """Refuse candidates among which there is nothing to choose."""
    said = f"fewer than two candidates: {', '.join(names) or 'none'}"
    if engine and left_out:
        raise RefusedError(f"--for {engine}: {said}{others(left_out)}", _one_width(engine))
    more = "name more schemes: --candidates int3:g128:sym,int4:g128:sym"
    raise UsageError(said, next(iter(left_out.values()), more))


def _one_width(engine: str) -> str:
    return f"one width for all: quantforge quantize MODEL --for {engine}"


def _check_apart(name: str, table: Mapping[str, TensorPlan], *, together: bool) -> None:
    """Refuse a scheme under which matrices share parameters that may get others, so that errors would not add up."""
    schemes = {one.scheme.weight for one in table.values() if one.scheme}
    if not together and any(scheme.joint for scheme in schemes):
        raise UsageError(
            f"--candidates {name}: matrices share its parameters", "a scheme by rows or groups"
        )


def others(left_out: Mapping[str, str]) -> str:
    """Return the end of a sentence that names the candidates: which is none, and why."""
    if not left_out:
        return ""
    name, why = next(iter(left_out.items()))
    more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
    return f"; {name} is none: {why}{more}"


@dataclass(frozen=True, slots=True)
class Option:
    """Scheme for a group of linears: the bytes that it counts, and what its error costs in nats per token."""

    scheme: str
    nbytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Point:
    """Choice of an option for every group, with its nats."""

    nats: float
    chosen: tuple[Option, ...]


class Allocation:
    """Candidates for the linears of a model.

    Attributes:
        groups: the linears that get one scheme, by canonical name.
    """

    def __init__(
        self,
        plans: Mapping[str, Planned],
        *,
        together: bool,
        alike: bool = False,
        share: float = 1.0,
    ) -> None:
        """Take the candidates.

        Args:
            plans: of each candidate alone.
            together: linears of a shared input get one scheme, and so do all experts of a layer.
            alike: all experts of the model get one.
            share: of the bytes of experts that count.
        """
        self._share = share
        self._names, self._first = [*plans], next(iter(plans.values()))
        self._tables = [quantized_linears(one.plan.tensors, one.matched) for one in plans.values()]
        groups: dict[object, list[str]] = {}
        for name, tensor in self._tables[0].items():
            groups.setdefault(_group(name, tensor, together, alike), []).append(name)
        self.groups = tuple(tuple(names) for names in groups.values())
        self._fixed = self._first.plan.output_bytes - sum(
            one.stored_bytes for one in self._tables[0].values()
        )
        self._weights = sum(math.prod(one.shape) for one in self._tables[0].values())

    def every(self) -> Point:
        """Return a choice in which candidates take turns: what any mixture needs has a place in it."""
        turns = itertools.cycle(Option(name, 0, 0.0) for name in self._names)
        return Point(0.0, tuple(itertools.islice(turns, len(self.groups))))

    def room(self, scale: Scale, left_out: Mapping[str, str]) -> int:
        """Return the bytes that a target leaves for linears of blocks; ``left_out``: what is no candidate, and why.

        Raises:
            RefusedError: the target is below the smallest choice or above the largest.
        """
        sizes = [[self._counted(group, table) for table in self._tables] for group in self.groups]
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        if not least <= scale.room <= most:
            small = scale.room < least
            side = "below the smallest" if small else "above the largest"
            among = f"{', '.join(self._names)}{others(left_out)}"
            largest = max(zip(map(sum, zip(*sizes, strict=True)), self._names, strict=True))[1]
            more = scale.more(least) if small else f"; {largest} for all of it fits without a size"
            raise RefusedError(
                f"{scale.target.text}: it is {side} choice of the candidates {among}",
                f"{scale.reach(least, most)}{more}",
            )
        return scale.room

    def sizes(self, place: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each linear with its bytes and weights under the candidate at a place."""
        for name, tensor in self._tables[place].items():
            yield name, (tensor.stored_bytes, math.prod(tensor.shape))

    def options(self, nats: Mapping[str, Sequence[float]]) -> list[list[Option]]:
        """Return the options of each group; ``nats`` are those of each linear under each candidate."""
        return [
            [
                Option(
                    name,
                    self._counted(group, table),
                    math.fsum(nats[linear][place] for linear in group),
                )
                for place, (name, table) in enumerate(zip(self._names, self._tables, strict=True))
            ]
            for group in self.groups
        ]

    def outcome(self, point: Point, options: Sequence[Sequence[Option]]) -> dict[str, Any]:
        """Return the fields of `Allocated` that follow from a choice, without those of its plan and what was asked."""
        _, bits, nats = self._figures(point)
        uniform = {
            name: self._figures(point_of([one[place] for one in options]))
            for place, name in enumerate(self._names)
        }
        front = tuple(self._figures(one)[::2] for one in curve(options))
        return {
            "bits": bits,
            "nats": nats,
            "groups": self.groups,
            "shares": self._shares(point),
            "chosen": tuple(one.scheme for one in point.chosen),
            "uniform": uniform,
            "front": front,
        }

    def rules_of(self, point: Point) -> tuple[str, tuple[Rule, ...]]:
        """Return the scheme that most weights get, and rules for the other linears."""
        shares = self._shares(point)
        base = max(shares, key=lambda scheme: (shares[scheme], scheme))
        return base, self.rules(base, point)

    def rules(self, base: str, point: Point) -> tuple[Rule, ...]:
        """Return rules for the linears whose scheme is not ``base``."""
        schemes = {
            name: one.scheme
            for one, group in zip(point.chosen, self.groups, strict=True)
            for name in group
            if one.scheme != base
        }
        matched = self._first.matched
        blocks = {tensor.name.removesuffix(".weight"): tensor.block for tensor in matched.tensors}
        places = {}
        for name in schemes:
            block = matched.block_name(blocks[name])
            before, number = block[: block.rindex(".") + 1], block.rpartition(".")[2]
            behind = re.escape(_kind(name.removeprefix(block), self._tables[0][name].expert))
            behind = behind.replace(re.escape(_ANY), "[0-9]+")
            places[name] = (re.escape(before), number, behind)
        return tuple(Rule(*rule) for rule in patterns_of(schemes, places))

    def _shares(self, point: Point) -> dict[str, int]:
        """Return how many weights each scheme gets."""
        shares: dict[str, int] = {}
        for one, group in zip(point.chosen, self.groups, strict=True):
            count = sum(math.prod(self._tables[0][name].shape) for name in group)
            shares[one.scheme] = shares.get(one.scheme, 0) + count
        return shares

    def _counted(self, group: Sequence[str], table: Mapping[str, TensorPlan]) -> int:
        """Return the bytes that count of a group under a candidate."""
        kept = sum(table[name].stored_bytes for name in group if table[name].expert < 0)
        routed = sum(table[name].stored_bytes for name in group if table[name].expert >= 0)
        return kept + math.ceil(routed * self._share)

    def _figures(self, point: Point) -> tuple[int, float, float]:
        """Return the bytes of all weight files, bits per weight inside of blocks, and nats."""
        tables = dict(zip(self._names, self._tables, strict=True))
        chosen = zip(point.chosen, self.groups, strict=True)
        own = sum(tables[one.scheme][name].stored_bytes for one, group in chosen for name in group)
        return self._fixed + own, 8 * own / self._weights, point.nats


def _group(name: str, tensor: TensorPlan, together: bool, alike: bool) -> object:
    """Return what tells the linears that get one scheme: engines compute the experts of a layer in one product.

    A GGUF file holds each of their matrices in one tensor.
    """
    if tensor.expert >= 0:
        return -1 if alike else tensor.part, "" if together else _kind(name, tensor.expert)
    return (tensor.part, tensor.shared) if together and tensor.shared else name


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


def solved(groups: Sequence[Sequence[Option]], room: int) -> Point:
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
    return point_of(chosen[::-1])


def point_of(chosen: Sequence[Option]) -> Point:
    """Return a choice with its sum of nats."""
    return Point(math.fsum(option.nats for option in chosen), tuple(chosen))


def curve(groups: Sequence[Sequence[Option]]) -> list[Point]:
    """Return the best choices from the least size to the most; each loses less than the one before."""
    least, most = (
        sum(pick(one.nbytes for one in options) for options in groups) for pick in (min, max)
    )
    found: list[Point] = []
    for number in range(CURVE_POINTS):
        one = solved(groups, least + (most - least) * number // (CURVE_POINTS - 1))
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
        memory: of a device, as a target of memory shares it out; None for other targets.
        least: for engines that do not load it, but mixtures of some candidates: the bits of the smallest of these.
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
    memory: MemoryUse | None = None
    least: Mapping[str, float] = field(default_factory=dict)

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
            "least_bits": dict(self.least),
            **({"memory": self.memory.document()} if self.memory else {}),
        }
