"""Calibration rows: how many there will be, how many hold random tokens, and which requests are refused or noted.

A text that is too short for the requested rows is refused. The builtin text is an exception: with the default number of
rows (128), as many are taken as it has. A user who asks for another number, or for a part of a mixture, gets an event
if there are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantforge.architectures.configuration import max_positions
from quantforge.architectures.match import ModelLayout, Role, require_declarations
from quantforge.architectures.towers import has_towers
from quantforge.errors import InputError
from quantforge.formats.open_model import tokenizer_directory
from quantforge.planning.peak_memory import RunSizes, whole_model_bytes
from quantforge.plans import TensorPlan
from quantforge.quantizers import GPTQ
from quantforge.recipe import CalibrationOptions, Recipe

DEFAULT_RANDOM_SHARE = 1 / 16


def missing_rows_message(options: CalibrationOptions, available: int, requested: int) -> str:
    """Return a message if there are fewer rows than requested, else ""."""
    if available >= requested or _accepts_fewer_rows(options):
        return ""
    return (
        f"{available} rows of {options.length} tokens, {requested} asked for: the builtin text has no more; "
        f"--samples {available}, or --calibration FILE with more text"
    )


def random_row_share(
    recipe: Recipe, method_words: Sequence[str], tensors: Sequence[TensorPlan]
) -> float:
    """Return the share of calibration rows whose tokens are drawn at random (`quantforge_calibration.sampler`).

    By default, only error feedback (GPTQ) uses random rows: it depends on correlations between activations. Other
    methods were not measured to gain from them, and static activation ranges would have to cover values that no text
    causes. There are no random rows either if the rows decide which experts are pruned or measure the scales of a KV
    cache.

    Args:
        recipe: recipe of the result.
        method_words: names of the transforms and of the rounder, in order.
        tensors: plans of all tensors.
    """
    options = recipe.calibration
    if options.random_share is not None:
        return options.random_share
    inputs = (tensor.scheme.input for tensor in tensors if tensor.scheme is not None)
    static_inputs = any(
        activation is not None and activation.needs_calibration for activation in inputs
    )
    measures_text = recipe.prune_experts or recipe.kv_cache != "none"
    text_only = (
        method_words[-1] != GPTQ or static_inputs or measures_text or options.importance_file
    )
    return 0.0 if text_only else DEFAULT_RANDOM_SHARE


def self_generated_note(run: RunSizes, model_layout: ModelLayout) -> tuple[str, ...]:
    """Return a note on the cost of calibration text that the model generates itself; none for other text."""
    if not run.needs or not run.calibration.writes_own_text:
        return ()
    tokens = run.calibration.samples * run.calibration.length
    size = whole_model_bytes(model_layout)
    return (
        f"calibration 'self': the model writes up to {tokens:,} tokens one at a time, with all of its weights"
        f" in memory as float32 ({size:,} bytes)",
    )


def check_length(options: CalibrationOptions, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse calibration rows longer than the model's maximum position; only note it if the length is the default.

    Raises:
        InputError: the user asked for that length.
    """
    positions = max_positions(config)
    if options.length <= positions:
        return ()
    message = f"rows of {options.length} tokens, the model has {positions} positions"
    if options.length != CalibrationOptions().length:
        raise InputError(f"calibration: {message}", f"--length {positions}, or fewer")
    return (f"calibration: {message}; --length {positions} stays within them",)


@lru_cache(maxsize=64)  # a search plans many candidates; the options hold digests of the text
def check_calibration_text(
    options: CalibrationOptions, source: str, model: Path, vocabulary: int | None = None
) -> None:
    """Refuse a calibration text that a run would refuse at its start.

    Args:
        options: the calibration options.
        source: local path of the text; "" takes the one in the options.
        model: path of the model, whose tokenizer is used.
        vocabulary: number of rows of the embedding, if known.

    Raises:
        InputError: the text is missing, malformed or too short, or the model has no tokenizer.
    """
    from quantforge_calibration import SourceError
    from quantforge_calibration.row_count import check_rows  # tokenizers, as below

    try:
        with tokenizer_directory(model) as (folder, _):
            check_rows(
                source or options.source,
                folder,
                options.samples,
                options.length,
                chat_template=options.chat_template,
                vocabulary=vocabulary,
            )
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error


