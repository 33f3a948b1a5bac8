"""Search for a mixture of schemes of a given size, planned from headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.reader import Checkpoint
from quantforge.formats import GGUF, format_of
from quantforge.formats.format_choice import settled
from quantforge.formats.opening import open_model
from quantforge.planning import naming
from quantforge.planning.allocation import Allocated, Allocation
from quantforge.planning.budgets import Option, Point, solved
from quantforge.planning.candidates import check_mixed, least_bits, plans_of, usual
from quantforge.planning.changed_source import heads_as_asked
from quantforge.planning.cited_files import cited
from quantforge.planning.likeness import format_like, size_like
from quantforge.planning.planned_run import planned_of, source_of
from quantforge.planning.planner import Planned
from quantforge.planning.run_work import with_measuring
from quantforge.planning.size_target import SizeTarget, memory_use, parse_target, scale_of
from quantforge.planning.weight_traffic import expert_share
from quantforge.recipe import Recipe, Rule
from quantforge.results.source_files import small_files
from quantforge.settings import Settings
from quantforge.verbs.asked_size import AskedSize
from quantforge.verbs.given_options import listed

EVERY = "re:.*"  # every linear of blocks: a scheme alone would be a mixture in GGUF


@dataclass(frozen=True, slots=True)
class MixtureSearch:
    """A search that can begin, as far as headers tell.

    Attributes:
        source: the model as `quantize` would read it.
        before: its small files, by name: size and digest.
        settings: how it runs, with the files that the recipe cites.
        wanted: what is asked for beside the size, with its format.
        target, size: the size, and the word for it in names.
        plans: of each candidate alone, by its scheme.
        left_out: which usual schemes are no candidates, and why.
        room: bytes that the linears of blocks may take.
        planned: returns the plan of a scheme for all of these, with rules before it.
    """

    source: Checkpoint
    before: Mapping[str, Any]
    settings: Settings
    wanted: Recipe
    target: SizeTarget
    size: str
    plans: Mapping[str, Planned]
    left_out: Mapping[str, str]
    allocation: Allocation
    room: int
    planned: Callable[..., Planned]

    def found(self, nats: Mapping[str, Sequence[float]], target: str) -> Allocated:
        """Return the mixture that loses least; ``nats`` are of each linear under each candidate."""
        choices = self.allocation.options(nats)
        point, final = self._solved(choices)
        told = self.allocation.outcome(point, choices)
        bits = {name: found[1] for name, found in told["uniform"].items()}
        return Allocated(
            recipe=self._recipe(point), target=target, left_out=self.left_out, engines=final.plan.engines,
            memory=memory_use(self.target, final), nbytes=final.plan.output_bytes,
            least=least_bits(str(self.wanted.format), self.plans, final, bits),
            **told,
        )  # fmt: skip

    def likely(self) -> tuple[Recipe, Planned]:
        """Return a mixture of the size that is asked for, and its plan called by that, before anything is measured.

        Errors are taken to be a quarter with each bit more, everywhere alike.
        """
        tables = {name: dict(self.allocation.sizes(place)) for place, name in enumerate(self.plans)}
        nats = {
            linear: [weights * 4.0 ** (-8 * tables[name][linear][0] / weights) for name in tables]
            for linear, (_, weights) in tables[next(iter(tables))].items()
        }
        point, final = self._solved(self.allocation.options(nats))
        name = naming.sized(self.source, final.plan.method, final.plan.format, self.size)
        return self._recipe(point), replace(final, plan=replace(final.plan, name=name))

    def _recipe(self, point: Point) -> Recipe:
        base, rules = self.allocation.rules_of(point)
        return replace(self.wanted, scheme=base, rules=(*rules, Rule(EVERY, base)))

    def _solved(self, choices: Sequence[Sequence[Option]]) -> tuple[Point, Planned]:
        """Return the best choice and its plan; its files, rules in their headers included, are no larger than asked."""
        room = self.room
        while True:
            point = solved(choices, room)
            base, rules = self.allocation.rules_of(point)
            found = self.planned(base, *rules)
            over = found.plan.output_bytes - self.target.nbytes if self.target.of_files else 0
            if over <= 0:
                return point, found
            room -= math.ceil(over)


def likely_plan(search: MixtureSearch) -> Planned:
    """Return the plan of a mixture of a size, with a note on what is measured first."""
    _, planned = search.likely()
    rows, names = search.wanted.calibration, [*search.plans]
    note = (
        f"measured first: what each of {len(names)} schemes ({', '.join(names)}) costs each of"
        f" {len(search.allocation.groups)} groups of linears, on {rows.samples:,} rows of {rows.length:,} tokens,"
        " forward and backward; which gets which is found then, and with it which engines load it: this is another"
        " mixture of that size"
    )
    plan, work = planned.plan, planned.plan.work
    if work is not None:
        work = with_measuring(work, plan.tensors, rows.samples, len(names))
    return replace(planned, plan=replace(plan, work=work, notes=(note, *plan.notes)))


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
            recipe = replace(recipe, format=format_like(other))
    target = None
    if asked.target is not None:
        target = parse_target(asked.target, settings.serving.cache, recipe.tensor_parallel)
    read, own = cited(settled(recipe, out)[0], settings)
    key = read.format
    opened = open_model(resolve(str(model), settings.offline))
    source = heads_as_asked(source_of(opened, read, None, own), read.mtp)

    def planned(scheme: str, *rules: Rule) -> Planned:
        wanted = replace(read, scheme=scheme, rules=(*rules, Rule(EVERY, scheme)))
        return planned_of(source, wanted, None, own)

    given = [(str(one),) for one in listed(asked.candidates, "candidates", '["int4:g128:sym"]')]
    plans, left_out = plans_of(
        source, planned, given or usual(key), read.engine, given=bool(given), together=key != GGUF
    )  # fmt: skip
    first = plans[next(iter(plans))]
    read_alone = target is not None and target.per_token
    share = expert_share(first.matched, first.plan.tensors) if read_alone else 1.0
    # An engine that the format does not list loads none of its mixtures: `check_mixed` says so.
    loader = format_of(key).ABOUT.engines.get(read.engine or "")
    alike = loader is not None and bool(loader.mixed_experts)
    allocation = Allocation(plans, together=key != GGUF, alike=alike, share=share)
    if other is not None:
        target = size_like(other, first.matched)
    assert target is not None
    room = allocation.room(scale_of(target, first), left_out)
    check_mixed(planned, allocation, [*plans], read.engine)
    size = naming.word_for(asked.target, asked.like)
    return MixtureSearch(
        source, small_files(source), own, replace(recipe, format=key), target, size, plans, left_out,
        allocation, room, planned,
    )  # fmt: skip
