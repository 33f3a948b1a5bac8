"""The residual stream: which tensors read it and which write to it, as far as declarations prove it.

An orthogonal matrix ``Q`` applied to the stream is undone by its readers, ``W Q``, and applied by its writers, ``Q^T
W``, if nothing else acts on single channels. An RMS norm without a gain satisfies this, since ``|x Q| = |x|``; its gain
can be folded into its readers. A norm that subtracts the mean does not, nor does a norm of what is written.

The proof is a declared graph that covers every parameter: it determines which norm each half of a block reads, and that
the output of each half is added to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.layer_kind import FoldKind, LayerKind, Parameter
from quantforge.architectures.match import ModelLayout
from quantforge.errors import RefusedError

_OMIT_HINT = "leave it out: the rest of the method works without it"


@dataclass(frozen=True, slots=True)
class StreamAxis:
    """Axis of a tensor along which the channels of the residual stream lie.

    Attributes:
        axis: index of the axis.
        norm: canonical name of the norm weight through which the tensor reads the stream; "" if it writes to it.
    """

    axis: int
    norm: str = ""


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """All tensors that read or write the residual stream, and the norms between.

    Attributes:
        axes: stream axis of every reader and writer by canonical name; a tied head is not included.
        norms: canonical names of all norm weights.
    """

    axes: dict[str, StreamAxis]
    norms: tuple[str, ...]


def find_residual_stream(model_layout: ModelLayout, requested_by: str) -> ResidualStream:
    """Find all tensors that read or write the residual stream of a declared model.

    Args:
        model_layout: the model.
        requested_by: the feature that needs this, for refusals.

    Raises:
        RefusedError: it is not proven that all readers and writers are known; names the tensor or the structure.
    """
    return _StreamProof(model_layout, requested_by).stream()


class _StreamProof:
    """Proof, for one model, that all readers and writers of the residual stream are known."""

    def __init__(self, model_layout: ModelLayout, requested_by: str) -> None:
        self._model_layout, self._requested_by = model_layout, requested_by

    def stream(self) -> ResidualStream:
        """Return the stream, or refuse."""
        graph, architecture = self._graph()
        axes: dict[str, StreamAxis] = {}
        norms: list[str] = [f"{architecture.final_norm}.weight"]
        axes[f"{architecture.embedding}.weight"] = StreamAxis(1)
        if not self._model_layout.tied:
            axes[f"{architecture.head}.weight"] = StreamAxis(1, norms[0])
        outer = {*axes, *norms, f"{architecture.head}.weight"}
        for item in architecture.outer_parameters:
            if item.name not in outer and self._has(item.name) and _has_hidden_dimension(item):
                self._refuse(
                    item.name,
                    "has channels of the residual stream, and is neither embedding, last norm nor head",
                )
        for index, kind in enumerate(self._model_layout.layers):
            block = self._model_layout.block_name(index)
            norm_of_half = _norms_before_halves(graph)
            norms += [f"{block}.{norm}.weight" for norm in dict.fromkeys(norm_of_half.values())]
            for item in kind.parameters:
                name = f"{block}.{item.name}"
                if self._has(name) and _has_hidden_dimension(item) and name not in norms:
                    axes[name] = self._stream_axis(name, item, kind, block, norm_of_half)
        for norm in norms:
            if not self._has(norm):
                self._refuse(norm, "is not there: what a half of a block reads is no norm")
        return ResidualStream(axes, tuple(norms))

    def _graph(self) -> tuple[DecoderGraph, Architecture]:
        architecture = self._model_layout.architecture
        if architecture is None or architecture.derivation is not None:
            self._refuse(self._model_layout.model_type, "is not declared")
        for tensor in self._model_layout.foreign_tensors:
            self._refuse(
                tensor.header.name,
                "lies outside of the decoder, and may read or write its residual stream",
                "--mtp drop leaves heads for further tokens out"
                if tensor.draft_head
                else _OMIT_HINT,
            )
        graph = architecture.graph_if_complete
        if graph is None or architecture.transposed:
            self._refuse(
                architecture.model_type, "has no declared graph that covers all of its tensors"
            )
        if architecture.centred_norms:
            self._refuse(
                f"{architecture.final_norm}.weight",
                "is of a norm that subtracts the mean of all channels",
            )
        for norm in filter(None, (graph.norm_after_attention, graph.norm_after_mlp)):
            self._refuse(
                f"{architecture.blocks}.*.{norm}.weight",
                "is of a norm over what is added to the residual stream, channel by channel",
            )
        return graph, architecture

    def _stream_axis(
        self, name: str, item: Parameter, kind: LayerKind, block: str, norm_of_half: dict[str, str]
    ) -> StreamAxis:
        """Return the stream axis of one tensor of a block, or refuse."""
        is_transposed = any(
            stack.transposed for stack in kind.stacks if stack.parameter == item.name
        )
        matrix_axes = (len(item.shape) - 1, len(item.shape) - 2)
        reads, writes = matrix_axes[::-1] if is_transposed else matrix_axes
        hidden_axes = [axis for axis, size in enumerate(item.shape) if "hidden" in size]
        if len(hidden_axes) > 1 or item.shape[hidden_axes[0]] != "hidden":
            self._refuse(name, "has channels of the residual stream in a way that is not known")
        if len(item.shape) == 1:
            module = name.removesuffix(".bias")
            if module == name or not self._has(f"{module}.weight"):
                self._refuse(name, "multiplies or adds to single channels of the residual stream")
            return StreamAxis(0)
        if hidden_axes[0] == writes:
            return StreamAxis(writes)
        half = next((half for half in norm_of_half if item.name.startswith(f"{half}.")), None)
        norm = norm_of_half.get(half or "")
        fold_norms = {
            shared.scale_fold.module
            for shared in kind.inputs
            if shared.scale_fold is not None and shared.scale_fold.kind is not FoldKind.ROWS
            if item.name.removesuffix(".weight") in shared.readers
        }
        if hidden_axes[0] != reads or norm is None or not fold_norms <= {norm}:
            self._refuse(name, "reads the residual stream in a way that is not known")
        return StreamAxis(reads, f"{block}.{norm}.weight")

    def _has(self, name: str) -> bool:
        return name in self._model_layout.by_name

    def _refuse(self, subject: str, reason: str, hint: str = _OMIT_HINT) -> NoReturn:
        raise RefusedError(f"{self._requested_by}: {subject} {reason}", hint)


def _norms_before_halves(graph: DecoderGraph) -> dict[str, str]:
    """Return the norm that each half of a block reads, by the module of the half."""
    return {
        graph.attention_module: graph.norm_before_attention,
        "mlp": graph.norm_before_mlp or graph.norm_before_attention,
    }


def _has_hidden_dimension(item: Parameter) -> bool:
    return any("hidden" in size.replace("*", "+").split("+") for size in item.shape)
