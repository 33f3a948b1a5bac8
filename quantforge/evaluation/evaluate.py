"""`eval`: a reference and its descendants, measured under one protocol, one model in memory at a time.

Quality is computed in float32: rounding of activations would only blur what quantized weights do.
Speed and memory are measured in bfloat16, as an engine would run, in a pass of its own, so that
nothing of the evaluation counts as memory of the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quantforge.evaluation.cache_quality import tried
from quantforge.evaluation.cache_trial import CacheTrial, trial_of
from quantforge.evaluation.comparable import answering_of, check_comparable, positions_of
from quantforge.evaluation.deployment import as_deployed
from quantforge.evaluation.figures import plain
from quantforge.evaluation.generated import Answering, Prompts
from quantforge.evaluation.kept_reference import KeptReference
from quantforge.evaluation.kept_rows import KeptRows
from quantforge.evaluation.llama_cpp import perplexity_in_engine
from quantforge.evaluation.speed import read_bandwidth
from quantforge.evaluation.tasks import Tasks
from quantforge.evaluation.tasks import run as run_tasks
from quantforge.evaluation.verdict import Verdict, judge
from quantforge.evaluation.windows import LENGTH, Protocol, Windows, cut
from quantforge.execution.progress import phase, tell
from quantforge.formats.opening import open_plain_source
from quantforge.formats.sources.adapter import open_adapter
from quantforge.results.manifest import versions
from quantforge.runtime.linear import EXACT
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.put_adapter import open_correction, with_low_rank
from quantforge.runtime.text_side import as_input_errors, tokenizer_of

SCHEMA = "quantforge.eval/1"
EPOCH = "SOURCE_DATE_EPOCH"  # https://reproducible-builds.org/specs/source-date-epoch/


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Settings of an evaluation: what is scored, and how.

    Attributes:
        text: what is scored.
        text_name: how the report names it.
        text_found: nobody named it: it lies beside the reference, or is the built-in one.
        windows: at most so many.
        length: tokens of a window.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: in which quality is computed.
        speed: measure speed and memory as well.
        speed_dtype: in which.
        cache: kind of the KV cache when speed is measured, see `quantforge.architectures.cache_kinds`.
        caches: kinds whose quality is measured too, against a cache of 16 bits.
        activations: directory for the reference's hidden states; in memory when None.
        engine: "llama.cpp" scores GGUF files in that engine too.
        adapter: what is merged into the reference.
        correction: an adapter that is put on the other model, whose weights stay as they are.
        tasks: of lm-eval, answered by every model.
        input_bits: to which products of a descendant's packed weights round activations: 16 or 8.
        prompts: answered by the reference, whose text is then scored, and by every model.
        note: told what a person should know before the work.
    """

    text: str = field(repr=False)
    text_name: str
    windows: int = 80
    length: int = LENGTH
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    speed: bool = True
    speed_dtype: torch.dtype = torch.bfloat16
    cache: str = ""
    caches: tuple[str, ...] = ()
    activations: Path | None = None
    engine: str = ""
    adapter: Path | None = None
    correction: Path | None = None
    tasks: Tasks | None = None
    prompts: Prompts | None = None
    text_found: bool = False
    input_bits: int = EXACT
    note: Callable[[str], None] = field(default=lambda _: None, repr=False)


@dataclass(frozen=True, slots=True)
class Made:
    """Day (ISO 8601, UTC) and versions of an evaluation; the day alone, so that its hour changes no report."""

    date: str
    versions: Mapping[str, str]

    @classmethod
    def now(cls) -> Made:
        """Return today and what is installed; the day of ``SOURCE_DATE_EPOCH`` where that is set."""
        epoch = os.environ.get(EPOCH, "")
        moment = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
        return cls(moment.date().isoformat(), versions())

    def to_json(self) -> dict[str, Any]:
        """Return both as plain data."""
        return {"date": self.date, "versions": dict(self.versions)}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result: the protocol, and one row of plain data per model, the reference first.

    ``caches`` is how caches were tried, if they were; ``options`` are those that it was made with, if they are known.
    """

    protocol: Protocol
    rows: tuple[Mapping[str, Any], ...]
    prompts: Prompts | None = None
    made: Made = field(default_factory=Made.now)
    options: EvaluationOptions | None = None
    caches: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> Verdict:
        """Return which models nothing beats, who wins by what, and the same in words."""
        return judge(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the document ``quantforge.eval/1``."""
        return {
            "schema": SCHEMA,
            **self.made.to_json(),
            "protocol": self.protocol.to_json(),
            "generated": None if self.prompts is None else self.prompts.to_json(),
            "caches": self.caches,
            "models": [dict(row) for row in self.rows],
            "verdict": self.verdict.to_json(),
        }


