"""Calibration rows: what a run gets where it asks the builtin text for more than that has.

Other texts are refused when they are too short. The builtin text is the default, as 128 rows are: that asks for as many
as there are, up to 128. Whoever asks for another number, or for a part of a mixture, is told when fewer come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantforge.architectures.configuration import positions_in
from quantforge.architectures.match import ModelLayout, Role, require_declarations
from quantforge.architectures.towers import has_towers
from quantforge.errors import InputError
from quantforge.formats.open_model import tokenizer_directory
from quantforge.planning.peak_memory import RunSizes, whole_model
from quantforge.plans import TensorPlan
from quantforge.quantizers import GPTQ
from quantforge.recipe import CalibrationOptions, Recipe

RANDOM_ROWS = 1 / 16


def few_rows(options: CalibrationOptions, given: int, asked: int) -> str:
    """Return what there is to say of ``given`` rows where ``asked`` were to come, "" where that is as asked."""
    if given >= asked or _takes_what_there_is(options):
        return ""
    return (
        f"{given} rows of {options.length} tokens, {asked} asked for: the builtin text has no more; "
        f"--samples {given}, or --calibration FILE with more text"
    )


def random_share(recipe: Recipe, words: Sequence[str], tensors: Sequence[TensorPlan]) -> float:
    """Return the share of the rows whose tokens are drawn at random (`quantforge_calibration.sampler`).

    Where none is named, error feedback takes `RANDOM_ROWS`: it relies on how activations go together. Nothing else is
    measured to gain, and static scales of inputs would have to hold what no text holds. Nor is what no text has to
    count where the rows decide which experts are left out, or the scales of a cache.

    Args:
        recipe: of the result.
        words: the transforms and the rounder.
        tensors: what becomes of each.
    """
    options = recipe.calibration
    if options.random is not None:
        return options.random
    inputs = (tensor.scheme.input for tensor in tensors if tensor.scheme is not None)
    measured = any(one is not None and one.measured for one in inputs)
    counted = recipe.prune_experts or recipe.kv_cache != "none"
    elsewhere = words[-1] != GPTQ or measured or counted or options.importance_file
    return 0.0 if elsewhere else RANDOM_ROWS


def own_text(run: RunSizes, model_layout: ModelLayout) -> tuple[str, ...]:
    """Say what it costs to let the model write its calibration text."""
    if not run.needs or not run.calibration.writes_own_text:
        return ()
    tokens = run.calibration.samples * run.calibration.length
    size = whole_model(model_layout)
    return (
        f"calibration 'self': the model writes up to {tokens:,} tokens one at a time, with all of its weights"
        f" in memory as float32 ({size:,} bytes)",
    )


def check_length(options: CalibrationOptions, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse rows that are longer than a model has positions; of the default length a note says it.

    Raises:
        InputError: the length was asked for.
    """
    positions = positions_in(config)
    if options.length <= positions:
        return ()
    said = f"rows of {options.length} tokens, the model has {positions} positions"
    if options.length != CalibrationOptions().length:
        raise InputError(f"calibration: {said}", f"--length {positions}, or fewer")
    return (f"calibration: {said}; --length {positions} stays within them",)


@lru_cache(maxsize=64)  # by the digests that the options hold: a search plans for many candidates
def check_source(
    options: CalibrationOptions, place: str, model: Path, vocabulary: int | None = None
) -> None:
    """Refuse a calibration text that a run would refuse at its start; arguments are as of `calibrate`.

    Raises:
        InputError: the source is missing, malformed or too short, or the model has no tokenizer.
    """
    from quantforge_calibration import SourceError
    from quantforge_calibration.row_count import check_rows  # tokenizers, as below

    try:
        with tokenizer_directory(model) as (folder, _):
            check_rows(
                place or options.source,
                folder,
                options.samples,
                options.length,
                chat_template=options.chat_template,
                vocabulary=vocabulary,
            )
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error


@lru_cache(maxsize=64)  # as `check_source`
def named_image(options: CalibrationOptions, place: str) -> str | None:
    """Return where a calibration text first names an image, None where it names none; ``place`` is as of `calibrate`.

    Raises:
        InputError: the source is missing or malformed.
    """
    from quantforge_calibration import SourceError, parse_sources
    from quantforge_calibration.image_documents import first_image

    try:
        found = (first_image(part) for part in parse_sources(place or options.source))
        return next((place for place in found if place is not None), None)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", error.hint) from error


def check_towers(named: str | None, config: Mapping[str, Any]) -> None:
    """Refuse rows that name an image, and where, for a model that reads none.

    Raises:
        InputError: the configuration has no other tower.
    """
    if named is not None and not has_towers(config):
        raise InputError(
            f"calibration: {named} names an image, and {config.get('model_type')} has no tower that reads any",
            "rows without `image` and `images`, or the whole model in the place of its text tower",
        )


def with_images(
    peak: int, model_layout: ModelLayout, options: CalibrationOptions, *, in_memory: bool
) -> tuple[int, str]:
    """Return the peak of a run whose rows have images, and what a plan says of them.

    Beside what text takes, each row keeps what its text tower is given: states and masks.
    """
    _, sizes = require_declarations(model_layout)
    towers = 4 * sum(
        math.prod(tensor.header.shape)
        for tensor in model_layout.tensors
        if tensor.role is Role.FOREIGN
    )
    rows, length = options.samples if in_memory else options.micro_batch, options.length
    kept = rows * length * (4 * sizes.hidden + 2 * length)
    embedded = 4 * sizes.hidden * (min(sizes.vocab, options.samples * length) + rows * length)
    note = (
        f"calibration: rows with images; {towers:,} bytes of towers, as float32, run once for each row,"
        " and their time and their activations are not in the forecast"
    )
    return max(peak + kept, towers + embedded + kept), note


def row_notes(options: CalibrationOptions, model: Path) -> tuple[str, ...]:
    """Return the notes of a plan on rows of random tokens, and on rows that will not come if that is known."""
    drawn: tuple[str, ...] = ()
    if options.random:
        drawn = (f"calibration: {options.random:.4g} of the rows hold random tokens, not text",)
    if options.source != CalibrationOptions().source or _takes_what_there_is(options):
        return drawn
    there = _builtin_rows(options, model)
    said = "" if there is None else few_rows(options, there, options.samples)
    return (*drawn, f"calibration: {said}") if said else drawn


def coming_rows(options: CalibrationOptions, model: Path) -> int:
    """Return how many rows a run observes, 0 where only it knows: of a mixture, or of a file of importance."""
    if options.importance_file or "," in options.source or "=" in options.source:
        return 0
    if options.source != CalibrationOptions().source:
        return options.samples  # or it is refused
    return _builtin_rows(options, model) or 0


def _builtin_rows(options: CalibrationOptions, model: Path) -> int | None:
    """Return how many of the rows the builtin text gives, None where only the run can say what is wrong."""
    from quantforge_calibration import SourceError
    from quantforge_calibration.row_count import (
        builtin_rows,
    )  # tokenizers, which planning does without

    try:
        with tokenizer_directory(model) as (folder, _):
            return builtin_rows(folder, options.length, options.samples)
    except (SourceError, InputError):
        return None


def _takes_what_there_is(options: CalibrationOptions) -> bool:
    usual = CalibrationOptions()
    return (options.source, options.samples) == (usual.source, usual.samples)
