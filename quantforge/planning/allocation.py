"""Mixed-precision allocation: choose a scheme per group of linears to lose the least at a given model size.

There are three steps. `plan_search` collects the candidate schemes (those that the format can store and the engine can
load), plans each of them alone to learn its size, and plans one artificial mixture of all of them, because a format or
an engine may accept each of two schemes but not both in one model. `quantforge.api.allocate` then measures the error of
each candidate in each linear. Last, `solve_knapsack` chooses: every group of linears has one option per candidate, with
its bytes and its loss in nats (the divergence that its error causes at the output of the model; losses add up). Options
that lie above the convex hull of bytes and loss are dropped; the rest is a multiple-choice knapsack problem, which
dynamic programming over bytes solves exactly.
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
from quantforge.artifacts.manifest import digest_small_files
from quantforge.artifacts.number_text import size
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.files.hub import resolve_model
from quantforge.files.reader import Checkpoint
from quantforge.formats import GGUF, KEEP, load_format
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.formats.open_model import open_model
from quantforge.grids import INTEGER_BITS
from quantforge.notation import ALIASES, parse
from quantforge.planning import naming
from quantforge.planning.format_choice import choose_format
from quantforge.planning.gradient_options import quantized_linears, refuse_guide
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.size_target import (
    SizeRequest,
    SizeTarget,
    parse_target,
    size_budget,
    size_like,
)
from quantforge.planning.source_views import source_as_read, without_dropped_heads
from quantforge.plans import EngineVerdict, TensorPlan
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe, Rule
from quantforge.settings import Settings

# Resolution of the knapsack: the size of each option, above the smallest, is rounded up to one of so many steps.
KNAPSACK_STEPS = 1 << 15
PARETO_POINTS = 33
ALL_LINEARS = "re:.*"  # a pattern: GGUF would read a scheme without rules as a mixture
_EXPERT_NUMBER = "{}"


# ---- the search


@dataclass(frozen=True)
class MixtureSearch:
    """A planned search for the best mixture of schemes: everything that headers tell before errors are measured.

    Attributes:
        request: the requested size, candidates and recipe.
        source: the model as `quantize` would read it.
        small_files: bytes and digest of each small file of the model (configuration, tokenizer), by name.
        settings: settings of the run, with the local paths of the files that the recipe names.
        recipe: the requested recipe, with its format.
        target: the target size.
        candidate_plans: the plan of the model with one candidate for all linears, by scheme.
        excluded: default schemes that are not candidates, each with the reason.
        groups: canonical names of the linears that have to share a scheme, one tuple for each group.
        plan_with: callable that returns the plan for a base scheme and rules that take precedence over it.
    """

    request: SizeRequest
    source: Checkpoint
    small_files: Mapping[str, Any]
    settings: Settings
    recipe: Recipe
    target: SizeTarget
    candidate_plans: Mapping[str, Planned]
    excluded: Mapping[str, str]
    groups: tuple[tuple[str, ...], ...]
    plan_with: Callable[..., Planned]

    @cached_property
    def first_plan(self) -> Planned:
        """Return the plan of the first candidate."""
        return next(iter(self.candidate_plans.values()))

    @cached_property
    def tensor_plans(self) -> Mapping[str, Mapping[str, TensorPlan]]:
        """Return the tensor plan of every linear of the blocks, by candidate and canonical name."""
        return {
            name: quantized_linears(candidate.plan.tensors, candidate.model_layout)
            for name, candidate in self.candidate_plans.items()
        }

    @cached_property
    def linears(self) -> Mapping[str, TensorPlan]:
        """Return the tensor plan of every linear of the blocks under the first candidate."""
        return next(iter(self.tensor_plans.values()))

    @cached_property
    def weight_counts(self) -> Mapping[str, int]:
        """Return the number of weights of each linear."""
        return {name: math.prod(linear.shape) for name, linear in self.linears.items()}

    @cached_property
    def linear_budget(self) -> int:
        """Return the number of bytes that the target size leaves for the linears.

        Raises:
            RefusedError: the target is smaller than the smallest mixture or larger than the largest one.
        """
        group_sizes = [
            [self._group_bytes(group, name) for name in self.candidate_plans]
            for group in self.groups
        ]
        min_bytes, max_bytes = sum(map(min, group_sizes)), sum(map(max, group_sizes))
        budget = size_budget(self.target, self.first_plan)
        if not min_bytes <= budget.linear_bytes <= max_bytes:
            too_small = budget.linear_bytes < min_bytes
            direction = "below the smallest" if too_small else "above the largest"
            names_of_candidates = (
                f"{', '.join(self.candidate_plans)}{exclusion_note(self.excluded)}"
            )
            largest = max(
                zip(map(sum, zip(*group_sizes, strict=True)), self.candidate_plans, strict=True)
            )[1]
            detail = (
                budget.memory_parts(min_bytes)
                if too_small
                else f"; {largest} for all of it fits without a size"
            )
            raise RefusedError(
                f"{self.target.text}: it is {direction} choice of the candidates {names_of_candidates}",
                f"{budget.possible_range(min_bytes, max_bytes)}{detail}",
            )
        return budget.linear_bytes

    def check_mixture_allowed(self) -> None:
        """Refuse candidates that the format or the engine accepts alone but not together in one model."""
        names, engine = [*self.candidate_plans], self.recipe.engine
        alternating = itertools.islice(itertools.cycle(names), len(self.groups))
        mixture = Mixture(0.0, tuple(Option(name, 0, 0.0) for name in alternating))
        try:
            self.plan_with(names[0], *self._rules_for(names[0], mixture))
        except RefusedError as error:
            message = f"no mixture of {', '.join(names)}: {error.message}"
            if engine is None:
                raise RefusedError(message, error.hint) from error
            raise RefusedError(f"--for {engine}: {message}", _single_width_hint(engine)) from error

    def best_allocation(self, nats: Mapping[str, Sequence[float]]) -> Allocated:
        """Return the mixture with the lowest loss that fits the target size.

        Args:
            nats: for each linear, the measured loss under each candidate, in the order of the candidates.
        """
        options = self._group_options(nats)
        mixture, planned = self._solve_within_budget(options)
        uniform = {
            name: make_mixture([option[index] for option in options])
            for index, name in enumerate(self.candidate_plans)
        }
        return Allocated(
            recipe=self._mixture_recipe(mixture),
            target=self.request.text,
            nbytes=planned.plan.output_bytes,
            bits=self._bits_per_weight(mixture),
            nats=mixture.nats,
            groups=self.groups,
            chosen=tuple(option.scheme for option in mixture.chosen),
            shares=self._weights_by_scheme(mixture),
            uniform={
                n: (self._file_bytes(option), self._bits_per_weight(option), option.nats)
                for n, option in uniform.items()
            },
            front=tuple(
                (self._file_bytes(option), option.nats) for option in pareto_mixtures(options)
            ),
            left_out=self.excluded,
            engines=planned.plan.engines,
        )

    def estimate_mixture(
        self, notes_before: Sequence[str] = (), measured: int = 0
    ) -> tuple[Recipe, Planned]:
        """Return a mixture of the requested size and its plan before anything is measured.

        The error of every linear is assumed to fall to a quarter with each additional bit.

        Args:
            notes_before: as in `make_plan`.
            measured: as in `make_plan`.
        """
        nats = {
            linear: [
                count * 4.0 ** (-8 * plans[linear].output_bytes / count)
                for plans in self.tensor_plans.values()
            ]
            for linear, count in self.weight_counts.items()
        }
        mixture, planned = self._solve_within_budget(
            self._group_options(nats), notes_before, measured
        )
        return self._mixture_recipe(mixture), planned

    def estimate_plan(self) -> Planned:
        """Return the plan of an estimated mixture of the target size, with a note on what will be measured first."""
        rows, names = self.recipe.calibration, [*self.candidate_plans]
        note = (
            f"measured first: what each of {len(names)} schemes ({', '.join(names)}) costs each of"
            f" {len(self.groups)} groups of linears, on {rows.samples:,} rows of {rows.length:,} tokens,"
            " forward and backward; which gets which is found then, and with it which engines load it: this is another"
            " mixture of that size"
        )
        return self.estimate_mixture((note,), len(names))[1]

    def _solve_within_budget(
        self,
        options: Sequence[Sequence[Option]],
        notes_before: Sequence[str] = (),
        measured: int = 0,
    ) -> tuple[Mixture, Planned]:
        """Return the best mixture whose files, metadata included, are within the target size, and its plan."""
        budget = self.linear_budget
        while True:
            mixture = solve_knapsack(options, budget)
            base = self._most_used_scheme(mixture)
            planned = self.plan_with(
                base, *self._rules_for(base, mixture), notes_before=notes_before, measured=measured
            )
            excess_bytes = (
                planned.plan.output_bytes - self.target.nbytes if self.target.of_files else 0
            )
            if excess_bytes <= 0:
                return mixture, planned
            budget -= math.ceil(excess_bytes)

    def _group_options(self, nats: Mapping[str, Sequence[float]]) -> list[list[Option]]:
        """Return the options of each group, given the loss of each linear under each candidate."""
        return [
            [
                Option(
                    name,
                    self._group_bytes(group, name),
                    math.fsum(nats[linear][index] for linear in group),
                )
                for index, name in enumerate(self.candidate_plans)
            ]
            for group in self.groups
        ]

    def _mixture_recipe(self, mixture: Mixture) -> Recipe:
        base = self._most_used_scheme(mixture)
        rules = (*self._rules_for(base, mixture), Rule(ALL_LINEARS, base))
        return replace(self.recipe, scheme=base, rules=rules)

    def _most_used_scheme(self, mixture: Mixture) -> str:
        """Return the scheme that most weights get."""
        counts = self._weights_by_scheme(mixture)
        return max(counts, key=lambda scheme: (counts[scheme], scheme))

    def _rules_for(self, base: str, mixture: Mixture) -> tuple[Rule, ...]:
        """Return rules for the linears whose scheme differs from ``base``."""
        schemes = {
            name: option.scheme
            for option, group in zip(mixture.chosen, self.groups, strict=True)
            for name in group
            if option.scheme != base
        }
        model_layout, linears = self.first_plan.model_layout, self.linears
        name_parts = {}
        for name in schemes:
            block = model_layout.block_name(linears[name].block)
            prefix, number = block[: block.rindex(".") + 1], block.rpartition(".")[2]
            suffix = re.escape(_expert_template(name.removeprefix(block), linears[name].expert))
            name_parts[name] = (
                re.escape(prefix),
                number,
                suffix.replace(re.escape(_EXPERT_NUMBER), "[0-9]+"),
            )
        return tuple(Rule(*rule) for rule in build_rule_patterns(schemes, name_parts))

    def _weights_by_scheme(self, mixture: Mixture) -> dict[str, int]:
        """Return the number of weights that each scheme gets."""
        counts: dict[str, int] = {}
        for option, group in zip(mixture.chosen, self.groups, strict=True):
            count = sum(self.weight_counts[name] for name in group)
            counts[option.scheme] = counts.get(option.scheme, 0) + count
        return counts

    def _group_bytes(self, group: Sequence[str], scheme: str) -> int:
        """Return the bytes of a group of linears under a candidate."""
        return sum(self.tensor_plans[scheme][name].output_bytes for name in group)

    def _file_bytes(self, mixture: Mixture) -> int:
        """Return the bytes of all weight files of the result under a mixture."""
        first = sum(linear.output_bytes for linear in self.linears.values())
        return self.first_plan.plan.output_bytes - first + mixture.nbytes

    def _bits_per_weight(self, mixture: Mixture) -> float:
        """Return the bits per weight inside the blocks under a mixture."""
        return 8 * mixture.nbytes / sum(self.weight_counts.values())


def plan_search(
    model: str | Path, request: SizeRequest, settings: Settings, out: Path | None
) -> MixtureSearch:
    """Plan the search for a mixture, refusing from headers alone what cannot work.

    Args:
        model: the model, as `quantize` takes it.
        request: the requested size, candidates and recipe.
        settings: settings of the run.
        out: path of a result that is written right after the search, if any; its name may decide the format.

    Raises:
        UsageError: the target is not a size.
        RefusedError: the target is out of reach or belongs to another model, or the format or engine takes no mixtures.
    """
    reference_model, recipe = None, request.recipe
    if request.like is not None:
        reference_model = open_model(resolve_model(str(request.like), settings.offline))
        if not (recipe.format or recipe.engine):
            recipe = replace(recipe, format=GGUF if reference_model.path.is_file() else "")
    target = None
    if request.target is not None:
        target = parse_target(request.target, settings.serving.cache, recipe.tensor_parallel)
    chosen_recipe, run_settings = strip_local_paths(choose_format(recipe, out)[0], settings)
    key = chosen_recipe.format
    opened = open_model(resolve_model(str(model), settings.offline))
    source = without_dropped_heads(
        source_as_read(opened, chosen_recipe, None, run_settings), chosen_recipe
    )
    name = naming.name_for_size(
        source, chosen_recipe.method, key, naming.size_label(request.target, request.like)
    )

    def plan_with(
        scheme: str, *rules: Rule, notes_before: Sequence[str] = (), measured: int = 0
    ) -> Planned:
        recipe_with_rules = replace(
            chosen_recipe, scheme=scheme, rules=(*rules, Rule(ALL_LINEARS, scheme))
        )
        return make_plan(
            recipe_with_rules,
            source,
            None,
            run_settings,
            name=name,
            notes_before=notes_before,
            measured=measured,
        )

    candidate_texts = as_list(request.candidates)
    names = [(name,) for text in candidate_texts for name in str(text).split(",") if name]
    # Engines load the linears of one input, and all experts, as one matrix: one scheme
    join_linears = key != GGUF
    plans, left_out = plan_candidates(
        source,
        plan_with,
        names or default_candidates(key),
        chosen_recipe.engine,
        explicit=bool(names),
        join_linears=join_linears,
    )
    first_plan = plans[next(iter(plans))]
    if reference_model is not None:
        target = size_like(reference_model, first_plan.model_layout)
    assert target is not None
    # An engine that the format does not list cannot load its mixtures: `check_mixture_allowed` says so.
    engine_rules = load_format(key).INFO.engines.get(chosen_recipe.engine or "")
    experts_share_scheme = engine_rules is not None and bool(engine_rules.mixed_experts_reason)
    groups: dict[object, list[str]] = {}
    for linear, tensor in quantized_linears(
        first_plan.plan.tensors, first_plan.model_layout
    ).items():
        groups.setdefault(
            _group_key(linear, tensor, join_linears, experts_share_scheme), []
        ).append(linear)
    search = MixtureSearch(
        request,
        source,
        digest_small_files(source),
        run_settings,
        replace(recipe, format=key),
        target,
        plans,
        left_out,
        tuple(map(tuple, groups.values())),
        plan_with,
    )
    search.linear_budget  # noqa: B018 - refuses a size that is out of reach
    search.check_mixture_allowed()
    return search


def default_candidates(key: str) -> list[Sequence[str]]:
    """Return the texts of the default scheme of each whole bit width in a format, an alias first where one exists."""
    candidates: list[Sequence[str]] = []
    for bits in INTEGER_BITS:
        alias = ALIASES.get(f"W{bits}A16") if key != GGUF else None
        try:
            default = load_format(key).default_scheme(bits)
        except QuantForgeError:  # it has no such width
            continue
        candidates.append((alias, default) if alias and alias != default else (default,))
    return candidates


def plan_candidates(
    source: Checkpoint,
    plan_with: Callable[[str], Planned],
    candidates: Sequence[Sequence[str]],
    engine: str | None,
    *,
    explicit: bool,
    join_linears: bool,
) -> tuple[dict[str, Planned], dict[str, str]]:
    """Plan the model under each candidate scheme.

    Args:
        source: the model as it is read.
        plan_with: returns the plan for one scheme.
        candidates: for each candidate, alternative texts of a scheme; the first one that can be planned is taken.
        engine: the engine that has to load the result, or None.
        explicit: whether the user named the candidates: then each of them has to be possible.
        join_linears: whether linears that read the same input have to share a scheme.

    Returns:
        The plans by scheme, and the reason for each candidate that was excluded.
    """
    plans: dict[str, Planned] = {}
    excluded: dict[str, str] = {}
    for texts in candidates:
        for text in texts:
            if text == KEEP:
                raise UsageError(
                    f"--candidates {text}: 16 bits are not chosen among",
                    "--ignore PATTERN leaves layers as they are",
                )
            try:
                name = str(parse(text))
                planned = plan_with(name)
            except QuantForgeError as error:
                if explicit and engine and isinstance(error, RefusedError):
                    hint = f"leave it out; without --candidates those that {engine} loads are taken"
                    raise RefusedError(f"--candidates {text}: {error.message}", hint) from error
                if explicit:
                    raise
                excluded[text] = error.message
                continue
            schemes = [
                tensor.scheme
                for tensor in quantized_linears(planned.plan.tensors, planned.model_layout).values()
            ]
            if not join_linears and any(tensor and tensor.weight.is_joint for tensor in schemes):
                # Joined matrices share parameters, so their measured errors would not add up.
                raise UsageError(
                    f"--candidates {name}: matrices share its parameters",
                    "a scheme by rows or groups",
                )
            plans[name] = replace(
                planned, model_layout=drop_tied_copy(planned.model_layout, source)
            )
            excluded = {other: reason for other, reason in excluded.items() if other not in texts}
            break
    if len(plans) < 2:
        _refuse_few([*plans], excluded, engine)
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
    for name, planned in plans.items():
        if quantized_linears(planned.plan.tensors, planned.model_layout).keys() != linears:
            raise RefusedError(
                f"{name}: it rounds other linears than the other candidates", "leave it out"
            )
    return plans, excluded


def _refuse_few(names: Sequence[str], excluded: Mapping[str, str], engine: str | None) -> NoReturn:
    """Raise the error for fewer than two candidates."""
    message = f"fewer than two candidates: {', '.join(names) or 'none'}"
    if engine and excluded:
        raise RefusedError(
            f"--for {engine}: {message}{exclusion_note(excluded)}", _single_width_hint(engine)
        )
    example = "name more schemes: --candidates int3:g128:sym,int4:g128:sym"
    raise UsageError(message, next(iter(excluded.values()), example))


def _single_width_hint(engine: str) -> str:
    return f"one width for all: quantforge quantize MODEL --for {engine}"


def exclusion_note(excluded: Mapping[str, str]) -> str:
    """Return the end of a message that lists the candidates: which scheme was excluded and why; "" if none was."""
    if not excluded:
        return ""
    name, reason = next(iter(excluded.items()))
    more_suffix = f" (and {len(excluded) - 1} more)" if len(excluded) > 1 else ""
    return f"; {name} is none: {reason}{more_suffix}"


# ---- the knapsack


@dataclass(frozen=True, slots=True)
class Option:
    """One scheme for a group of linears: its bytes, and its loss in nats per token."""

    scheme: str
    nbytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """One option for every group of linears, with the total loss in nats per token."""

    nats: float
    chosen: tuple[Option, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all groups."""
        return sum(option.nbytes for option in self.chosen)


