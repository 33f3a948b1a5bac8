"""A model with weights around stand-ins for its blocks: it embeds rows, hands them to blocks, and ends in logits.

Of embeddings only the rows of tokens that occur are held; everything else outside of the blocks is filled, but for the
head. Where what blocks get depends on the shape of rows alone, it is recorded while they are embedded, and the rows of
the embedding are let go; else the model runs again for rows whenever they pass a block (`quantforge.model.passage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, Role, declared
from quantforge.model.decoder_calls import DecoderCalls, decoder_of
from quantforge.model.embedding_rows import LARGE, EmbeddingRows, is_lookup
from quantforge.model.inner import inner_of
from quantforge.model.kept_leaves import KeptLeaves
from quantforge.model.loading import ModuleWeights
from quantforge.model.passage import Passage, Replay, ShapeCalls
from quantforge.model.standins import Call, StandIn
from quantforge.model.state_layout import StateLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AroundBlocks:
    """A model whose blocks were taken out.

    Args:
        model: a skeleton; its list of blocks is changed.
        matched: of the same model, with declarations.
        weights: reads the checkpoint.
        rows: token ids ``[rows, length]``.
        device: where it runs.
        activations: directory for what blocks return beside the hidden states, or None to keep it in memory.
        seen: makes the arguments of the text tower for rows with images; it is given the tower, and what keeps them.

    Attributes:
        blocks: that were taken out, empty.
        inner: the part of the model that ends in hidden states.
        layout: of the hidden states, once rows were embedded.
        replay: what runs the model again, once rows were embedded; None where nothing does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        matched: Matched,
        weights: ModuleWeights,
        rows: Tensor,
        device: torch.device,
        activations: Path | None = None,
        seen: Callable[[nn.Module, KeptLeaves], DecoderCalls] | None = None,
    ) -> None:
        self._seen = seen
        self._given: DecoderCalls | None = None
        self._model, self._matched, self._weights = model, matched, weights
        self._rows, self._device = rows, device
        self._architecture, self._dimensions = declared(matched)
        self.inner = inner_of(model) or model
        self.layout = StateLayout(0, (self._dimensions.hidden,))
        self.replay: Replay | None = None
        self._calls: dict[int, list[Call]] = {}
        self._held = ExitStack()
        self._leaves = KeptLeaves(activations)
        self._held.callback(self._leaves.close)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.blocks, self._standins = self._taken()

    def close(self) -> None:
        """Let go of the rows of embeddings, and of what blocks returned beside the hidden states."""
        self._held.close()

    def embedded(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        """Embed spans ``(start, stop)`` of rows; yield each start with the states ``[rows, length, width]`` it has."""
        self._fill()
        if self._seen is not None:
            decoder = decoder_of(self._model, self._architecture.blocks)
            self._given = self._seen(decoder, self._leaves)
        self.layout = StateLayout.of(self._embed(0, 1).shape, 1, self._rows.shape[1])
        for start, stop in spans:
            yield start, self.layout.packed(self._embed(start, stop))
        self._forget()
        if self._architecture.replayed or self._given is not None:
            ids = self._rows.to(self._device)
            self.replay = Replay(
                self._standins, self._run, ids, self.layout, self._leaves, self._given
            )
        else:
            self._held.close()

    def passage(self, index: int) -> Passage:
        """Return how rows get into a block."""
        if self.replay is not None:
            return self.replay.at(index)
        calls = {rows: found[index] for rows, found in self._calls.items()}
        return ShapeCalls(self.layout, calls)

    def finished(self, model: nn.Module, start: int, states: Tensor) -> Any:
        """Return what the model, or its inner part, computes of the packed states of rows behind the last block."""
        if self.replay is not None:
            return self.replay.ended(
                start, states, lambda ids: model(input_ids=ids, use_cache=False)
            )
        inject = self._standins[-1].inject
        inject.states = self.layout.unpacked(states)
        try:
            return model(inputs_embeds=states[..., : self._dimensions.hidden], use_cache=False)
        finally:
            del inject.states
            self._forget()

    def _taken(self) -> tuple[list[nn.Module], list[StandIn]]:
        blocks = self._model.get_submodule(self._architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)  # for the type checker
        taken = list(blocks)
        kinds = self._matched.layers
        standins = [StandIn(*pair) for pair in zip(taken, (k.returned for k in kinds), strict=True)]
        for index, standin in enumerate(standins):
            blocks[index] = standin
        return taken, standins

    def _fill(self) -> None:
        """Fill everything around the blocks but the head and towers; of embeddings the rows of tokens that occur."""
        own = {item.name for item in self._matched.tensors if item.role is not Role.FOREIGN}
        head, main = self._architecture.head, self._architecture.embedding
        tokens = torch.unique(self._rows)
        for name in self._model.state_dict():
            path = name.rpartition(".")[0]
            module = self._model.get_submodule(path)
            large = is_lookup(module) and module.weight.numel() > LARGE
            if path == main or (large and name in self._matched.by_name):
                occurring = tokens if path == main else tokens[:0]
                EmbeddingRows(module, partial(self._weights.rows, name), occurring, self._held)
            elif path != head and (name in own or not self._architecture.text_config):
                self._weights.fill(self._model, name)

    def _run(self, ids: Tensor) -> Tensor:
        """Return the hidden states behind the last norm."""
        found: Tensor = self.inner(input_ids=ids, use_cache=False).last_hidden_state
        return found

    def _embed(self, start: int, stop: int) -> Tensor:
        """Return the hidden states before the first block; note what the blocks get beside them."""
        if self._given is not None:
            return self._embed_given(range(start, stop))
        self._run(self._rows[start:stop].to(self._device))
        self._calls.setdefault(stop - start, [standin.call for standin in self._standins])
        return self._standins[0].states

    def _embed_given(self, rows: range) -> Tensor:
        """Return the hidden states of rows of which the text tower gets arguments that were noted."""
        assert self._given is not None
        found = []
        for row in rows:
            with self._given.at(row):
                self._run(self._rows[row : row + 1].to(self._device))
            found.append(self._standins[0].states)
        return found[0] if len(found) == 1 else torch.cat(found, self.layout.axis)

    def _forget(self) -> None:
        for standin in self._standins:
            standin.forget()