@as_input_errors()
def evaluate(
    reference: Path,
    models: Sequence[Path],
    options: EvaluationOptions,
    kept: KeptRows | None = None,
) -> Evaluation:
    """Measure a reference and models that descend from it.

    Args:
        reference: what the models are compared with.
        models: those that descend from it.
        options: what is measured.
        kept: rows that were measured before, and where others are kept.

    Raises:
        InputError: a model, the text or a task cannot be used, tokenizers differ, or a result is NaN or infinite.
        RefusedError: the head of a model is not understood.
        UsageError: an engine is named whose package is not installed.
    """
    tell("tokens of the text")
    windows = cut(tokenizer_of(reference), options.text, options.windows, options.length)
    if len(windows.ids) < options.windows:
        options.note(
            f"the text gives {len(windows.ids)} windows of {options.length} tokens"
            f" (at most {options.windows} were to be scored)"
        )
    for path in (reference, *models):
        check_comparable(path, reference, options.text, windows)
    answering = answering_of((reference, *models), options.prompts)
    trial = trial_of(
        (reference, *models), options.text, options.caches, options.windows * options.length
    )
    tell("read bandwidth of this machine")
    bandwidth = read_bandwidth(options.device) if options.speed else math.nan
    kept = kept or KeptRows()
    paths = (reference, *models)
    rows = tuple(_measured(paths, (windows, trial), answering, options, bandwidth, kept))
    told = None if trial is None else trial.to_json()
    return Evaluation(
        _protocol(windows, options), rows, options.prompts, options=options, caches=told
    )


def _measured(
    paths: Sequence[Path],
    scored: tuple[Windows, CacheTrial | None],
    answering: Answering | None,
    options: EvaluationOptions,
    bandwidth: float,
    kept: KeptRows,
) -> Iterator[Mapping[str, Any]]:
    """Yield one row per model; the first is the reference. One model is in memory at a time."""
    windows, trial = scored
    reference: KeptReference | None = None
    before = tuple(kept.rows)
    try:
        for number, path in enumerate(paths):
            # The reference is scored once more, unless there is nothing to compare with it.
            if number < len(before) and (number or len(before) == len(paths)):
                yield before[number]
                continue
            with phase("", 1 / len(paths)):
                with phase(f"loading {path.name}", 0.05):
                    source = open_plain_source(path, options.adapter) if reference is None else None
                    bits = EXACT if number == 0 else options.input_bits
                    loaded = load(path, options.device, options.dtype, source, input_bits=bits)
                    corrected = options.correction if number else None
                    if corrected is not None:
                        loaded = with_low_rank(loaded, open_correction(corrected))
                    _tell_kept(path, loaded, options, bits)
                with phase(f"scoring {path.name}", 0.6, "windows of the text"):
                    if reference is None:
                        reference = KeptReference(loaded, windows, options.activations, answering)
                        row = reference.row
                    else:
                        row = reference.compare(loaded)
                if trial is not None and number >= len(before):
                    with phase(f"caches of {path.name}", 0.75):
                        row["caches"] = tried(loaded, trial)
                if options.tasks is not None:
                    row |= _answered(path, loaded, options.tasks)
                del loaded  # before the next one comes in
                if number < len(before):
                    yield before[number]
                    continue
                # Only now, when everything that is loaded once and for all has been loaded.
                if options.speed and corrected is None:
                    with phase(f"speed of {path.name}", 0.9):
                        row |= as_deployed(path, windows, options, bandwidth, bits)
                if options.engine and path.is_file():
                    row["llama_cpp_perplexity"] = perplexity_in_engine(path, windows)
            row = {key: plain(value) for key, value in row.items()}
            kept.keep(row)
            yield row
    finally:
        if reference is not None:
            reference.close()


def _tell_kept(path: Path, loaded: Loaded, options: EvaluationOptions, bits: int) -> None:
    """Note which products of a model do not round activations as they were asked to."""
    if bits < EXACT:
        for event in loaded.events:
            options.note(f"{path.name}: {event.detail}")


def _answered(path: Path, loaded: Loaded, tasks: Tasks) -> dict[str, Any]:
    """Let a model answer the tasks."""
    from quantforge.evaluation.task_model import TaskModel  # imports lm-eval

    with phase(f"tasks on {path.name}", 0.5):
        model = TaskModel(loaded.model, tokenizer_of(path), positions_of(path), loaded.kv_scales)
        return {"tasks": run_tasks(model, tasks)}


def _protocol(windows: Windows, options: EvaluationOptions) -> Protocol:
    return Protocol(
        text=options.text_name,
        tokens_sha256=windows.sha256,
        windows=len(windows.ids),
        length=options.length,
        bos=windows.bos,
        tokens_scored=windows.targets.numel(),
        dtype=_name(options.dtype),
        speed_dtype=_name(options.speed_dtype) if options.speed else "",
        device=options.device,
        threads=torch.get_num_threads(),
        windows_asked=options.windows,
        adapter=_cited(options.adapter),
        correction=_cited(options.correction),
        input_bits=options.input_bits,
    )


def _cited(adapter: Path | None) -> str:
    return "" if adapter is None else open_adapter(adapter).cited_name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