@lru_cache(maxsize=64)  # as `check_calibration_text`
def first_image_reference(options: CalibrationOptions, source: str) -> str | None:
    """Return where a calibration text first refers to an image, or None if it does not.

    Args:
        options: the calibration options.
        source: local path of the text; "" takes the one in the options.

    Raises:
        InputError: the text is missing or malformed.
    """
    from quantforge_calibration import SourceError, parse_sources
    from quantforge_calibration.image_documents import first_image

    try:
        references = (
            first_image(parsed_source) for parsed_source in parse_sources(source or options.source)
        )
        return next((reference for reference in references if reference is not None), None)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error


def check_image_support(reference: str | None, config: Mapping[str, Any]) -> None:
    """Refuse calibration rows with images for a model that has no vision tower.

    Args:
        reference: where the text refers to an image; None if it does not.
        config: configuration of the model.

    Raises:
        InputError: the model cannot read images.
    """
    if reference is not None and not has_towers(config):
        raise InputError(
            f"calibration: {reference} names an image, and {config.get('model_type')} has no tower that reads any",
            "rows without `image` and `images`, or the whole model in the place of its text tower",
        )


def add_image_memory(
    peak: int, model_layout: ModelLayout, options: CalibrationOptions, *, in_memory: bool
) -> tuple[int, str]:
    """Add the memory of calibration rows with images to a predicted peak; return the new peak and a note.

    For each row the inputs of the text model (embeddings and attention masks) are kept in addition.
    """
    _, sizes = require_declarations(model_layout)
    tower_bytes = 4 * sum(
        math.prod(tensor.header.shape)
        for tensor in model_layout.tensors
        if tensor.role is Role.FOREIGN
    )
    rows, length = options.samples if in_memory else options.micro_batch, options.length
    input_bytes = rows * length * (4 * sizes.hidden + 2 * length)
    embedding_bytes = (
        4 * sizes.hidden * (min(sizes.vocab, options.samples * length) + rows * length)
    )
    note = (
        f"calibration: rows with images; {tower_bytes:,} bytes of towers, as float32, run once for each row,"
        " and their time and their activations are not in the forecast"
    )
    return max(peak + input_bytes, tower_bytes + embedding_bytes + input_bytes), note


def row_notes(options: CalibrationOptions, model: Path) -> tuple[str, ...]:
    """Return notes on random calibration rows, and on rows that the builtin text is known to lack."""
    random_note: tuple[str, ...] = ()
    if options.random_share:
        random_note = (
            f"calibration: {options.random_share:.4g} of the rows hold random tokens, not text",
        )
    if options.source != CalibrationOptions().source or _accepts_fewer_rows(options):
        return random_note
    available = _count_builtin_rows(options, model)
    message = "" if available is None else missing_rows_message(options, available, options.samples)
    return (*random_note, f"calibration: {message}") if message else random_note


def expected_rows(options: CalibrationOptions, model: Path) -> int:
    """Return the number of rows that a run will observe; 0 if unknown (a mixture of texts, an importance file)."""
    if options.importance_file or "," in options.source or "=" in options.source:
        return 0
    if options.source != CalibrationOptions().source:
        return options.samples  # or it is refused
    return _count_builtin_rows(options, model) or 0


def _count_builtin_rows(options: CalibrationOptions, model: Path) -> int | None:
    """Return how many of the requested rows the builtin text has; None if that cannot be determined."""
    from quantforge_calibration import SourceError
    from quantforge_calibration.row_count import (
        builtin_rows,
    )  # tokenizers, which planning does without

    try:
        with tokenizer_directory(model) as (folder, _):
            return builtin_rows(folder, options.length, options.samples)
    except (SourceError, InputError):
        return None


def _accepts_fewer_rows(options: CalibrationOptions) -> bool:
    defaults = CalibrationOptions()
    return (options.source, options.samples) == (defaults.source, defaults.samples)
