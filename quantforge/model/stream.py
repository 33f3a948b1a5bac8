"""Run a model one decoder block at a time with calibration rows, loading and freeing the weights of each block.

The skeleton has no weights. Its blocks are replaced by stand-ins; one forward pass of the model on a micro-batch then
computes the embedding and shows the arguments of each block besides the hidden states (attention masks, rotary
embeddings, per layer type if a family mixes them). These either depend only on the shape of the micro-batch, and are
recorded once (and once for a single row, since rows pass a block in parallel), or they depend on the tokens or on
earlier blocks, and are computed again for every row (`quantforge.model.block_inputs`). Then each block is loaded from
the
checkpoint, observed, changed by a method, run over the hidden states of all rows, and freed. At the end the stand-ins
inject the final states; norm, output layer and soft-capping are again the model's own code. The result equals that of
the whole model.

Memory: one block in float32, the hidden states (or one micro-batch of them, if they are on disk), and the activations
of one micro-batch. Of the embedding only the rows of occurring tokens are loaded; everything else outside of the blocks
is
loaded, except the output layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import ModelLayout, Role, require_declarations
from quantforge.errors import InputError
from quantforge.model.block import BlockRows, DecoderBlock, MicroBatch
from quantforge.model.block_calls import Call, StandIn
from quantforge.model.block_inputs import BlockInputs, RecordedInputs, ReplayedInputs
from quantforge.model.decoder_calls import DecoderCalls, capture_decoder_calls
from quantforge.model.experts import Experts
from quantforge.model.hidden_states import (
    HiddenStates,
    InMemory,
    LeafStore,
    OnDisk,
    StateLayout,
    TokenStates,
)
from quantforge.model.model_parts import find_base_model, text_decoder
from quantforge.model.skeleton import build_skeleton
from quantforge.model.weight_loading import (
    LARGE_EMBEDDING,
    EmbeddingRows,
    ModuleWeights,
    TensorSource,
    free_weights,
    is_plain_embedding,
    parameter,
)
from quantforge.model.weight_mapping import WeightMapping

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample


class ModelStream:
    """Iterator over the blocks of a model as `DecoderBlock`; each has to be advanced before the next.

    Args:
        checkpoint: source of tensors by stored name; a caller may wrap it to supply changed tensors.
        model_layout: the tensors of the same checkpoint; ``architecture`` must not be None.
        rows: token ids ``[rows, length]``, or rows with images.
        micro_batch: rows per forward pass; sums depend on it, so it belongs to the recipe.
        device: where blocks are run.
        activations: directory for hidden states on disk, a store for those between blocks, or None for memory.
        precision: ``bfloat16`` computes the matrix products of blocks in bfloat16, ``float32`` exactly.

    Raises:
        InputError: no rows, token ids outside of the vocabulary, rows longer than the learned positions; or as
            `build_skeleton`.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        model_layout: ModelLayout,
        rows: Tensor | Sample,
        *,
        micro_batch: int = 8,
        device: str | torch.device = "cpu",
        activations: Path | HiddenStates | None = None,
        precision: str = "float32",
    ) -> None:
        self._precision = precision
        self._images = None if isinstance(rows, Tensor) or rows.images is None else rows
        rows = rows if isinstance(rows, Tensor) else rows.ids
        self._architecture, self._dimensions = require_declarations(model_layout)
        _check_rows(rows, self._dimensions, self._architecture)
        self._checkpoint, self._model_layout, self._rows = checkpoint, model_layout, rows
        self._micro_batch = micro_batch
        self._device = torch.device(device)
        self._model = build_skeleton(checkpoint.config)
        self._base_model = find_base_model(self._model) or self._model
        self._weights = ModuleWeights(checkpoint, model_layout, device, self._weight_mapping())
        self._directory = activations if isinstance(activations, Path) else None
        self._given_store = None if isinstance(activations, Path) else activations
        self._stores: list[HiddenStates] = []
        self._states: HiddenStates
        self._layout = StateLayout(0, (self._dimensions.hidden,))
        self._leaves = LeafStore(self._directory)  # of what blocks return beside the states
        self._calls: dict[int, list[Call]] = {}  # of all blocks, by the number of rows
        self._decoder_calls: DecoderCalls | None = None
        self._replayed_inputs: ReplayedInputs | None = None
        self._thread_local = threading.local()
        self._resources = ExitStack()
        self._resources.callback(self._leaves.close)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        blocks = self._model.get_submodule(self._architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)  # for the type checker
        self._blocks = list(blocks)
        kinds = zip(self._blocks, model_layout.layers, strict=True)
        self._stand_ins = [StandIn(block, kind.num_outputs) for block, kind in kinds]
        for index, stand_in in enumerate(self._stand_ins):
            blocks[index] = stand_in

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the hidden states, the other block outputs, and the embedding rows."""
        self._resources.close()
        for store in self._stores:
            store.close()

    def __iter__(self) -> Iterator[DecoderBlock]:
        """Embed all rows, then yield each block with its weights loaded."""
        self.embed()
        for index in range(len(self._blocks)):
            decoder_block = self.block(index)
            yield decoder_block
            if not decoder_block.advanced:
                raise RuntimeError(f"{decoder_block.name} was not advanced")
            decoder_block.release()
            if self._replayed_inputs is not None and index in self._replayed_inputs.reread_states:
                self._replayed_inputs.reread_states[index] = self._copy_states()

    def embed(self) -> None:
        """Embed all rows, and record the other arguments of the blocks or prepare to recompute them."""
        self._load_outer_weights()
        if self._images is not None:
            self._decoder_calls = capture_decoder_calls(
                self._checkpoint,
                self._model_layout,
                self._images,
                text_decoder(self._model, self._architecture.blocks),
                self._leaves,
                device=self._device,
            )
        self._layout = StateLayout.find(self._embed_rows(0, 1).shape, 1, self._rows.shape[1])
        for start, stop in self._row_spans():
            states = self._layout.pack(self._embed_rows(start, stop))
            if not start:
                self._states = self._given_store or self._make_store()
            self._write_states(start, states)
        self._clear_stand_ins()
        if self._architecture.needs_model_replay or self._decoder_calls is not None:
            ids = self._rows.to(self._device)
            self._replayed_inputs = ReplayedInputs(
                self._stand_ins,
                self._run_base_model,
                ids,
                self._layout,
                self._leaves,
                self._decoder_calls,
            )
        else:
            # Derived families may read embeddings after the blocks.
            if self._architecture.derivation is None:
                self._resources.close()
            self._stand_ins[-1].override = self._final_states

    def block(self, index: int) -> DecoderBlock:
        """Load the weights of a block and return it; the caller ensures that the stored hidden states are its input."""
        module = self._blocks[index]
        refill = partial(self._weights.fill_block, module, index)
        stored = refill()
        kind = self._model_layout.layers[index]
        experts, bfloat16 = None, self._precision == "bfloat16"
        if kind.stacks:
            load = partial(self._weights.read_expert, module, index)
            name = self._model_layout.block_name(index)
            experts = Experts(name, module, kind, load, bfloat16=bfloat16)
        count, length = self._rows.shape
        return DecoderBlock(
            index,
            module,
            self._model_layout,
            stored,
            BlockRows(
                (count, length),
                partial(self._micro_batches, index),
                self._write_states,
                self._make_store,
            ),
            experts,
            reload=refill,
            bfloat16=bfloat16,
        )

    def final_hidden(self) -> Iterator[Tensor]:
        """Yield the states after the last block and norm, ``[rows, length, hidden]`` per micro-batch."""
        for start, stop in self._final_spans():
            states = self._states.read(start, stop).to(self._device)
            yield self._run_end(self._base_model, start, states).last_hidden_state

    def logits(self) -> Iterator[Tensor]:
        """Yield logits ``[rows, length, vocab]`` per micro-batch, after the last block; the whole head is in memory."""
        with self._head_loaded():
            for start, stop in self._final_spans():
                states = self._states.read(start, stop).to(self._device)
                yield self._run_end(self._model, start, states).logits

    def _load_outer_weights(self) -> None:
        """Load all weights outside the blocks except the head and towers; of embeddings only rows that occur."""
        model_names = {
            item.name for item in self._model_layout.tensors if item.role is not Role.FOREIGN
        }
        head, main = self._architecture.head, self._architecture.embedding
        tokens = torch.unique(self._rows)
        for name in self._model.state_dict():
            path = name.rpartition(".")[0]
            module = self._model.get_submodule(path)
            large = is_plain_embedding(module) and module.weight.numel() > LARGE_EMBEDDING
            if path == main or (large and name in self._model_layout.by_name):
                occurring = tokens if path == main else tokens[:0]
                EmbeddingRows(
                    module, partial(self._weights.read_rows, name), occurring, self._resources
                )
            elif path != head and (name in model_names or not self._architecture.text_config):
                self._weights.fill(self._model, name)

    def _run_base_model(self, ids: Tensor) -> Tensor:
        """Run the base model; return the hidden states after the last norm."""
        hidden_states: Tensor = self._base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden_states

    def _embed_rows(self, start: int, stop: int) -> Tensor:
        """Return the hidden states before the first block, and record the other arguments of the blocks."""
        if self._decoder_calls is None:
            self._run_base_model(self._rows[start:stop].to(self._device))
            self._calls.setdefault(stop - start, [stand_in.call for stand_in in self._stand_ins])
            return self._stand_ins[0].states
        embedded = []
        for row in range(start, stop):
            with self._decoder_calls.row_set(row):
                self._run_base_model(self._rows[row : row + 1].to(self._device))
            embedded.append(self._stand_ins[0].states)
        return embedded[0] if len(embedded) == 1 else torch.cat(embedded, self._layout.row_axis)

    def _block_inputs(self, index: int) -> BlockInputs:
        """Return the source of a block's arguments."""
        if self._replayed_inputs is not None:
            return self._replayed_inputs.at_block(index)
        calls = {rows: calls_by_block[index] for rows, calls_by_block in self._calls.items()}
        return RecordedInputs(self._layout, calls)

    def _is_reread(self, index: int) -> bool:
        """Return whether more than the next block reads the output of a block."""
        return (
            self._replayed_inputs is not None
            and self._replayed_inputs.at_block(index + 1).needs_earlier_outputs
        )

    def _micro_batches(self, index: int) -> Iterator[MicroBatch]:
        passage = self._block_inputs(index)
        for start, stop in self._row_spans():
            yield MicroBatch(start, self._states.read(start, stop).to(self._device), passage)

    def _run_end(self, model: nn.Module, start: int, states: Tensor) -> Any:
        """Run the end of the model, or of its base model, on the packed states after the last block.

        Safe on several threads.
        """
        if self._replayed_inputs is not None:
            return self._replayed_inputs.run_end(
                start, states, lambda ids: model(input_ids=ids, use_cache=False)
            )
        self._thread_local.states = self._layout.unpack(states)
        try:
            return model(inputs_embeds=states[..., : self._dimensions.hidden], use_cache=False)
        finally:
            del self._thread_local.states
            self._clear_stand_ins()

    def _final_states(self, _: Tensor, __: Call) -> Any:
        """Return, as the output of the last stand-in, the final states set on this thread."""
        return self._stand_ins[-1].wrap_output(self._thread_local.states)

    def _clear_stand_ins(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.clear()

    @contextmanager
    def _head_loaded(self) -> Iterator[None]:
        """Load the weight of the head, and its bias if it has one, while the context is active."""
        name = self._architecture.embedding if self._model_layout.tied else self._architecture.head
        head = self._model.get_submodule(self._architecture.head)
        head.weight = parameter(self._weights.read(f"{name}.weight"))
        bias = f"{self._architecture.head}.bias"
        if bias in self._model_layout.by_name:
            head.bias = parameter(self._weights.read(bias))
        try:
            yield
        finally:
            free_weights(head)

    def _write_states(self, start: int, states: Tensor) -> None:
        self._states.write(start, states)

    def _copy_states(self) -> HiddenStates:
        """Return a copy of the current states in a new store."""
        copy = self._make_store()
        for start, stop in self._row_spans():
            copy.write(start, self._states.read(start, stop))
        return copy

    def _make_store(self, width: int | None = None) -> TokenStates:
        """Return a new store for states of all rows, ``width`` wide or as wide as the hidden states."""
        rows, length = self._rows.shape
        shape = (rows, length, width or self._layout.values_per_token)
        store = OnDisk(*shape, self._directory) if self._directory else InMemory(*shape)
        self._stores.append(store)
        return store

    def _weight_mapping(self) -> WeightMapping | None:
        """Return the mapping for tensors that files hold in another layout; None if none is needed."""
        if self._architecture.derivation is None and not self._architecture.has_weight_conversion:
            return None
        return WeightMapping(self._model, [tensor.header for tensor in self._model_layout.tensors])

    def _final_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the spans of rows that run through the end of the model together."""
        yield from self._row_spans(1 if self._images is not None else 0)

    def _row_spans(self, step: int = 0, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield spans of rows from ``first`` on, ``step`` at a time, or one micro-batch at a time if it is 0."""
        count, step = len(self._rows), step or self._micro_batch
        for start in range(first, count, step):
            yield start, min(start + step, count)


def _check_rows(rows: Tensor, dimensions: Dimensions, architecture: Architecture) -> None:
    if rows.dim() != 2 or not rows.numel():
        raise InputError(
            f"calibration rows of shape {list(rows.shape)}", "at least one row of tokens is needed"
        )
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= dimensions.vocab:
        raise InputError(
            f"token id {low if low < 0 else high} is outside of the vocabulary of {dimensions.vocab}",
            "the tokenizer does not belong to this model",
        )
    learned = any(
        "positions" in size for item in architecture.outer_parameters for size in item.shape
    )
    if learned and rows.shape[1] > dimensions.positions:
        raise InputError(
            f"rows of {rows.shape[1]} tokens, the model has {dimensions.positions} positions",
            f"--length {dimensions.positions}",
        )
