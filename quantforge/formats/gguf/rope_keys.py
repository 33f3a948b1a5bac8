"""Keys and tables of rotary embeddings in GGUF.

Scaling of the types ``linear`` and ``yarn`` is keys. That of Llama 3 is a tensor of divisors of the frequencies,
``rope_freqs.weight``: with ``L`` the wavelength ``2 pi / frequency``, 1 where ``L < original / high``, ``factor`` where
``L > original / low``, and ``1 / ((1 - s) / factor + s)`` between, ``s = (original / L - low) / (high - low)``. That
of Phi 3 (``longrope``) is two tensors, one for contexts beyond the original length and one within, and a factor on
attention.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.container import GgufTensor, Value, f32, text, u32
from quantforge.formats.gguf.rope import Rope, number
from quantforge.formats.gguf.yarn_range import BETAS, check_range

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_PROPORTIONAL = "proportional"  # of a part of a head, by the frequencies of the whole of it
_NEVER = 1e30  # divides a frequency to nothing


def rope_keys(rope: Rope, family: Family) -> dict[str, Value]:
    """Return the keys, without the name of the architecture; errors as `rope_of`."""
    keys = {"rope.dimension_count": u32(rope.width), "rope.freq_base": f32(rope.base)}
    if rope.local_base is not None:
        keys["rope.freq_base_swa"] = f32(rope.local_base)
    if rope.kind == "linear":
        keys["rope.scaling.type"] = text("linear")
        keys["rope.scaling.factor"] = f32(number(rope.settings, "factor", None))
    if rope.kind == "yarn":
        keys |= _yarn(rope, family)
    if rope.kind == "longrope":
        scale = number(rope.settings, "factor", rope.context / (rope.original or rope.context))
        factor = math.sqrt(1 + math.log(scale) / math.log(rope.original)) if scale > 1 else 1.0
        keys["rope.scaling.attn_factor"] = f32(number(rope.settings, "attention_factor", factor))
    return keys


def _yarn(rope: Rope, family: Family) -> dict[str, Value]:
    keys: dict[str, Value] = {"rope.scaling.type": text("yarn")}
    keys["rope.scaling.factor"] = f32(number(rope.settings, "factor", None))
    keys["rope.scaling.original_context_length"] = u32(rope.original or rope.context)
    for name in BETAS:
        if rope.settings.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = f32(number(rope.settings, name, None))
    check_range(rope, family)
    whole = rope.settings.get("mscale_all_dim")
    if whole and rope.settings.get("mscale") != whole:
        raise RefusedError(
            "config.json: mscale and mscale_all_dim of yarn scaling differ, for which GGUF has no key",
            "use --format compressed-tensors",
        )
    if whole and not family.yarn_multiplier:
        raise RefusedError(
            "config.json: mscale_all_dim of yarn scaling has no key in GGUF for this family",
            "use --format compressed-tensors",
        )
    if whole:
        keys["rope.scaling.yarn_log_multiplier"] = f32(0.1 * number(rope.settings, "mscale", None))
    if rope.settings.get("attention_factor") is not None:
        raise RefusedError(
            "config.json: attention_factor of yarn scaling has no key in GGUF",
            "use --format compressed-tensors",
        )
    return keys


def rope_tensors(rope: Rope) -> tuple[GgufTensor, ...]:
    """Return the tables, as tensors whose bytes are known."""
    if rope.divided:
        return (_table(FREQUENCIES, _divisors(rope)),)
    if rope.kind == "llama3":
        return (_table(FREQUENCIES, _llama3(rope)),)
    if rope.kind == "longrope":
        found = []
        for name, key in ((LONG, "long_factor"), (SHORT, "short_factor")):
            values = rope.settings.get(key)
            if not isinstance(values, Sequence) or len(values) != rope.width // 2:
                raise InputError(f"config.json: {key} is no list of {rope.width // 2} numbers")
            found.append(_table(name, [float(value) for value in values]))
        return tuple(found)
    return ()


def _llama3(rope: Rope) -> list[float]:
    return llama3_divisors(
        rope.base,
        rope.width,
        number(rope.settings, "factor", 8.0),
        number(rope.settings, "low_freq_factor", 1.0),
        number(rope.settings, "high_freq_factor", 4.0),
        rope.original or rope.context,
    )


def _divisors(rope: Rope) -> list[float]:
    """Return divisors of all frequencies of a head, of which a part of it does not turn at all."""
    if rope.kind != _PROPORTIONAL:
        return [1.0] * (rope.width // 2)
    share = number(rope.settings, "partial_rotary_factor", 1.0)
    turning = int(share * rope.width // 2)
    factor = number(rope.settings, "factor", 1.0)
    return [factor] * turning + [_NEVER] * (rope.width // 2 - turning)


def llama3_divisors(
    base: float, width: int, factor: float, low: float, high: float, original: int
) -> list[float]:
    """Return the divisors of the frequencies, as the module describes them."""
    divisors = []
    for position in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (position / width)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            share = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def _table(name: str, values: list[float]) -> GgufTensor:
    return GgufTensor(name, "F32", (len(values),), fixed=struct.pack(f"<{len(values)}f", *values))