def _group_key(
    name: str, tensor: TensorPlan, join_linears: bool, experts_share_scheme: bool
) -> object:
    """Return the key of the group that a linear belongs to: linears with equal keys get the same scheme.

    Engines compute the experts of a layer in one product, and a GGUF file stores each matrix of all experts as one
    tensor.
    """
    if tensor.expert >= 0:
        return (
            -1 if experts_share_scheme else tensor.block,
            "" if join_linears else _expert_template(name, tensor.expert),
        )
    return (tensor.block, tensor.shared) if join_linears and tensor.shared else name


def _expert_template(name: str, expert: int) -> str:
    """Return the name of an expert's linear with a placeholder for the expert's index; other names unchanged."""
    prefix, number, suffix = name.rpartition(f".{expert}.") if expert >= 0 else (name, "", "")
    return f"{prefix}.{_EXPERT_NUMBER}.{suffix}" if number else name


def build_rule_patterns(
    schemes: Mapping[str, str], name_parts: Mapping[str, tuple[str, str, str]]
) -> list[tuple[str, str]]:
    """Return rules ``(pattern, scheme)`` that give linears their schemes, one for each kind of linear and scheme.

    Args:
        schemes: the scheme of each linear, by canonical name.
        name_parts: for each linear, a pattern for its name up to the block index, the index, and a pattern for the
            rest.
    """
    block_indices: dict[tuple[str, str, str], dict[str, None]] = {}
    for name, scheme in schemes.items():
        prefix, number, suffix = name_parts[name]
        block_indices.setdefault((prefix, suffix, scheme), {})[number] = None
    return [
        (f"re:{prefix}({'|'.join(numbers)}){suffix}", scheme)
        for (prefix, suffix, scheme), numbers in block_indices.items()
    ]


