"""Arguments of a text tower for rows with images: the whole model makes them, and the tower alone runs on them.

What a tower reads of images (features in the place of tokens, positions, masks, features that are added to the states
of early blocks) is made by transformers' own code, once for each row: the whole model is run up to its text tower,
with the weights of everything but the blocks, and what it hands to the tower is noted. Nothing has to be known of what
that is. Whenever a row passes a block, the tower runs on what was noted, around stand-ins
(`quantforge.model.block_inputs`).

A row is run by itself: what a model makes of several cannot be cut into rows. On a CPU each has one thread, so that the
result does not depend on how many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantforge.architectures.match import ModelLayout
from quantforge.errors import InputError, RefusedError
from quantforge.model.block_inputs import Call
from quantforge.model.hidden_states import LeafStore
from quantforge.model.model_parts import blocks_of, decoder_of, head_of
from quantforge.model.skeleton import build
from quantforge.model.weight_loading import (
    LARGE,
    EmbeddingRows,
    TensorSource,
    WholeWeights,
    is_lookup,
)
from quantforge.model.weight_mapping import WeightMapping
from quantforge.numerics.products import cutting
from quantforge.numerics.threads import one_thread, side_by_side
from quantforge_calibration import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge_calibration.image_rows import ImageRows
    from quantforge_calibration.sampler import Sample

TOGETHER = 16  # rows whose inputs are in memory at a time


class DecoderCalls:
    """Arguments of a text tower, by row; while a row is set on a thread, the tower gets them instead of its own.

    Args:
        decoder: the tower that runs alone; it is hooked.
        calls: of the rows, as `LeafStore.put` returns them.
        leaves: that kept them.
        device: where the tower runs.
    """

    def __init__(
        self, decoder: nn.Module, calls: list[Call], leaves: LeafStore, device: torch.device
    ) -> None:
        self._calls, self._leaves, self._device = calls, leaves, device
        self._of_thread = threading.local()
        decoder.register_forward_pre_hook(self._given, with_kwargs=True)

    @contextmanager
    def at(self, row: int) -> Iterator[None]:
        """Let the tower run on the arguments of a row, on this thread."""
        self._of_thread.row = row
        try:
            yield
        finally:
            del self._of_thread.row

    def _given(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        row = getattr(self._of_thread, "row", None)
        if row is None:
            return args, kwargs
        args, kwargs = tree_map(partial(self._leaves.joined, self._device), tuple(self._calls[row]))
        return args, kwargs


class _ReachedError(Exception):
    """Raised where the whole model comes to its text tower."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def decoder_calls(
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Sample,
    decoder: nn.Module,
    leaves: LeafStore,
    device: torch.device,
) -> DecoderCalls:
    """Run the whole model on rows up to its text tower.

    Args:
        checkpoint: gives tensors by stored name.
        model_layout: of the same checkpoint.
        rows: with images.
        decoder: the tower that will run on what is noted.
        leaves: keeps what is noted.
        device: where the model runs.

    Raises:
        InputError: transformers cannot run a row with its images, an image changed, or a tower is in no file.
        RefusedError: the text tower of the whole model is another one.
    """
    ids, inputs = rows.ids, rows.images
    assert inputs is not None
    whole = build(checkpoint.config, whole=True)
    found = decoder_of(whole, blocks_of(whole))
    if type(found) is not type(decoder):
        raise RefusedError(
            f"{model_layout.model_type}: its text tower is {type(decoder).__name__} alone and"
            f" {type(found).__name__} in the whole model: rows with images cannot reach it",
            "give rows of text alone",
        )
    with ExitStack() as held, torch.no_grad():
        held.callback(found.register_forward_pre_hook(_reach, with_kwargs=True).remove)
        _fill(whole, checkpoint, model_layout, ids, device, held)

        def noted(row: int) -> Call:
            given = {name: value.to(device) for name, value in _inputs(inputs, row).items()}
            with cutting():
                call = _run(whole, row, ids[row : row + 1].to(device), given)
            return Call(*leaves.put(tuple(call)))

        calls: list[Call] = []
        with one_thread():
            for start in range(0, len(ids), TOGETHER):
                part = range(start, min(start + TOGETHER, len(ids)))
                many = side_by_side if device.type == "cpu" else _one_by_one
                calls += many(noted, part)
    return DecoderCalls(decoder, calls, leaves, device)


def _inputs(inputs: ImageRows, row: int) -> Mapping[str, Tensor]:
    try:
        return inputs(row)
    except SourceError as error:  # an image that is not what it was
        raise InputError(f"calibration: {error.message}", error.hint) from error


def _one_by_one(work: Callable[[int], Call], rows: range) -> list[Call]:
    return [work(row) for row in rows]


def _reach(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ReachedError(Call(args, dict(kwargs)))


def _run(model: PreTrainedModel, row: int, ids: Tensor, given: Mapping[str, Tensor]) -> Call:
    """Return the arguments that a whole model passes to its text tower."""
    try:
        model(input_ids=ids, use_cache=False, **given)
    except _ReachedError as reached:
        return reached.call
    except (InputError, TypeError, ValueError, RuntimeError) as error:
        said = error.message if isinstance(error, InputError) else str(error)
        raise InputError(
            f"calibration row {row}: transformers cannot run it with its images: {' '.join(said.split())[:300]}",
            "processor files and weights are not of one model, or the installed transformers has another form of it",
        ) from error
    raise RefusedError(
        f"{type(model).__name__}: it does not run its text tower once: rows with images cannot reach it",
        "give rows of text alone",
    )


def _fill(
    model: PreTrainedModel,
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Tensor,
    device: torch.device,
    held: ExitStack,
) -> None:
    """Fill a whole model but for its blocks and its head; of embeddings only the rows of tokens that occur."""
    names = WeightMapping(model, [tensor.header for tensor in model_layout.tensors])
    weights = WholeWeights(checkpoint, names, device)
    blocks, head = f"{blocks_of(model)}.", head_of(model)
    table = model.get_input_embeddings()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if name.startswith(blocks) or module is head:
            continue
        if module is table or (is_lookup(module) and module.weight.numel() > LARGE):
            occurring = torch.unique(rows) if module is table else rows.new_zeros(0)
            EmbeddingRows(module, partial(weights.rows, name), occurring, held)
        elif (value := weights.read(name)) is not None:
            module.load_state_dict({leaf: value}, assign=True, strict=False)
        elif getattr(module, leaf).is_meta:
            raise InputError(
                f"{name} of the whole model is in no file",
                "a complete checkpoint holds its towers too; fetch the model again, or give rows of text alone",
                tensor=name,
            )
