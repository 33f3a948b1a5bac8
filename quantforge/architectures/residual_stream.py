"""The residual stream of a model: which tensors read it, and which write into it, as far as declarations prove it.

An orthogonal matrix ``Q`` applied to the stream is undone by its readers, ``W Q``, and applied by its writers,
``Q^T W``, if nothing else looks at single channels. An RMS norm without a gain does not, since ``|x Q| = |x|``; its
gain can be handed to what reads it. A norm that subtracts the mean, or one over what is written, does.

Proof is a declared graph that covers every parameter: it says which norm each half of a block reads, and that what
a half returns is added to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_kind import FoldKind, LayerKind, Parameter
from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError

_HINT = "leave it out: the rest of the method works without it"


@dataclass(frozen=True, slots=True)
class Channels:
    """Axis of a tensor along which the channels of the residual stream lie.

    Attributes:
        axis: along which its channels lie.
        norm: canonical name of the gain through which it reads the stream; "" where it writes into it.
    """

    axis: int
    norm: str = ""


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """All tensors that read or write the residual stream, by canonical name, and the norms.

    Attributes:
        places: of readers and writers; a tied head is not among them.
        norms: canonical names of all gains.
    """

    places: dict[str, Channels]
    norms: tuple[str, ...]


def residual_stream(model_layout: ModelLayout, asked: str) -> ResidualStream:
    """Return the residual stream of a declared model.

    Args:
        model_layout: the model.
        asked: what needs to know, for refusals.

    Raises:
        RefusedError: it is not proven that all readers and writers are known; names the tensor or the structure.
    """
    return _Proof(model_layout, asked).stream()


class _Proof:
    """Proof, for one model, that all readers and writers of the residual stream are known."""

    def __init__(self, model_layout: ModelLayout, asked: str) -> None:
        self._model_layout, self._asked = model_layout, asked

    def stream(self) -> ResidualStream:
        """Return the stream, or refuse."""
        graph, architecture = self._graph()
        places: dict[str, Channels] = {}
        norms: list[str] = [f"{architecture.final_norm}.weight"]
        places[f"{architecture.embedding}.weight"] = Channels(1)
        if not self._model_layout.tied:
            places[f"{architecture.head}.weight"] = Channels(1, norms[0])
        outer = {*places, *norms, f"{architecture.head}.weight"}
        for item in architecture.outer:
            if item.name not in outer and self._has(item.name) and _touches(item):
                self._refuse(
                    item.name,
                    "has channels of the residual stream, and is neither embedding, last norm nor head",
                )
        for index, kind in enumerate(self._model_layout.layers):
            block = self._model_layout.block_name(index)
            before = _norms(graph)
            norms += [f"{block}.{norm}.weight" for norm in dict.fromkeys(before.values())]
            for item in kind.parameters:
                name = f"{block}.{item.name}"
                if self._has(name) and _touches(item) and name not in norms:
                    places[name] = self._place(name, item, kind, block, before)
        for norm in norms:
            if not self._has(norm):
                self._refuse(norm, "is not there: what a half of a block reads is no norm")
        return ResidualStream(places, tuple(norms))

    def _graph(self) -> tuple[DecoderGraph, Architecture]:
        architecture = self._model_layout.architecture
        if architecture is None or architecture.derived is not None:
            self._refuse(self._model_layout.model_type, "is not declared")
        for tensor in self._model_layout.foreign:
            self._refuse(
                tensor.header.name,
                "lies outside of the decoder, and may read or write its residual stream",
                "--mtp drop leaves heads for further tokens out" if tensor.draft_head else _HINT,
            )
        graph = architecture.own_graph
        if graph is None or architecture.transposed:
            self._refuse(
                architecture.model_type, "has no declared graph that covers all of its tensors"
            )
        if architecture.centred_norms:
            self._refuse(
                f"{architecture.final_norm}.weight",
                "is of a norm that subtracts the mean of all channels",
            )
        for norm in filter(None, (graph.after_attention, graph.after_mlp)):
            self._refuse(
                f"{architecture.blocks}.*.{norm}.weight",
                "is of a norm over what is added to the residual stream, channel by channel",
            )
        return graph, architecture

    def _place(
        self, name: str, item: Parameter, kind: LayerKind, block: str, before: dict[str, str]
    ) -> Channels:
        """Return the place of one tensor of a block."""
        turned = any(stack.transposed for stack in kind.stacks if stack.parameter == item.name)
        ends = (len(item.shape) - 1, len(item.shape) - 2)
        reads, writes = ends[::-1] if turned else ends
        found = [axis for axis, size in enumerate(item.shape) if "hidden" in size]
        if len(found) > 1 or item.shape[found[0]] != "hidden":
            self._refuse(name, "has channels of the residual stream in a way that is not known")
        if len(item.shape) == 1:
            owner = name.removesuffix(".bias")
            if owner == name or not self._has(f"{owner}.weight"):
                self._refuse(name, "multiplies or adds to single channels of the residual stream")
            return Channels(0)
        if found[0] == writes:
            return Channels(writes)
        half = next((half for half in before if item.name.startswith(f"{half}.")), None)
        norm = before.get(half or "")
        told = {
            shared.scale_fold.module
            for shared in kind.inputs
            if shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS
            if item.name.removesuffix(".weight") in shared.readers
        }
        if found[0] != reads or norm is None or not told <= {norm}:
            self._refuse(name, "reads the residual stream in a way that is not known")
        return Channels(reads, f"{block}.{norm}.weight")

    def _has(self, name: str) -> bool:
        return name in self._model_layout.by_name

    def _refuse(self, what: str, why: str, hint: str = _HINT) -> NoReturn:
        raise RefusedError(f"{self._asked}: {what} {why}", hint)


def _norms(graph: DecoderGraph) -> dict[str, str]:
    """Return the norm that each half of a block reads, by the module of the half."""
    return {
        graph.attention: graph.before_attention,
        "mlp": graph.before_mlp or graph.before_attention,
    }


def _touches(item: Parameter) -> bool:
    return any("hidden" in size.replace("*", "+").split("+") for size in item.shape)