def solve_knapsack(groups: Sequence[Sequence[Option]], budget: int) -> Mixture:
    """Return the options, one for each group, with the lowest total loss whose bytes are at most ``budget``.

    Ties are broken by fewer bytes, then by earlier options of earlier groups.

    Raises:
        RefusedError: even the smallest options exceed the budget.
    """
    import numpy as np

    hulls = [_convex_hull(options) for options in groups]
    smallest = sum(options[0].nbytes for options in hulls)
    if smallest > budget:
        raise RefusedError(
            f"the smallest options take {smallest:,} bytes of {budget:,}", "a larger target"
        )
    byte_range = sum(options[-1].nbytes for options in hulls) - smallest
    step = max(1, -(-min(budget - smallest, byte_range) // KNAPSACK_STEPS))
    width = min(budget - smallest, byte_range) // step + 1
    best = np.zeros(width)
    picks = np.zeros((len(hulls), width), dtype=np.int8)
    for group, options in enumerate(hulls):
        sums = np.full((len(options), width), np.inf)
        for index, option in enumerate(options):
            extra_steps = -(-(option.nbytes - options[0].nbytes) // step)
            if extra_steps < width:
                sums[index, extra_steps:] = best[: width - extra_steps] + option.nats
        picks[group] = sums.argmin(0)
        best = sums.min(0)
    position = int(best.argmin())
    chosen_options: list[Option] = []
    for options, row in zip(reversed(hulls), picks[::-1], strict=True):
        option = options[int(row[position])]
        position -= -(-(option.nbytes - options[0].nbytes) // step)
        chosen_options.append(option)
    return make_mixture(chosen_options[::-1])


def make_mixture(chosen_options: Sequence[Option]) -> Mixture:
    """Return the mixture of some options, with the sum of their losses."""
    return Mixture(math.fsum(option.nats for option in chosen_options), tuple(chosen_options))


def pareto_mixtures(groups: Sequence[Sequence[Option]]) -> list[Mixture]:
    """Return the best mixtures from the smallest size to the largest, each with less loss than the one before."""
    min_bytes, max_bytes = (
        sum(min_or_max(option.nbytes for option in options) for options in groups)
        for min_or_max in (min, max)
    )
    mixtures: list[Mixture] = []
    for point in range(PARETO_POINTS):
        mixture = solve_knapsack(
            groups, min_bytes + (max_bytes - min_bytes) * point // (PARETO_POINTS - 1)
        )
        if not mixtures or mixture.nats < mixtures[-1].nats:
            mixtures.append(mixture)
    return mixtures


def _convex_hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of bytes and loss, by increasing bytes."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda candidate: (candidate.nbytes, candidate.nats)):
        if hull and option.nats >= hull[-1].nats:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.nats - first.nats) / max(1, second.nbytes - first.nbytes)


# ---- the outcome


@dataclass(frozen=True, slots=True)
class Allocated:
    """The result of an allocation: a recipe that gives every linear its scheme.

    Attributes:
        recipe: the recipe.
        target: the target size as it was typed.
        nbytes: planned bytes of all weight files of the result.
        bits: bits per weight inside the blocks.
        nats: expected KL divergence per token, in nats, caused by the errors inside the blocks.
        groups: canonical names of the linears of each group.
        chosen: the scheme of each group.
        shares: number of weights that each scheme gets.
        uniform: bytes, bits per weight and nats of each candidate used for all linears, by scheme.
        front: bytes and nats of the best mixtures, from the smallest to the largest.
        left_out: schemes that the format cannot store or the engine cannot load, each with the reason.
        engines: for each engine, whether it loads the result.
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
        """Return the recipe as a TOML file, after a comment line with its planned bits per weight and size."""
        planned = f"{self.bits:.3f} bits per weight in blocks, files {size(self.nbytes)}"
        return f"# planned: {planned}\n\n{self.recipe.to_toml()}".encode()

    def document(self) -> dict[str, Any]:
        """Return the allocation as plain data for JSON."""
        return {
            "target": self.target,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits,
            "kl_nats": self.nats,
            "groups": [
                {"linears": linears, "scheme": scheme}
                for linears, scheme in zip(self.groups, self.chosen, strict=True)
            ],
            "uniform": [
                {"scheme": name, "bytes": size, "bits_per_weight": bits, "kl_nats": nats}
                for name, (size, bits, nats) in self.uniform.items()
            ],
            "pareto_front": [{"bytes": size, "kl_nats": nats} for size, nats in self.front],
            "left_out": dict(self.left_out),
            "engines": [asdict(verdict) for verdict in self.engines],
        }
