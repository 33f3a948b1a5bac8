"""The model, one block at a time: stock transformers code around weights that come and go.

The skeleton has no weights. Its blocks are taken out of the model and replaced by stand-ins; one forward of the model
on a micro-batch then computes the embedding, and shows what the model hands to each block beside the hidden states:
attention masks, rotary embeddings, per layer type where a family mixes them. These depend on the shape of the
micro-batch alone, so that they are recorded once, and once for a single row, since rows pass a block side by side; or
they depend on the tokens or on earlier blocks, and are computed anew for every row (`quantforge.model.block_inputs`).
After that, a block is filled from the checkpoint, observed, changed by a method, run over the hidden states of all
rows, and emptied. At the end the stand-ins inject the final states, and norm, head and soft-capping are again the
model's own code. The result is that of the whole model.

Memory: one block in float32, the hidden states (or one micro-batch of them, when they are on disk), and the
activations of one micro-batch. Of the embedding only the rows of tokens that occur are held; everything else outside of
the blocks is filled, but for the head.
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
from quantforge.model.block import Batch, BlockRows, DecoderBlock
from quantforge.model.block_inputs import Call, Passage, Replay, ShapeCalls, StandIn
from quantforge.model.decoder_calls import DecoderCalls, decoder_calls
from quantforge.model.experts import Experts
from quantforge.model.hidden_states import (
    HiddenStates,
    InMemory,
    LeafStore,
    OnDisk,
    StateLayout,
    TokenStates,
)
from quantforge.model.model_parts import decoder_of, find_base_model
from quantforge.model.skeleton import build
from quantforge.model.weight_loading import (
    LARGE,
    EmbeddingRows,
    ModuleWeights,
    TensorSource,
    empty,
    is_lookup,
    parameter,
)
from quantforge.model.weight_mapping import WeightMapping

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample


class ModelStream:
    """Iterator over the blocks of a model as `DecoderBlock`; each has to be advanced before the next.

    Args:
        checkpoint: gives tensors by stored name; a caller may wrap it to hand out changed tensors.
        model_layout: of the same checkpoint, with declarations (``model_layout.architecture`` is not None).
        rows: token ids ``[rows, length]``, or rows with images.
        micro_batch: rows of one forward; sums depend on it, so that it belongs to the recipe.
        device: where blocks are run.
        activations: directory for hidden states on disk, a store for those between blocks, or None for memory.
        precision: ``bfloat16`` runs the matrix products of blocks in that type, ``float32`` exactly.

    Raises:
        InputError: no rows, token ids outside of the vocabulary, rows longer than the learned positions; or as `build`.
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
        self._model = build(checkpoint.config)
        self._inner = find_base_model(self._model) or self._model
        self._weights = ModuleWeights(checkpoint, model_layout, device, self._names())
        self._directory = activations if isinstance(activations, Path) else None
        self._given = None if isinstance(activations, Path) else activations
        self._stores: list[HiddenStates] = []
        self._states: HiddenStates
        self._layout = StateLayout(0, (self._dimensions.hidden,))
        self._leaves = LeafStore(self._directory)  # of what blocks return beside the states
        self._calls: dict[int, list[Call]] = {}  # of all blocks, by the number of rows
        self._decoder_calls: DecoderCalls | None = None
        self._replay: Replay | None = None
        self._of_thread = threading.local()
        self._held = ExitStack()
        self._held.callback(self._leaves.close)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        blocks = self._model.get_submodule(self._architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)  # for the type checker
        self._blocks = list(blocks)
        kinds = zip(self._blocks, model_layout.layers, strict=True)
        self._standins = [StandIn(block, kind.returned) for block, kind in kinds]
        for index, standin in enumerate(self._standins):
            blocks[index] = standin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the hidden states, what blocks returned beside them, and the rows of embeddings."""
        self._held.close()
        for store in self._stores:
            store.close()

    def __iter__(self) -> Iterator[DecoderBlock]:
        """Embed all rows, then yield each block, filled from the checkpoint."""
        self.embed()
        for index in range(len(self._blocks)):
            part = self.block(index)
            yield part
            if not part.advanced:
                raise RuntimeError(f"{part.name} was not advanced")
            part.close()
            if self._replay is not None and index in self._replay.again:
                self._replay.again[index] = self._copy()

    def embed(self) -> None:
        """Embed all rows, and record what blocks get beside them, or prepare to compute it anew."""
        self._fill()
        if self._images is not None:
            self._decoder_calls = decoder_calls(
                self._checkpoint,
                self._model_layout,
                self._images,
                decoder_of(self._model, self._architecture.blocks),
                self._leaves,
                device=self._device,
            )
        self._layout = StateLayout.of(self._embedded(0, 1).shape, 1, self._rows.shape[1])
        for start, stop in self._spans():
            states = self._layout.packed(self._embedded(start, stop))
            if not start:
                self._states = self._given or self._store()
            self._write(start, states)
        self._forget()
        if self._architecture.replayed or self._decoder_calls is not None:
            ids = self._rows.to(self._device)
            self._replay = Replay(
                self._standins, self._run, ids, self._layout, self._leaves, self._decoder_calls
            )
        else:
            if (
                self._architecture.derived is None
            ):  # other families may read embeddings after the blocks
                self._held.close()
            self._standins[-1].answer = self._final_states

    def block(self, index: int) -> DecoderBlock:
        """Return a block, filled from the checkpoint; the hidden states are taken for those in front of it."""
        module = self._blocks[index]
        refill = partial(self._weights.fill_block, module, index)
        stored = refill()
        kind = self._model_layout.layers[index]
        experts, bfloat16 = None, self._precision == "bfloat16"
        if kind.stacks:
            load = partial(self._weights.expert, module, index)
            name = self._model_layout.block_name(index)
            experts = Experts(name, module, kind, load, bfloat16=bfloat16)
        count, length = self._rows.shape
        return DecoderBlock(
            index,
            module,
            self._model_layout,
            stored,
            BlockRows((count, length), partial(self._batches, index), self._write, self._store),
            experts,
            refill=refill,
            bfloat16=bfloat16,
        )

    def final_hidden(self) -> Iterator[Tensor]:
        """Yield the states after the last block, the input of the head: ``[rows, length, hidden]`` per micro-batch."""
        for start, stop in self._ends():
            states = self._states.read(start, stop).to(self._device)
            yield self._finish(self._inner, start, states).last_hidden_state

    def logits(self) -> Iterator[Tensor]:
        """Yield logits ``[rows, length, vocab]`` per micro-batch, after the last block. The whole head is in memory."""
        with self._filled_head():
            for start, stop in self._ends():
                states = self._states.read(start, stop).to(self._device)
                yield self._finish(self._model, start, states).logits

    def _fill(self) -> None:
        """Load everything outside the blocks except the head and towers; of embeddings only rows that occur."""
        own = {item.name for item in self._model_layout.tensors if item.role is not Role.FOREIGN}
        head, main = self._architecture.head, self._architecture.embedding
        tokens = torch.unique(self._rows)
        for name in self._model.state_dict():
            path = name.rpartition(".")[0]
            module = self._model.get_submodule(path)
            large = is_lookup(module) and module.weight.numel() > LARGE
            if path == main or (large and name in self._model_layout.by_name):
                occurring = tokens if path == main else tokens[:0]
                EmbeddingRows(module, partial(self._weights.rows, name), occurring, self._held)
            elif path != head and (name in own or not self._architecture.text_config):
                self._weights.fill(self._model, name)

    def _run(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the last norm."""
        found: Tensor = self._inner(input_ids=ids, use_cache=False).last_hidden_state
        return found

    def _embedded(self, start: int, stop: int) -> Tensor:
        """Return the hidden states before the first block, and record the other arguments of the blocks."""
        if self._decoder_calls is None:
            self._run(self._rows[start:stop].to(self._device))
            self._calls.setdefault(stop - start, [standin.call for standin in self._standins])
            return self._standins[0].states
        found = []
        for row in range(start, stop):
            with self._decoder_calls.at(row):
                self._run(self._rows[row : row + 1].to(self._device))
            found.append(self._standins[0].states)
        return found[0] if len(found) == 1 else torch.cat(found, self._layout.axis)

    def _passage(self, index: int) -> Passage:
        """Return how rows reach a block."""
        if self._replay is not None:
            return self._replay.at(index)
        calls = {rows: found[index] for rows, found in self._calls.items()}
        return ShapeCalls(self._layout, calls)

    def _is_read_later(self, index: int) -> bool:
        """Return whether what a block returns is read by more than the next block."""
        return self._replay is not None and self._replay.at(index + 1).remembers

    def _batches(self, index: int) -> Iterator[Batch]:
        passage = self._passage(index)
        for start, stop in self._spans():
            yield Batch(start, self._states.read(start, stop).to(self._device), passage)

    def _finish(self, model: nn.Module, start: int, states: Tensor) -> Any:
        """Run the end of the model, or of its base model, on the packed states after the last block.

        Safe on several threads.
        """
        if self._replay is not None:
            return self._replay.ended(
                start, states, lambda ids: model(input_ids=ids, use_cache=False)
            )
        self._of_thread.states = self._layout.unpacked(states)
        try:
            return model(inputs_embeds=states[..., : self._dimensions.hidden], use_cache=False)
        finally:
            del self._of_thread.states
            self._forget()

    def _final_states(self, _: Tensor, __: Call) -> Any:
        """Return, in place of the last block's output, the states that this thread is finishing."""
        return self._standins[-1].wrapped(self._of_thread.states)

    def _forget(self) -> None:
        for standin in self._standins:
            standin.forget()

    @contextmanager
    def _filled_head(self) -> Iterator[None]:
        """Hold the weight of the head, and its bias where it has one."""
        name = self._architecture.embedding if self._model_layout.tied else self._architecture.head
        head = self._model.get_submodule(self._architecture.head)
        head.weight = parameter(self._weights.read(f"{name}.weight"))
        bias = f"{self._architecture.head}.bias"
        if bias in self._model_layout.by_name:
            head.bias = parameter(self._weights.read(bias))
        try:
            yield
        finally:
            empty(head)

    def _write(self, start: int, states: Tensor) -> None:
        self._states.write(start, states)

    def _copy(self) -> HiddenStates:
        """Return a copy of the present states in a new store."""
        copy = self._store()
        for start, stop in self._spans():
            copy.write(start, self._states.read(start, stop))
        return copy

    def _store(self, width: int | None = None) -> TokenStates:
        """Return a new store for states of all rows, ``width`` wide or as wide as the hidden states."""
        rows, length = self._rows.shape
        shape = (rows, length, width or self._layout.width)
        store = OnDisk(*shape, self._directory) if self._directory else InMemory(*shape)
        self._stores.append(store)
        return store

    def _names(self) -> WeightMapping | None:
        """Return the mapping for tensors that files hold in another form; None if the declarations need none."""
        if self._architecture.derived is None and not self._architecture.converted:
            return None
        return WeightMapping(self._model, [tensor.header for tensor in self._model_layout.tensors])

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Yield the spans of rows that go through the end of the model together."""
        yield from self._spans(1 if self._images is not None else 0)

    def _spans(self, step: int = 0, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the rows from ``first`` on that pass together: ``step`` at a time, or those of a micro-batch."""
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
    learned = any("positions" in size for item in architecture.outer for size in item.shape)
    if learned and rows.shape[1] > dimensions.positions:
        raise InputError(
            f"rows of {rows.shape[1]} tokens, the model has {dimensions.positions} positions",
            f"--length {dimensions.positions}",
        )
