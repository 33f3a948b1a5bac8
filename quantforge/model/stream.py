"""The model, one block at a time: stock transformers code around weights that come and go.

The skeleton has no weights. Its blocks are taken out of the model and replaced by recorders; one forward of the model
on a micro-batch then computes the embedding, and shows what the model hands to each block beside the hidden states:
attention masks, rotary embeddings, per layer type where a family mixes them. These depend on the shape of the
micro-batch alone, so that they are recorded once, and once for a single row, since rows pass a block side by side.
After that, a block is filled from the checkpoint, observed, changed by a method, run over the hidden states of all
rows, and emptied. At the end the recorders inject the final states, and norm, head and soft-capping are again the
model's own code. The result is that of the whole model.

Memory: one block in float32, the hidden states (or one micro-batch of them, when they are on disk), and the
activations of one micro-batch. Of the embedding only the rows of tokens that occur are held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched, declared
from quantforge.errors import InputError
from quantforge.model.block import Batch, BlockPart, Call
from quantforge.model.hidden_states import HiddenStates, InMemory, OnDisk
from quantforge.model.loading import ModuleWeights, TensorSource, empty, parameter
from quantforge.model.skeleton import build


class _Recorder(nn.Module):
    """Stand-in for a block: notes its arguments and returns the hidden states, or those that its thread injects."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)
        self.call = Call((), {})
        self.inject = threading.local()  # its ``states``

    def forward(self, states: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.states, self.call = states, Call(args, kwargs)
        injected: Tensor = getattr(self.inject, "states", states)
        return injected


class ModelStream:
    """Iterator over the blocks of a model as `BlockPart`; each has to be advanced before the next.

    Args:
        checkpoint: gives tensors by stored name; a caller may wrap it to hand out changed tensors.
        matched: of the same checkpoint, with declarations (``matched.architecture`` is not None).
        rows: token ids ``[rows, length]``.
        micro_batch: rows of one forward; sums depend on it, so that it belongs to the recipe.
        activations: directory for hidden states on disk, or None to keep them in memory.
        precision: ``bfloat16`` runs the matrix products of blocks in that type, ``float32`` exactly.

    Raises:
        InputError: token ids outside of the vocabulary, rows longer than the model's positions.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        matched: Matched,
        rows: Tensor,
        *,
        micro_batch: int = 8,
        device: str | torch.device = "cpu",
        activations: Path | None = None,
        precision: str = "float32",
    ) -> None:
        self._precision = precision
        self._architecture, self._dimensions = declared(matched)
        _check_rows(rows, self._dimensions, self._architecture)
        self._weights = ModuleWeights(checkpoint, matched, device)
        self._matched = matched
        self._rows = rows
        self._micro_batch = micro_batch
        self._device = torch.device(device)
        self._model = build(checkpoint.config)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        self._blocks, self._recorders = self._take_blocks()
        self._calls: dict[int, list[Call]] = {}
        self._activations = activations
        self._stores: list[HiddenStates] = []
        self._states = self._store()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the hidden states."""
        for store in self._stores:
            store.close()

    def __iter__(self) -> Iterator[BlockPart]:
        """Embed all rows, then yield each block, filled from the checkpoint."""
        self._embed()
        for index in range(len(self._blocks)):
            part = self._filled(index)
            yield part
            if not part.advanced:
                raise RuntimeError(f"{part.name} was not advanced")
            empty(part.module)

    def final_hidden(self) -> Iterator[Tensor]:
        """Yield the states after the last block, the input of the head: ``[rows, length, hidden]`` per micro-batch."""
        for start, stop in self._spans():
            states = self._states.read(start, stop).to(self._device)
            yield self._finish(self._model.base_model, states).last_hidden_state

    def logits(self) -> Iterator[Tensor]:
        """Yield logits ``[rows, length, vocab]`` per micro-batch, after the last block. The whole head is in memory."""
        with self._filled_head():
            for start, stop in self._spans():
                states = self._states.read(start, stop).to(self._device)
                yield self._finish(self._model, states).logits

    def _filled(self, index: int) -> BlockPart:
        """Read the weights of a block."""
        module = self._blocks[index]
        return BlockPart(
            (index, module, self._matched, self._weights.fill_block(module, index)),
            partial(self._batches, index),
            self._states.write,
            self._store,
            bfloat16=self._precision == "bfloat16",
        )

    @contextmanager
    def _filled_head(self) -> Iterator[None]:
        """Hold the weight of the head."""
        name = self._architecture.embedding if self._matched.tied else self._architecture.head
        head = self._model.get_submodule(self._architecture.head)
        head.weight = parameter(self._weights.read(f"{name}.weight"))
        try:
            yield
        finally:
            empty(head)

    def _finish(self, model: nn.Module, states: Tensor) -> Any:
        """Return what a model computes of the states after the last block; safe on several threads."""
        inject = self._recorders[-1].inject
        inject.states = states
        try:
            return model(inputs_embeds=states, use_cache=False)
        finally:
            del inject.states
            self._forget()

    def _store(self) -> HiddenStates:
        """Return a new store for the states of all rows."""
        shape = (self._rows.shape[0], self._rows.shape[1], self._dimensions.hidden)
        store = OnDisk(*shape, self._activations) if self._activations else InMemory(*shape)
        self._stores.append(store)
        return store

    def _forget(self) -> None:
        for recorder in self._recorders:
            recorder.states, recorder.call = torch.empty(0), Call((), {})

    def _take_blocks(self) -> tuple[list[nn.Module], list[_Recorder]]:
        blocks = self._model.get_submodule(self._architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)  # for the type checker
        taken, recorders = list(blocks), [_Recorder() for _ in blocks]
        for index, recorder in enumerate(recorders):
            blocks[index] = recorder
        return taken, recorders

    def _embed(self) -> None:
        architecture = self._architecture
        modules = {item.name.rpartition(".")[0] for item in architecture.outer}
        for name in sorted(modules - {architecture.embedding, architecture.head}):
            self._weights.fill(self._model.get_submodule(name), name)
        embedding = self._model.get_submodule(architecture.embedding)
        # Ids are renumbered to the tokens that occur, and so are the rows of the table.
        tokens, ids = torch.unique(self._rows, return_inverse=True)
        embedding.padding_idx = None
        embedding.weight = parameter(self._weights.embedding_rows(tokens).to(self._device))
        for start, stop in self._spans():
            states = self._embedded(ids[start:stop])
            self._states.write(start, states)
        self._embedded(ids[:1])
        self._forget()
        empty(embedding)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return the hidden states before the first block; note what the blocks get beside them."""
        self._model.base_model(input_ids=ids.to(self._device), use_cache=False)
        self._calls.setdefault(len(ids), [recorder.call for recorder in self._recorders])
        return self._recorders[0].states

    def _batches(self, index: int) -> Iterator[Batch]:
        for start, stop in self._spans():
            states = self._states.read(start, stop).to(self._device)
            yield Batch(start, states, self._calls[stop - start][index], self._calls[1][index])

    def _spans(self) -> Iterator[tuple[int, int]]:
        count = len(self._rows)
        for start in range(0, count, self._micro_batch):
            yield start, min(start + self._micro_batch, count)


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
