"""Capture the arguments of the text decoder for calibration rows with images.

The inputs of the decoder that come from images (features in place of tokens, positions, masks, features added to the
states of early blocks) are computed by transformers' own code, once per row: the whole model, with all weights except
those of the blocks, runs up to its text decoder, and the arguments of the decoder are recorded. Nothing needs to be
known about them. Whenever a row passes a block, the decoder runs on the recorded arguments, around stand-ins
(`quantforge.model.block_inputs`).

Rows run one at a time, because the arguments of several rows cannot be split into rows. On a CPU each row has one
thread, so that the result does not depend on the number of threads.
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
from quantforge.model.block_calls import Call
from quantforge.model.hidden_states import LeafStore
from quantforge.model.model_parts import block_list_name, output_layer, text_decoder
from quantforge.model.skeleton import build_skeleton
from quantforge.model.weight_loading import (
    LARGE_EMBEDDING,
    EmbeddingRows,
    TensorSource,
    WholeWeights,
    is_plain_embedding,
)
from quantforge.model.weight_mapping import WeightMapping
from quantforge.numerics.products import tiled_products
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge_calibration import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge_calibration.image_rows import ImageRows
    from quantforge_calibration.sampler import Sample

ROWS_AT_A_TIME = 16  # rows whose inputs are in memory at a time


class DecoderCalls:
    """Recorded arguments of a text decoder, by row; they replace its own arguments while a row is set on a thread.

    Args:
        decoder: the decoder that runs alone; it gets a hook.
        calls: the arguments of each row, as `LeafStore.put` returned them.
        leaves: the store that holds their tensors.
        device: where the decoder runs.
    """

    def __init__(
        self, decoder: nn.Module, calls: list[Call], leaves: LeafStore, device: torch.device
    ) -> None:
        self._calls, self._leaves, self._device = calls, leaves, device
        self._thread_local = threading.local()
        decoder.register_forward_pre_hook(self._replace_arguments, with_kwargs=True)

    @contextmanager
    def row_set(self, row: int) -> Iterator[None]:
        """Make the decoder run on the recorded arguments of a row, on this thread."""
        self._thread_local.row = row
        try:
            yield
        finally:
            del self._thread_local.row

    def _replace_arguments(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        row = getattr(self._thread_local, "row", None)
        if row is None:
            return args, kwargs
        args, kwargs = tree_map(
            partial(self._leaves.load_joined, self._device), tuple(self._calls[row])
        )
        return args, kwargs


class _DecoderReachedError(Exception):
    """Raised when the whole model calls its text decoder; carries the arguments of that call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def capture_decoder_calls(
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Sample,
    decoder: nn.Module,
    leaves: LeafStore,
    device: torch.device,
) -> DecoderCalls:
    """Run the whole model on every row up to its text decoder, and record the decoder's arguments.

    Args:
        checkpoint: source of tensors by stored name.
        model_layout: the tensors of the same checkpoint.
        rows: calibration rows with images.
        decoder: the text decoder that will run on the recorded arguments.
        leaves: stores the recorded arguments.
        device: where the model runs.

    Raises:
        InputError: transformers cannot run a row with its images, an image changed, or weights of a tower are in no
            file.
        RefusedError: the text decoder of the whole model has another class than ``decoder``.
    """
    ids, inputs = rows.ids, rows.images
    assert inputs is not None
    whole_model = build_skeleton(checkpoint.config, whole=True)
    whole_decoder = text_decoder(whole_model, block_list_name(whole_model))
    if type(whole_decoder) is not type(decoder):
        raise RefusedError(
            f"{model_layout.model_type}: its text tower is {type(decoder).__name__} alone and"
            f" {type(whole_decoder).__name__} in the whole model: rows with images cannot reach it",
            "give rows of text alone",
        )
    with ExitStack() as resources, torch.no_grad():
        resources.callback(
            whole_decoder.register_forward_pre_hook(_raise_decoder_call, with_kwargs=True).remove
        )
        _fill_whole_model(whole_model, checkpoint, model_layout, ids, device, resources)

        def capture_row(row: int) -> Call:
            image_inputs = {name: value.to(device) for name, value in _inputs(inputs, row).items()}
            with tiled_products():
                call = _capture_decoder_call(
                    whole_model, row, ids[row : row + 1].to(device), image_inputs
                )
            return Call(*leaves.put(tuple(call)))

        calls: list[Call] = []
        with one_thread():
            for start in range(0, len(ids), ROWS_AT_A_TIME):
                batch = range(start, min(start + ROWS_AT_A_TIME, len(ids)))
                map_rows = run_parallel if device.type == "cpu" else _map_sequentially
                calls += map_rows(capture_row, batch)
    return DecoderCalls(decoder, calls, leaves, device)


def _inputs(inputs: ImageRows, row: int) -> Mapping[str, Tensor]:
    try:
        return inputs(row)
    except SourceError as error:  # an image that is not what it was
        raise InputError(f"calibration: {error.message}", error.hint) from error


def _map_sequentially(capture: Callable[[int], Call], rows: range) -> list[Call]:
    return [capture(row) for row in rows]


def _raise_decoder_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _DecoderReachedError(Call(args, dict(kwargs)))


def _capture_decoder_call(
    model: PreTrainedModel, row: int, ids: Tensor, image_inputs: Mapping[str, Tensor]
) -> Call:
    """Return the arguments that a whole model passes to its text decoder."""
    try:
        model(input_ids=ids, use_cache=False, **image_inputs)
    except _DecoderReachedError as reached:
        return reached.call
    except (InputError, TypeError, ValueError, RuntimeError) as error:
        message = error.message if isinstance(error, InputError) else str(error)
        raise InputError(
            f"calibration row {row}: transformers cannot run it with its images: {' '.join(message.split())[:300]}",
            "processor files and weights are not of one model, or the installed transformers has another form of it",
        ) from error
    raise RefusedError(
        f"{type(model).__name__}: it does not run its text tower once: rows with images cannot reach it",
        "give rows of text alone",
    )


def _fill_whole_model(
    model: PreTrainedModel,
    checkpoint: TensorSource,
    model_layout: ModelLayout,
    rows: Tensor,
    device: torch.device,
    resources: ExitStack,
) -> None:
    """Load all weights of a whole model except its blocks and output layer; of embeddings only rows that occur."""
    names = WeightMapping(model, [tensor.header for tensor in model_layout.tensors])
    weights = WholeWeights(checkpoint, names, device)
    blocks, head = f"{block_list_name(model)}.", output_layer(model)
    table = model.get_input_embeddings()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if name.startswith(blocks) or module is head:
            continue
        if module is table or (
            is_plain_embedding(module) and module.weight.numel() > LARGE_EMBEDDING
        ):
            occurring = torch.unique(rows) if module is table else rows.new_zeros(0)
            EmbeddingRows(module, partial(weights.read_rows, name), occurring, resources)
        elif (value := weights.read(name)) is not None:
            module.load_state_dict({leaf: value}, assign=True, strict=False)
        elif getattr(module, leaf).is_meta:
            raise InputError(
                f"{name} of the whole model is in no file",
                "a complete checkpoint holds its towers too; fetch the model again, or give rows of text alone",
                tensor=name,
            )
