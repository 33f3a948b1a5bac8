"""A block as the decoder computes it: its modules, joined where they read the same, and what differs between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture
from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.runtime.linear import PackedLinear
from quantforge_kernels import reference
from quantforge_kernels.attention import Scores
from quantforge_kernels.layers import add_bias, linear

SHARED = frozenset({"table"})  # of a codebook: one for all rows


class Joined:
    """Some linear layers as one.

    Args:
        parts: see `joinable`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        biases = [part.bias for part in parts]
        self._bias = None
        if biases[0] is not None:
            self._bias = torch.cat([bias for bias in biases if isinstance(bias, Tensor)])
        packed = [part for part in parts if isinstance(part, PackedLinear)]
        if packed:
            self._sizes = [part.problem.out_features for part in packed]
            self._problem = replace(packed[0].problem, out_features=sum(self._sizes))
            self._kernel = packed[0].chosen
            self._packed = {name: _together(packed, name) for name in packed[0].packed}
        else:
            self._sizes = [len(_weight(part)) for part in parts]
            self._weight: Tensor | None = torch.cat([_weight(part) for part in parts])
            for part, rows in zip(parts, torch.split(self._weight, self._sizes), strict=True):
                part.weight = nn.Parameter(rows, requires_grad=False)
            return
        self._weight = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply ``x`` ``[rows, in]``; return ``[rows, out]`` of each part."""
        if self._weight is not None:
            y = linear(x, self._weight, self._bias)
        else:
            y = self._kernel.matmul(x, self._packed, self._problem)
            y = y if self._bias is None else add_bias(y, self._bias)
        parts: tuple[Tensor, ...] = torch.split(y, self._sizes, dim=-1)
        return parts


def joinable(parts: Sequence[nn.Module]) -> bool:
    """Return whether the layers can be one: dense ones, or packed ones in one layout of rows."""
    if len({getattr(part, "bias", None) is None for part in parts}) > 1:
        return False
    if all(isinstance(part, nn.Linear) for part in parts):
        return True
    packed = [part for part in parts if isinstance(part, PackedLinear)]
    if len(packed) < len(parts):
        return False
    problems = {replace(part.problem, out_features=0) for part in packed}
    names = {tuple(part.packed) for part in packed}
    chosen = packed[0].chosen
    by_rows = chosen is reference.KERNEL or chosen.restore is not None
    apart = max(chosen.rows_apart, packed[0].problem.tile_rows)
    whole = all(part.problem.out_features % apart == 0 for part in packed)
    plain = all(part.takes_plain_input for part in packed)
    return len(problems) == len(names) == 1 and by_rows and whole and plain


def _together(parts: Sequence[PackedLinear], name: str) -> Tensor:
    """Join the packed weights of all parts to one tensor; the parts become views of it."""
    given = [part.packed[name] for part in parts]
    if name in SHARED:
        return given[0]
    whole = torch.cat(given)
    sizes = [len(value) for value in given]
    for part, rows in zip(parts, torch.split(whole, sizes), strict=True):
        part.register_buffer(name, rows)
    return whole


def _weight(part: nn.Module) -> Tensor:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight


@dataclass(frozen=True, slots=True)
class Layer:
    """One block; its modules are those of transformers.

    Attributes:
        attention, mlp: its halves.
        before_attention, after_attention: norms before and after attention, or None.
        before_mlp, after_mlp: likewise of the MLP.
        head_norms: norms of queries and keys, or None.
        scores: how attention makes scores.
        rotary: key of the frequencies, see `rotary`; None: positions do not matter.
        qkv: the projections to queries, keys and values as one; None where they are not joined.
        gate_up: likewise gate and up.
        fused: the projection to queries, keys and values that the family has as one, and how many rows each has in
            turn: of all heads, or of one where they alternate.
    """

    attention: Any
    mlp: Any
    before_attention: Any
    after_attention: Any
    before_mlp: Any
    after_mlp: Any
    head_norms: tuple[Any, Any] | None
    scores: Scores
    rotary: str | None
    qkv: Joined | None
    gate_up: Joined | None
    fused: tuple[Any, list[int]] | None = None

    def projections(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of rows ``[tokens, hidden]``."""
        if self.qkv is not None:
            return self.qkv(h)
        if self.fused is not None:
            y, sizes = multiply(self.fused[0], h), self.fused[1]
            parts: tuple[Tensor, ...] = torch.split(y.view(len(h), -1, sum(sizes)), sizes, dim=-1)
            return parts
        module = self.attention
        return tuple(multiply(part, h) for part in (module.q_proj, module.k_proj, module.v_proj))

    def mixed(self, h: Tensor, gate_by: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        """Return the MLP of rows ``[tokens, hidden]``; without ``gate_by`` its own module computes it."""
        module, fused = self.mlp, hasattr(self.mlp, "gate_up_proj")
        if gate_by is None or not (fused or hasattr(module, "gate_proj")):
            y = module(
                h[None]
            )  # mixtures want sequences; of some, the weights of experts come second
            only: Tensor = y[0] if isinstance(y, tuple) else y
            return only.view(h.shape)
        if self.gate_up is not None:
            gate, up = self.gate_up(h)
        elif fused:
            gate, up = multiply(module.gate_up_proj, h).chunk(2, dim=-1)
        else:
            gate, up = (multiply(part, h) for part in (module.gate_proj, module.up_proj))
        return multiply(module.down_proj, gate_by(gate, up))


def layer_of(block: Any, family: Architecture, model: Any, index: int, join: bool) -> Layer:
    """Return block ``index`` of a decoder of transformers; with ``join``, what reads the same is multiplied as one."""
    graph, config = family.own_graph, model.config
    assert graph is not None  # see `computed`
    attention = getattr(block, graph.attention)
    window = getattr(
        attention, "sliding_window", config.sliding_window if graph.one_window else None
    )
    if not getattr(attention, "is_sliding", True):
        window = None
    cap = getattr(config, "attn_logit_softcapping", None) or 0.0
    norms = tuple(_part(attention, name) for name in graph.head_norms)
    return Layer(
        attention=attention,
        mlp=block.mlp,
        before_attention=_part(block, graph.before_attention),
        after_attention=_part(block, graph.after_attention),
        before_mlp=_part(block, graph.before_mlp),
        after_mlp=_part(block, graph.after_mlp),
        head_norms=None if norms[0] is None else (norms[0], norms[1]),
        scores=Scores(float(attention.scaling), float(cap), window or 0),
        rotary=_rotary(graph, model, attention, index, window),
        qkv=_joined(attention, "q_proj", "k_proj", "v_proj") if join else None,
        gate_up=_joined(block.mlp, "gate_proj", "up_proj") if join else None,
        fused=_fused(family, graph, config, attention) if graph.fused else None,
    )


def _fused(
    family: Architecture, graph: DecoderGraph, config: Any, attention: Any
) -> tuple[Any, list[int]]:
    sizes = family.dimensions(config.to_dict())
    module = getattr(attention, graph.fused)
    rows = [sizes.size(text) for text in family.slices[f"{graph.attention}.{graph.fused}"]]
    held = len(module.weight)  # fewer than of all heads, where processes share them
    return module, [size * min(held, sum(rows)) // sum(rows) for size in rows]


def _rotary(
    graph: DecoderGraph, model: Any, attention: Any, index: int, window: int | None
) -> str | None:
    """Return the key of the frequencies of a layer."""
    config = model.config
    if hasattr(model.base_model.rotary_emb, "layer_types"):  # frequencies by type of layer
        return str(config.layer_types[index])
    if not getattr(attention, "use_rope", True):
        return None
    full = {
        "always": True,
        "never": False,
        "alone": getattr(config, "sliding_window", None) is None,
    }
    return "" if window or full[graph.full_rotary] else None


def neighbours_to_halves(x: Tensor, width: int) -> Tensor:
    """Reorder the first ``width`` of the last dimension: those at even places before those at odd ones.

    Rotating neighbours is then rotating halves. Queries and keys are reordered alike, so that their products are what
    they were.
    """
    return torch.cat((x[..., 0:width:2], x[..., 1:width:2], x[..., width:]), -1)


def multiply(module: nn.Module, x: Tensor) -> Tensor:
    """Multiply rows by a layer, packed or not."""
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def _part(module: Any, name: str) -> Any:
    return getattr(module, name, None) if name else None


def _joined(module: Any, *names: str) -> Joined | None:
    if not all(hasattr(module, name) for name in names):  # the family has them as one, or no gate
        return None
    parts = [getattr(module, name) for name in names]
    return Joined(parts) if joinable(parts) else None
