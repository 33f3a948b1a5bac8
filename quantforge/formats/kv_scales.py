"""Scales of an fp8 KV cache, stored with the weights of a compressed-tensors model.

Engines cast keys (after their rotation) and values to e4m3 as they enter the cache. With a scale that was measured
beforehand, ``code = e4m3(x / scale)``, a token stores nothing but its codes. For the attention ``A`` of every block:

==============  ====  ==============================================================
``A.k_scale``   F32   ``[1]``, or ``[kv_heads, 1, 1]``: one for each head
``A.v_scale``   F32   the same, of the values
==============  ====  ==============================================================

and in ``config.json`` a ``kv_cache_scheme``, whose strategy is ``tensor`` or ``attn_head``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.architectures import text_config
from quantforge.errors import Fault, InputError
from quantforge.formats.configuration import quantization_config
from quantforge.plans import StoredTensor

NONE, TENSOR, HEAD = "none", "fp8", "fp8_head"
KINDS = (NONE, TENSOR, HEAD)
ATTENTION_MODULE = "self_attn"  # where engines look
_SCALE_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\." + ATTENTION_MODULE + r"\.[kv]_scale")
_STRATEGY_BY_KIND = {TENSOR: "tensor", HEAD: "attn_head"}
_FLOAT_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class KVCacheScales:
    """The KV cache scales of a checkpoint: their ``kind``, one of `KINDS`, and the names of K and V scales by block."""

    kind: str = NONE
    names: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def tensor_names(self) -> frozenset[str]:
        """Return the names of all scale tensors."""
        return frozenset(name for pair in self.names.values() for name in pair)


def scale_tensors(attention: str, kind: str, kv_heads: int) -> tuple[StoredTensor, StoredTensor]:
    """Return the headers of the K and V scales of an attention module."""
    shape = (1,) if kind == TENSOR else (kv_heads, 1, 1)
    return (
        StoredTensor(f"{attention}.k_scale", "F32", shape),
        StoredTensor(f"{attention}.v_scale", "F32", shape),
    )


def kv_cache_scheme(stored: Iterable[StoredTensor]) -> dict[str, Any] | None:
    """Return the ``kv_cache_scheme`` for the tensors of a result, None if they include no scales."""
    shapes = {len(tensor.shape) for tensor in stored if _SCALE_NAME.fullmatch(tensor.name)}
    if not shapes:
        return None
    strategy = _STRATEGY_BY_KIND[TENSOR if shapes == {1} else HEAD]
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }


def scale_names(names: Iterable[str]) -> list[str]:
    """Return the sorted tensor names that are names of KV cache scales."""
    return sorted(name for name in names if _SCALE_NAME.fullmatch(name))


def find_scales(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> KVCacheScales:
    """Return the KV cache scales of a checkpoint, from its headers.

    Raises:
        InputError: a scheme that is not read, a scale that is missing or of another shape.
    """
    scheme = quantization_config(config).get("kv_cache_scheme")
    if scheme is None:
        return KVCacheScales()
    kind = _kind_of(scheme)
    kv_heads, blocks = _kv_heads_and_layers(config)
    names: dict[int, dict[str, str]] = {}
    for name, tensor in stored.items():
        if (match := _SCALE_NAME.fullmatch(name)) is None:
            continue
        _check_shape(tensor, kind, kv_heads)
        names.setdefault(int(match[1]), {})[name[-7]] = name
    missing_scales = [
        f"{key}_scale of block {block}"
        for block in range(blocks)
        for key in "kv"
        if key not in names.get(block, {})
    ]
    if missing_scales:
        raise InputError(
            f"config.json has a kv_cache_scheme, but {len(missing_scales)} scales of the KV cache are missing, first: "
            f"{', '.join(missing_scales[:3])}",
            "fetch the checkpoint again, or set kv_cache_scheme to null",
            fault=Fault.SCALE,
        )
    return KVCacheScales(kind, {block: (pair["k"], pair["v"]) for block, pair in names.items()})


def _kind_of(scheme: object) -> str:
    values = scheme if isinstance(scheme, Mapping) else {}
    strategy = values.get("strategy") or "tensor"
    supported = values.get("num_bits", 8) == 8 and values.get("type") == "float"
    supported = (
        supported and values.get("symmetric", True) is True and not values.get("dynamic", False)
    )
    for kind, name in _STRATEGY_BY_KIND.items():
        if supported and strategy == name:
            return kind
    raise InputError(
        f"kv_cache_scheme {scheme} is not read",
        "static symmetric 8-bit floats per tensor or attn_head are",
        subject="config.json",
    )


def _kv_heads_and_layers(config: Mapping[str, Any]) -> tuple[int, int]:
    text = text_config(config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    return int(heads or 0), int(text.get("num_hidden_layers") or 0)


def _check_shape(tensor: StoredTensor, kind: str, heads: int) -> None:
    size = 1
    for length in tensor.shape:
        size *= length
    if tensor.dtype not in _FLOAT_DTYPES or size != (1 if kind == TENSOR else heads):
        raise InputError(
            f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}, kv_cache_scheme asks for "
            f"{'one scale' if kind == TENSOR else f'{heads} scales'}",
            "quantization_config and the tensors disagree",
            tensor=tensor.name,
            fault=Fault.SCALE,
        )
