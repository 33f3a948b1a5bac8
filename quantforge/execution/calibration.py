"""Calibration rows for a model: drawn from a source, checked against the plan, with their events.

The model may write them itself (``self``): no text is needed, and the text is in the model's own distribution. Each row
begins with the token that begins texts (or ends them, where there is none) and is sampled at temperature 1, the
distribution that the model was trained to have. Rows are sampled together, from a seeded generator of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.configuration import embedding_rows
from quantforge.architectures.match import require_declarations
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import open_model, tokenizer_directory
from quantforge.numerics.products import cutting
from quantforge.planning.calibration_rows import check_towers, few_rows, named_image
from quantforge.planning.planner import Planned
from quantforge.plans import Plan
from quantforge.recipe import CalibrationOptions
from quantforge.settings import Settings
from quantforge_calibration import SourceError
from quantforge_calibration.chat import load_chat_template
from quantforge_calibration.citation import titles
from quantforge_calibration.draw import Request, draw
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.sampler import Sample, tokens_per_column_warning
from quantforge_calibration.tokenizer import load_tokenizer

BATCH = 32  # rows that the model writes together


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """Calibration rows, the sources that they were drawn from, and the events about them."""

    sample: Sample
    events: tuple[Event, ...]
    sources: tuple[str, ...]  # by the names that the recipe has for them
    notes: tuple[str, ...] = ()  # what a person should know of the rows and the chat templates
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns of files

    def describe(self) -> dict[str, Any]:
        """Return the report as plain data, for the manifest."""
        images = self.sample.images
        seen = {} if images is None else {"images": images.count, "tokens_filled": images.filled}
        left = {"unused_columns": self.unused} if self.unused else {}
        return {**asdict(self.sample.report), **seen, **left, "sources": self.sources}


def calibrated_for(checkpoint: Checkpoint, planned: Planned, settings: Settings) -> Calibrated:
    """Draw the rows that a planned run needs.

    Raises:
        InputError: as `calibrate`.
        RefusedError: more events than the policy allows.
    """
    options = planned.recipe.calibration
    check_towers(named_image(options, settings.calibration), checkpoint.config)
    found = calibrate(
        checkpoint.path, options, planned.plan, settings.calibration,
        vocabulary=require_declarations(planned.model_layout)[1].vocab,
        offline=settings.offline, own_rows=own_rows(checkpoint.path, options, settings.device),
    )  # fmt: skip
    for note in found.notes:
        settings.note(note)
    settings.policy.check([*planned.plan.substitutions, *found.events])
    return found


def calibrate(
    model: Path,
    options: CalibrationOptions,
    plan: Plan,
    place: str = "",
    *,
    vocabulary: int,
    offline: bool = False,
    own_rows: Callable[[int, int], Tensor] | None = None,
) -> Calibrated:
    """Draw the rows that a recipe asks for.

    Args:
        model: a directory with ``tokenizer.json``, or a GGUF file.
        options: source, rows, length, seed.
        plan: its widest quantized layer decides whether there are enough tokens.
        place: the source with the paths that ``options`` do not say (see `quantforge.planning.local_paths`).
        vocabulary: rows of the model's embedding.
        offline: never ask the hub for a dataset.
        own_rows: samples text from the model itself, for the source ``self``.

    Raises:
        InputError: the source is missing, malformed or too short; the message says what is needed.
    """
    source = place or options.source
    request = Request(
        source=source, rows=options.samples, length=options.length, seed=options.seed,
        offline=offline, random=options.random or 0.0,
    )  # fmt: skip
    try:
        unused = UnusedColumns()
        with tokenizer_directory(model) as (folder, _):
            tokenizer = load_tokenizer(folder, vocabulary)
            chat = load_chat_template(folder) if options.chat_template else None
            sample = draw(
                request, tokenizer, chat=chat, own_rows=own_rows, model=folder, unused=unused
            )
        names = titles(source, options.sha256)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error
    said = (*(chat.notes if chat else ()), *([unused.note()] if unused.found else []))
    return Calibrated(
        sample, tuple(_events(sample, plan, options)), names,
        notes=tuple(f"calibration: {note}" for note in said),
        unused={file: sorted(columns) for file, columns in sorted(unused.found.items())},
    )  # fmt: skip


def _events(sample: Sample, plan: Plan, options: CalibrationOptions) -> list[Event]:
    events = []
    report = sample.report
    if few := few_rows(options, report.rows, report.rows_asked):
        events.append(Event("calibration-rows", "calibration", few))
    tokens = report.rows * report.length
    widest = max((tensor.matrix[1] for tensor in plan.quantized()), default=0)
    if warning := tokens_per_column_warning(tokens, widest):
        events.append(Event("calibration-short", "calibration", warning))
    asked = int(report.rows * (options.random or 0))
    if sample.images is None and report.random_rows < asked:
        detail = (
            f"no rows of random tokens, {asked} asked for: the tokenizer has special ones alone"
        )
        events.append(Event("calibration-random", "calibration", detail))
    if report.duplicated_rows:
        detail = f"{report.duplicated_rows} of {report.rows} rows repeat another"
        events.append(Event("calibration-duplicates", "calibration", detail))
    return events


def own_rows(model: Path, options: CalibrationOptions, device: str) -> Callable[[int, int], Tensor]:
    """Return the function that samples ``[rows, length]`` token ids; the model is loaded when it is called.

    The whole model is in memory while it samples (its size is what `plan` says for this source).
    """

    def sample(rows: int, length: int) -> Tensor:
        from quantforge.runtime.load import load

        with tokenizer_directory(model) as (folder, _):
            tokenizer = load_tokenizer(folder, embedding_rows(open_model(model).config))
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first is None:
            raise InputError(
                "calibration 'self': the tokenizer has neither a token that begins texts nor one that ends them",
                "use --calibration builtin or a file",
            )
        loaded = load(model, device=device)
        generator = torch.Generator().manual_seed(options.seed)
        batches = [
            _sample(loaded.model, min(BATCH, rows - start), length, first, generator, device)
            for start in range(0, rows, BATCH)
        ]
        return torch.cat(batches)

    return sample


@torch.inference_mode()
def _sample(
    model: torch.nn.Module,
    rows: int,
    length: int,
    first: int,
    generator: torch.Generator,
    device: str,
) -> Tensor:
    ids = torch.full((rows, 1), first, dtype=torch.int64, device=device)
    cache = None
    while ids.shape[1] < length:
        with cutting():
            result = model(
                input_ids=ids[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        cache = result.past_key_values
        chances = result.logits[:, -1].float().softmax(-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=generator).to(device)
        ids = torch.cat((ids, drawn), dim=1)
    return ids.cpu()
