"""Calibration data of a run: draw rows from a source, check them against the plan, and collect warnings about them.

With the source ``self`` the model generates the rows itself, in its own distribution, so no text is needed. Each row
begins with the BOS token (or EOS if there is none) and is sampled at temperature 1, the distribution that the model
was trained to have. Rows are sampled in batches from a seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.configuration import vocabulary_size
from quantforge.architectures.match import require_declarations
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import open_model, tokenizer_directory
from quantforge.numerics.products import tiled_products
from quantforge.planning.calibration_rows import (
    check_image_support,
    first_image_reference,
    missing_rows_message,
)
from quantforge.planning.planner import Planned
from quantforge.plans import Plan
from quantforge.recipe import CalibrationOptions
from quantforge.settings import Settings
from quantforge_calibration import SourceError
from quantforge_calibration.chat import load_chat_template
from quantforge_calibration.citation import cited_names
from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.sampler import Sample, tokens_per_column_warning
from quantforge_calibration.tokenizer import load_tokenizer

SELF_CALIBRATION_BATCH = 32  # rows sampled at a time


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationData:
    """Calibration rows, the sources that they were drawn from, and the events about them."""

    sample: Sample
    events: tuple[Event, ...]
    sources: tuple[str, ...]  # as named in the recipe
    notes: tuple[str, ...] = ()  # messages about the rows and chat templates
    # Ignored columns of each dataset file
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the calibration report as plain data for the manifest."""
        images = self.sample.images
        image_fields = (
            {}
            if images is None
            else {"images": images.count, "filler_tokens": images.filler_tokens}
        )
        unused_fields = {"unused_columns": self.unused} if self.unused else {}
        return {
            **asdict(self.sample.report),
            **image_fields,
            **unused_fields,
            "sources": self.sources,
        }


def draw_calibration_data(
    checkpoint: Checkpoint, planned: Planned, settings: Settings
) -> CalibrationData:
    """Draw the calibration rows of a planned run and report notes and events about them.

    Raises:
        InputError: as `calibrate`.
        RefusedError: more events than the policy allows.
    """
    options = planned.recipe.calibration
    check_image_support(first_image_reference(options, settings.calibration), checkpoint.config)
    calibration_data = calibrate(
        checkpoint.path, options, planned.plan, settings.calibration,
        vocabulary=require_declarations(planned.model_layout)[1].vocab,
        offline=settings.offline, sample_own_rows=own_rows_sampler(checkpoint.path, options, settings.device),
    )  # fmt: skip
    for note in calibration_data.notes:
        settings.note(note)
    settings.policy.check([*planned.plan.substitutions, *calibration_data.events])
    return calibration_data


def calibrate(
    model: Path,
    options: CalibrationOptions,
    plan: Plan,
    local_source: str = "",
    *,
    vocabulary: int,
    offline: bool = False,
    sample_own_rows: Callable[[int, int], Tensor] | None = None,
) -> CalibrationData:
    """Draw the calibration rows that the recipe asks for.

    Args:
        model: a directory with ``tokenizer.json``, or a GGUF file.
        options: source, rows, length, seed.
        plan: its widest quantized layer determines whether there are enough tokens.
        local_source: the source with local paths, which ``options`` omit (see `quantforge.planning.local_paths`).
        vocabulary: number of rows of the model's embedding.
        offline: never download a dataset from the hub.
        sample_own_rows: samples text from the model itself, for the source ``self``.

    Raises:
        InputError: the source is missing, malformed or too short; the message says what is needed.
    """
    source = local_source or options.source
    request = RowRequest(
        source=source, rows=options.samples, length=options.length, seed=options.seed,
        offline=offline, random_share=options.random_share or 0.0,
    )  # fmt: skip
    try:
        unused = UnusedColumns()
        with tokenizer_directory(model) as (folder, _):
            tokenizer = load_tokenizer(folder, vocabulary)
            chat = load_chat_template(folder) if options.chat_template else None
            sample = draw(
                request,
                tokenizer,
                chat=chat,
                generate_rows=sample_own_rows,
                model=folder,
                unused=unused,
            )
        names = cited_names(source, options.sha256)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error
    notes = (*(chat.notes if chat else ()), *([unused.describe()] if unused.by_file else []))
    return CalibrationData(
        sample, tuple(_events(sample, plan, options)), names,
        notes=tuple(f"calibration: {note}" for note in notes),
        unused={file: sorted(columns) for file, columns in sorted(unused.by_file.items())},
    )  # fmt: skip


def _events(sample: Sample, plan: Plan, options: CalibrationOptions) -> list[Event]:
    events = []
    report = sample.report
    if warning_text := missing_rows_message(options, report.rows, report.rows_requested):
        events.append(Event("few-calibration-rows", "calibration", warning_text))
    tokens = report.rows * report.length
    widest = max((tensor.matrix[1] for tensor in plan.quantized()), default=0)
    if warning := tokens_per_column_warning(tokens, widest):
        events.append(Event("few-calibration-tokens", "calibration", warning))
    requested_rows = int(report.rows * (options.random_share or 0))
    if sample.images is None and report.random_rows < requested_rows:
        detail = f"no rows of random tokens, {requested_rows} asked for: the tokenizer has special ones alone"
        events.append(Event("no-random-rows", "calibration", detail))
    if report.duplicated_rows:
        detail = f"{report.duplicated_rows} of {report.rows} rows repeat another"
        events.append(Event("duplicate-calibration-rows", "calibration", detail))
    return events


def own_rows_sampler(
    model: Path, options: CalibrationOptions, device: str
) -> Callable[[int, int], Tensor]:
    """Return a function that samples token ids ``[rows, length]`` from the model, which is loaded on the first call.

    The whole model is in memory while it samples (`plan` reports its size for this source).
    """

    def sample(rows: int, length: int) -> Tensor:
        from quantforge.runtime.load import load

        with tokenizer_directory(model) as (folder, _):
            tokenizer = load_tokenizer(folder, vocabulary_size(open_model(model).config))
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first is None:
            raise InputError(
                "calibration 'self': the tokenizer has neither a token that begins texts nor one that ends them",
                "use --calibration builtin or a file",
            )
        loaded = load(model, device=device)
        generator = torch.Generator().manual_seed(options.seed)
        batches = [
            _sample(
                loaded.model,
                min(SELF_CALIBRATION_BATCH, rows - start),
                length,
                first,
                generator,
                device,
            )
            for start in range(0, rows, SELF_CALIBRATION_BATCH)
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
        with tiled_products():
            result = model(
                input_ids=ids[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        cache = result.past_key_values
        probabilities = result.logits[:, -1].float().softmax(-1).cpu()
        next_ids = torch.multinomial(probabilities, 1, generator=generator).to(device)
        ids = torch.cat((ids, next_ids), dim=1)
    return ids.cpu()
