"""The model, one block at a time: stock transformers code around weights that come and go.

The skeleton has no weights. Its blocks are taken out of the model and replaced by stand-ins; one forward of the model
on a micro-batch then computes the embedding, and shows what the model hands to each block beside the hidden states:
attention masks, rotary embeddings, per layer type where a family mixes them. These depend on the shape of the
micro-batch alone, so that they are recorded once, and once for a single row, since rows pass a block side by side; or
they depend on the tokens or on earlier blocks, and are computed anew for every row (`quantforge.model.passage`).
After that, a block is filled from the checkpoint, observed, changed by a method, run over the hidden states of all
rows, and emptied. At the end the stand-ins inject the final states, and norm, head and soft-capping are again the
model's own code. The result is that of the whole model.

Memory: one block in float32, the hidden states (or one micro-batch of them, when they are on disk), and the
activations of one micro-batch. Of the embedding only the rows of tokens that occur are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched, declared
from quantforge.errors import InputError
from quantforge.model.around_blocks import AroundBlocks
from quantforge.model.block import BlockPart
from quantforge.model.block_rows import Batch
from quantforge.model.decoder_calls import decoder_calls
from quantforge.model.experts import Experts
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk, TokenStates
from quantforge.model.loading import ModuleWeights, TensorSource, empty, parameter
from quantforge.model.names import Names
from quantforge.model.skeleton import build

if TYPE_CHECKING:
    from quantforge_calibration.sampler import Sample


class ModelStream:
    """Iterator over the blocks of a model as `BlockPart`; each has to be advanced before the next.

    Args:
        checkpoint: gives tensors by stored name; a caller may wrap it to hand out changed tensors.
        matched: of the same checkpoint, with declarations (``matched.architecture`` is not None).
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
        matched: Matched,
        rows: Tensor | Sample,
        *,
        micro_batch: int = 8,
        device: str | torch.device = "cpu",
        activations: Path | HiddenStates | None = None,
        precision: str = "float32",
    ) -> None:
        self._precision = precision
        images = None if isinstance(rows, Tensor) or rows.images is None else rows
        rows = rows if isinstance(rows, Tensor) else rows.ids
        self._alone = images is not None
        self._architecture, self._dimensions = declared(matched)
        _check_rows(rows, self._dimensions, self._architecture)
        self._matched = matched
        self._rows = rows
        self._micro_batch = micro_batch
        self._device = torch.device(device)
        self._model = build(checkpoint.config)
        self._weights = ModuleWeights(checkpoint, matched, device, self._names())
        directory = activations if isinstance(activations, Path) else None
        given = None if isinstance(activations, Path) else activations
        seen = None
        if images is not None:
            seen = partial(decoder_calls, checkpoint, matched, images, device=self._device)

        self._around = AroundBlocks(
            self._model, matched, self._weights, rows, self._device, directory, seen
        )
        self._blocks = self._around.blocks
        self._directory, self._given = directory, given
        self._stores: list[HiddenStates] = []
        self._states: HiddenStates

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the hidden states, what blocks returned beside them, and the rows of embeddings."""
        self._around.close()
        for store in self._stores:
            store.close()

    def __iter__(self) -> Iterator[BlockPart]:
        """Embed all rows, then yield each block, filled from the checkpoint."""
        self.embed()
        for index in range(len(self._blocks)):
            part = self.block(index)
            yield part
            if not part.advanced:
                raise RuntimeError(f"{part.name} was not advanced")
            part.close()
            replay = self._around.replay
            if replay is not None and index in replay.again:
                replay.again[index] = self._copy()

    def embed(self) -> None:
        """Embed all rows."""
        for start, packed in self._around.embedded(list(self._spans())):
            if not start:
                self._states = self._given or self._store()
            self._write(start, packed)

    def block(self, index: int) -> BlockPart:
        """Return a block, filled from the checkpoint; the hidden states are taken for those in front of it."""
        module = self._blocks[index]
        refill = partial(self._weights.fill_block, module, index)
        stored = refill()
        kind, name = self._matched.layers[index], self._matched.block_name(index)
        rows, length = self._rows.shape
        experts, bfloat16 = None, self._precision == "bfloat16"
        if kind.stacks:
            load = partial(self._weights.expert, module, index)
            experts = Experts(name, module, kind, load, bfloat16=bfloat16)
        return BlockPart(
            (index, module, self._matched, stored, experts),
            partial(self._batches, index),
            self._write,
            self._store,
            (rows, length),
            refill=refill,
            bfloat16=bfloat16,
        )

    def final_hidden(self) -> Iterator[Tensor]:
        """Yield the states after the last block, the input of the head: ``[rows, length, hidden]`` per micro-batch."""
        for start, stop in self._ends():
            states = self._states.read(start, stop).to(self._device)
            yield self._finish(self._around.inner, start, states).last_hidden_state

    def logits(self) -> Iterator[Tensor]:
        """Yield logits ``[rows, length, vocab]`` per micro-batch, after the last block. The whole head is in memory."""
        with self._filled_head():
            for start, stop in self._ends():
                states = self._states.read(start, stop).to(self._device)
                yield self._finish(self._model, start, states).logits

    @contextmanager
    def _filled_head(self) -> Iterator[None]:
        """Hold the weight of the head, and its bias where it has one."""
        name = self._architecture.embedding if self._matched.tied else self._architecture.head
        head = self._model.get_submodule(self._architecture.head)
        head.weight = parameter(self._weights.read(f"{name}.weight"))
        bias = f"{self._architecture.head}.bias"
        if bias in self._matched.by_name:
            head.bias = parameter(self._weights.read(bias))
        try:
            yield
        finally:
            empty(head)

    def _finish(self, model: nn.Module, start: int, states: Tensor) -> Any:
        """Return what a model computes of the states of rows behind the last block; safe on several threads."""
        return self._around.finished(model, start, states)

    def _write(self, start: int, states: Tensor) -> None:
        self._states.write(start, states)

    def _copy(self) -> HiddenStates:
        """Return another store with the present states."""
        copy = self._store()
        for start, stop in self._spans():
            copy.write(start, self._states.read(start, stop))
        return copy

    def _names(self) -> Names | None:
        """Return the bridge for what files hold in another form; most declarations that were written need none."""
        if self._architecture.derived is None and not self._architecture.converted:
            return None
        return Names(self._model, [tensor.stored for tensor in self._matched.tensors])

    def _store(self, width: int | None = None) -> TokenStates:
        """Return a new store for the states of all rows, as wide as the hidden states are or as it says."""
        rows, length = self._rows.shape
        shape = (rows, length, width or self._around.layout.width)
        store = OnDisk(*shape, self._directory) if self._directory else InMemory(*shape)
        self._stores.append(store)
        return store

    def _batches(self, index: int) -> Iterator[Batch]:
        passage = self._around.passage(index)
        for start, stop in self._spans():
            yield Batch(start, self._states.read(start, stop).to(self._device), passage)

    def _ends(self) -> Iterator[tuple[int, int]]:
        """Yield the rows that go through the end of the model together."""
        yield from self._spans(1 if self._alone else 0)

    def _spans(self, step: int = 0, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the rows from the ``first`` one on that pass together."""
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
