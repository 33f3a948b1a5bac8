"""Allocate: bits for each group of linears, so that a model of a given size diverges least from its source.

Three steps: plan candidates from headers (`search_of`); measure what each costs each linear (`measured`); choose the
mixture that loses least (`MixtureSearch.found`). `quantize` with a size does the same and rounds by what was
found, and `plan` with a size shows a likely mixture.

What is measured of a block is written down beside the result that is being made, and an interrupted measurement is
resumed. It does not depend on the size that is asked for, only on the model, the candidates and the calibration rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from quantforge.arguments import as_list, check_arguments
from quantforge.checkpoint.disk import check_new, run_folder, save
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.lock import Lock
from quantforge.checkpoint.reader import Checkpoint
from quantforge.checkpoint.stage import unwritable
from quantforge.errors import UsageError
from quantforge.execution.journal import Journal
from quantforge.execution.progress import followed, phase
from quantforge.formats import GGUF, format_of, targets
from quantforge.formats.format_choice import chosen_format
from quantforge.formats.opening import open_model
from quantforge.planning import naming
from quantforge.planning.allocation import (
    Allocated,
    Allocation,
    Option,
    Point,
    check_mixed,
    least_bits,
    plans_of,
    solved,
    usual,
)
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import Planned, make_plan
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.planning.size_target import (
    SizeTarget,
    memory_use,
    parse_target,
    scale_of,
    size_like,
)
from quantforge.planning.source import source_as_read, without_dropped_heads
from quantforge.planning.weight_traffic import expert_share
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe, Rule
from quantforge.results.manifest import small_files
from quantforge.results.publish import digest_source
from quantforge.results.significant import significant
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.job import plan_job

EVERY = "re:.*"  # every linear of blocks: a scheme alone would be a mixture in GGUF
_DIGEST = 12  # hex digits in the name of the directory in which a measurement is kept


@dataclass(frozen=True, slots=True)
class AskedSize:
    """A size that is asked for: a target as it is typed, or a file that is to be matched.

    Attributes:
        target, like: one of these.
        candidates: schemes to choose from; those that the format holds in usual widths where there are none.
        recipe: what is wanted beside the size, without a width.
    """

    target: str | None
    like: str | Path | None
    candidates: str | Sequence[str]
    recipe: Recipe

    @property
    def text(self) -> str:
        """Return the size as it was asked for."""
        return str(self.target or self.like)


@check_arguments(RecipeOptions)
@torch_defaults()
def allocate(
    model: str | Path,
    target: str | None = None,
    out: str | Path | None = None,
    recipe: RecipeSource = None,
    settings: Settings | None = None,
    *,
    like: str | Path | None = None,
    candidates: str | Sequence[str] = (),
    **options: Unpack[RecipeOptions],
) -> Allocated:
    """Find the scheme of every linear with which a model of a given size diverges least from its source.

    Args:
        model: as of `quantize`.
        target: bits per weight inside of blocks (``3.5bpw``), bytes of all weight files (``18GB``, ``17GiB``), or
            memory of a device that holds the cache of a sequence as well (``24GB@32k``; ``24GB@8x32k`` of eight).
        out: a recipe file to write.
        recipe: what else is wanted; its method is gptq, and it names no width.
        settings: how it runs; ``overwrite`` replaces ``out``; the type of the cache, for a target of memory.
        like: in place of a target, a GGUF file or another quantized form of the same model: as many bytes as its files
            have. Its format is taken too where none is asked for.
        candidates: schemes to choose from, as a list or with commas between them; those that the format holds in usual
            widths when left out.
        options: choices that override the recipe; an ``engine`` leaves the candidates that it loads mixed.

    Raises:
        UsageError: the target is no size, a method that rounds otherwise, or a width beside the candidates.
        RefusedError: the target is out of reach, the format or the engine takes no mixture, or gradients of the model
            are not computed.
    """
    settings = settings or Settings()
    if target is None and like is None:
        raise UsageError(
            "no size is asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    asked = asked_size(target, like, candidates, recipe, options)
    if out is not None:
        check_new(Path(out), "--output", overwrite=settings.overwrite)
    check_device(settings.device)
    with followed(settings.progress):
        with phase("planning", 0.02, "headers of the model"):
            search = search_of(model, asked, settings, None)
            if settings.serving.cache and search.target.load is None:
                raise UsageError(
                    f"--cache {settings.serving.cache}: of how many tokens",
                    "e.g. --target 24GB@32k",
                )
            events = (event for one in search.plans.values() for event in one.plan.substitutions)
            settings.policy.check([*events])
        with measured(search, Path(out).absolute().parent if out is not None else None) as nats:
            found = search.found(nats, asked.text)
            if out is not None:
                save(Path(out), found.written(), overwrite=settings.overwrite)
    return found


@contextmanager
def sized_recipe(
    model: str | Path, asked: AskedSize, out: Path | None, settings: Settings
) -> Iterator[tuple[Recipe, Path]]:
    """Find the recipe that `allocate` writes, and say where the result goes: ``out``, or where `naming` says.

    What was measured is kept beside the result until the body ends. The plan of a likely mixture is announced before.

    Raises:
        QuantForgeError: as `allocate`, and what of the result is refused, before anything is measured.
    """
    check_device(settings.device)
    with phase("planning", 0.01, "headers of the model"):
        search = search_of(model, asked, settings, out)
        likely, planned = search.likely()
        place = resolve(str(model), settings.offline)
        out = out or naming.place(planned.plan.name, place)
        likely, own = strip_local_paths(likely, settings)
        job = plan_job(open_model(place), likely, out, own)
        if not job.stage.begun:
            with job.stage:  # refuses what lies there, before anything is measured
                pass
        job.check_text()
        settings.announce(job.planned.plan, job.stage.named)
    with measured(search, out.absolute().parent, 0.7) as nats:
        found = search.found(nats, asked.text)
        settings.note(
            f"found: {found.bits:.3g} bits per weight, expected KL {significant(found.nats)}; rounding by that recipe"
        )
        yield found.recipe, out


def asked_size(
    target: str | None, like: str | Path | None, candidates: str | Sequence[str], recipe: RecipeSource,
    options: RecipeOptions,
) -> AskedSize:  # fmt: skip
    """Return the size that is asked for beside a recipe.

    Raises:
        UsageError: candidates without a size, two sizes, or a width, a method or an effort beside one.
    """
    if target is None and like is None:
        raise UsageError("--candidates: chosen among for which size", "add --target 3.5bpw")
    if target is not None and like is not None:
        raise UsageError(
            "two sizes are asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    # What an engine is fast with in one width is not meant here.
    engine = options.pop("engine", None)
    devices = None if engine is None else options.pop("tensor_parallel", None)
    wanted = build_recipe(recipe, **options)
    if engine is not None:
        wanted = replace(wanted, engine=engine, tensor_parallel=devices or wanted.tensor_parallel)
        targets.target_of(engine)
    _check_width_open(wanted)
    return AskedSize(target, like, candidates, replace(wanted, method=GPTQ))


def _check_width_open(wanted: Recipe) -> None:
    """Refuse choices that the size decides on, or with which errors are not measured."""
    usual = Recipe().effort
    if wanted.method not in {"", GPTQ}:
        raise UsageError(
            f"--method {wanted.method}: errors are measured of {GPTQ} alone",
            "leave --method out",
        )
    if wanted.bits or wanted.scheme or wanted.type or wanted.rules:
        raise UsageError(
            "a width, a type or rules are given, and the size decides on them",
            "name --candidates instead, or leave the size out",
        )
    if wanted.guide:
        raise UsageError(f"--guide {wanted.guide}: errors are measured without it", "leave it out")
    if wanted.effort != usual:
        raise UsageError(
            f"--effort {wanted.effort}: errors are measured at {usual}",
            "remove `effort` from the recipe, or the option; `quantforge allocate` writes a recipe, then"
            f" `quantforge quantize --recipe FILE --effort {wanted.effort}`",
        )


@dataclass(frozen=True, slots=True)
class MixtureSearch:
    """A search that can begin, as far as headers tell.

    Attributes:
        source: the model as `quantize` would read it.
        before: its small files, by name: size and digest.
        settings: how it runs, with the files that the recipe cites.
        wanted: what is asked for beside the size, with its format.
        target: the size.
        plans: of each candidate alone, by its scheme.
        left_out: which usual schemes are no candidates, and why.
        room: bytes that the linears of blocks may take.
        planned: returns the plan of a scheme for all of these, with rules before it, called by the size.
    """

    source: Checkpoint
    before: Mapping[str, Any]
    settings: Settings
    wanted: Recipe
    target: SizeTarget
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

    def likely(self, first: Sequence[str] = (), measured: int = 0) -> tuple[Recipe, Planned]:
        """Return a mixture of the size that is asked for, and its plan, before anything is measured.

        ``first`` and ``measured`` are as of `make_plan`.

        Errors are taken to be a quarter with each bit more, everywhere alike.
        """
        tables = {name: dict(self.allocation.sizes(place)) for place, name in enumerate(self.plans)}
        nats = {
            linear: [weights * 4.0 ** (-8 * tables[name][linear][0] / weights) for name in tables]
            for linear, (_, weights) in tables[next(iter(tables))].items()
        }
        point, final = self._solved(self.allocation.options(nats), first, measured)
        return self._recipe(point), final

    def _recipe(self, point: Point) -> Recipe:
        base, rules = self.allocation.rules_of(point)
        return replace(self.wanted, scheme=base, rules=(*rules, Rule(EVERY, base)))

    def _solved(
        self,
        choices: Sequence[Sequence[Option]],
        first: Sequence[str] = (),
        measured: int = 0,
    ) -> tuple[Point, Planned]:
        """Return the best choice and its plan; its files, rules in their headers included, are no larger than asked."""
        room = self.room
        while True:
            point = solved(choices, room)
            base, rules = self.allocation.rules_of(point)
            found = self.planned(base, *rules, first=first, measured=measured)
            over = found.plan.output_bytes - self.target.nbytes if self.target.of_files else 0
            if over <= 0:
                return point, found
            room -= math.ceil(over)


def likely_plan(search: MixtureSearch) -> Planned:
    """Return the plan of a mixture of a size, with a note on what is measured first."""
    rows, names = search.wanted.calibration, [*search.plans]
    note = (
        f"measured first: what each of {len(names)} schemes ({', '.join(names)}) costs each of"
        f" {len(search.allocation.groups)} groups of linears, on {rows.samples:,} rows of {rows.length:,} tokens,"
        " forward and backward; which gets which is found then, and with it which engines load it: this is another"
        " mixture of that size"
    )
    return search.likely((note,), len(names))[1]


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
    size = naming.word_for(asked.target, asked.like)
    name = naming.sized(source, read.method, key, size)

    def planned(scheme: str, *rules: Rule, first: Sequence[str] = (), measured: int = 0) -> Planned:
        wanted = replace(read, scheme=scheme, rules=(*rules, Rule(EVERY, scheme)))
        return make_plan(wanted, source, None, own, name=name, first=first, measured=measured)

    typed = as_list(asked.candidates)
    given = [(name,) for one in typed for name in str(one).split(",") if name]
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
    return MixtureSearch(
        source, small_files(source), own, replace(recipe, format=key), target, plans, left_out,
        allocation, room, planned,
    )  # fmt: skip


@contextmanager
def measured(
    search: MixtureSearch, beside: Path | None, share: float = 1.0
) -> Iterator[dict[str, list[float]]]:
    """Measure the candidates, for a body that uses what was found: nats of each linear under each of them.

    What was measured is kept in a directory ``beside`` until the body ends without an error; the same search goes on
    with it. Without one it is kept nowhere.

    Args:
        search: of which candidates.
        beside: the directory in which a result is to lie.
        share: of the work of the verb that this is.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: gradients of the model are not computed, or more events than the policy allows.
        BusyError: another run measures the same.
    """
    import torch

    from quantforge.execution.calibration import calibrated_for
    from quantforge.execution.candidate_errors import candidate_errors
    from quantforge.execution.execute import RunInputs
    from quantforge.execution.journal import fingerprint_of
    from quantforge.numerics.threads import reproducible

    settings, plans = search.settings, [*search.plans.values()]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with reproducible():
        with phase("reading", 0.05 * share, "calibration text"):
            source, files = digest_source(search.source, search.before, settings)
            calibrated = calibrated_for(source, plans[0], settings)
            settings.policy.check(calibrated.events)
            for event in calibrated.events:
                settings.note(f"{event.kind}: {event.detail}")
        recipe = search.wanted.to_toml()
        fingerprint = fingerprint_of(recipe, files, calibrated, settings.device, None)
        fingerprint["candidates"] = ", ".join(search.plans)
        inputs = RunInputs(plans[0], settings, source, files, calibrated, {}, fingerprint)
        with _kept(beside, fingerprint) as work:
            with phase("measuring", 0.9 * share):
                found = candidate_errors(inputs, calibrated.sample, plans, work)
            yield found
            work.remove()


@contextmanager
def _kept(beside: Path | None, fingerprint: Mapping[str, str]) -> Iterator[Journal]:
    """Open the directory of a measurement, which no other run has at the same time."""
    if beside is None:
        with tempfile.TemporaryDirectory(prefix="quantforge-allocate-") as scratch:
            yield Journal(Path(scratch) / "journal", fingerprint)
        return
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    place = run_folder(beside / f"allocate-{digest[:_DIGEST]}")
    lock = Lock(place, "measures the same candidates for a recipe in this folder")
    try:
        lock.take()
    except OSError as error:
        raise unwritable(beside, error) from error
    try:
        work = Journal(lock.directory / "journal", fingerprint)
        try:
            yield work
        except BaseException as error:
            error.add_note(
                f"the same command again goes on from what was measured, which {place} keeps until then"
                f" (to give it up: rm -r {shlex.quote(str(place))})"
            )
            raise
        finally:
            work.close()
    finally:
        lock.release()
