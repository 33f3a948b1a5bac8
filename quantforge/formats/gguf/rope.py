"""Rotary embeddings: bases and scaling, in every spelling of ``config.json``.

A configuration states them in one mapping for all layers, in one for each kind of layers, or in older keys beside each
other. `quantforge.formats.gguf.rope_keys` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.stated_keys import called, refused

_DEFAULT_BASE = 10_000.0
_PLAIN = {"", "default"}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings of one model.

    Attributes:
        width: dimensions of a head that rotate.
        base: of the frequencies.
        local_base: of the frequencies of sliding layers; None: they have no other.
        kind: ``default``, ``linear``, ``yarn``, ``llama3``, ``longrope`` or ``proportional``.
        settings: the parameters of the scaling.
        original: context length before scaling, in tokens, 0 if it is not stated.
        context: context length of the model, in tokens.
        divided: a table has divisors of all frequencies, of layers without a window alone.
    """

    width: int
    base: float
    kind: str = "default"
    local_base: float | None = None
    original: int = 0
    context: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    divided: bool = False


def rope_of(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> Rope:
    """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises:
        RefusedError: a kind of scaling that GGUF has no keys for, or llama.cpp's graph of the family no place.
        InputError: a value that is no positive number.
    """
    head = family.divided_head
    stated, older = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    scaling, local = stated or older, None
    if family.arch == "gemma3" or head:
        local = _local_base(config, _mapping(stated, "sliding_attention"))
        scaling = _mapping(stated, "full_attention") or scaling
    usual = 1e6 if family.arch == "gemma3" else _DEFAULT_BASE
    base, kind = number(scaling, "rope_theta", config.get("rope_theta", usual)), _kind(scaling)
    changed = called(family.base, config) if family.base else None
    if changed is not None:
        base, kind = changed, ""
    if kind not in {*_PLAIN, *family.scalings}:
        raise RefusedError(
            f"config.json: rope scaling {kind!r} has no keys in GGUF for {family.arch}",
            "use --format compressed-tensors",
        )
    share = number(scaling, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    known = _spelled(stated)
    if stated and {**known, **_spelled(older)} != known:
        raise InputError(
            "config.json: rope_parameters and rope_scaling say different things",
            "keep rope_parameters alone",
        )
    return Rope(
        width=sizes.size(head) if head else int(sizes.head * share),
        base=base,
        kind="default" if kind in _PLAIN else kind,
        local_base=local,
        original=_original(config, scaling),
        context=sizes.positions,
        settings=scaling,
        divided=bool(head),
    )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _local_base(config: Mapping[str, Any], sliding: Mapping[str, Any]) -> float:
    if _kind(sliding) not in _PLAIN or sliding.get("partial_rotary_factor") not in {None, 1}:
        raise refused("rope scaling of layers that slide", "plain positions there")
    return number(sliding, "rope_theta", config.get("rope_local_base_freq", _DEFAULT_BASE))


def _original(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Return the context length before scaling, 0 if none is stated."""
    key = "original_max_position_embeddings"
    found = config.get(key, scaling.get(key))  # what stands outside comes first in transformers
    known = isinstance(found, int | float) and not isinstance(found, bool)
    if found is not None and not (known and found == found // 1 and found >= 1):
        raise InputError(f"config.json: {key} = {str(found)[:40]!r}", "a whole number from 1 on")
    return int(found or 0)


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = str(scaling.get("rope_type", scaling.get("type", "")) or "")
    return {"su": "longrope", "mrope": ""}.get(kind, kind)  # of the latter the sections are a key


def _spelled(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaling with the newer name of its kind."""
    return {"rope_type" if key == "type" else key: value for key, value in scaling.items()}


def number(source: Mapping[str, Any], key: str, otherwise: object) -> float:
    """Return a positive number of a mapping; of any other an `InputError`."""
    value = source.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise InputError(f"config.json: {key} = {value!r}", "a positive number")
    return float(value)
