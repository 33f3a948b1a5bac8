"""Convert rotary embedding settings from ``config.json`` to GGUF keys and tables.

A configuration states them in one mapping for all layers, in one for each kind of layers, or in older keys beside each
other (`read_rope`). In GGUF, scaling of the types ``linear`` and ``yarn`` is keys (`rope_keys`). That of Llama 3 is a
tensor of divisors of the frequencies, ``rope_freqs.weight``: with ``L`` the wavelength ``2 pi / frequency``, 1 where
``L < original / high``, ``factor`` where ``L > original / low``, and ``1 / ((1 - s) / factor + s)`` between,
``s = (original / L - low) / (high - low)``. That of Phi 3 (``longrope``) is two tensors, one for contexts beyond the
original length and one within, and a factor on attention.

YaRN interpolates a range of frequencies, counted from the fastest: those before the range stay, those after it are
divided, those in it are between. Its ends follow from how often a frequency turns in the original context; llama.cpp
rounds them outwards, and takes 32 and 1 turns for granted in the graphs of most families.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf import unsupported_in_gguf
from quantforge.formats.gguf.container import (
    GgufTensor,
    MetadataValue,
    f32_value,
    string_value,
    u32_value,
)

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_PROPORTIONAL = "proportional"  # of a part of a head, by the frequencies of the whole of it
_NO_ROTATION = 1e30  # divides a frequency to nothing
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # turns, where a configuration leaves them out
_DEFAULT_BASE = 10_000.0
_UNSCALED = {"", "default"}


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary embedding settings of one model.

    Attributes:
        width: dimensions of a head that rotate.
        base: of the frequencies.
        local_base: of the frequencies of sliding layers; None: they have no other.
        kind: ``default``, ``linear``, ``yarn``, ``llama3``, ``longrope`` or ``proportional``.
        settings: the parameters of the scaling.
        original: context length before scaling, in tokens, 0 if it is not stated.
        context: context length of the model, in tokens.
        has_divisors: a table has divisors of all frequencies, of layers without a window alone.
    """

    width: int
    base: float
    kind: str = "default"
    local_base: float | None = None
    original: int = 0
    context: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_divisors: bool = False


def read_rope(config: Mapping[str, Any], family: GgufFamily, sizes: Dimensions) -> RopeParameters:
    """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``, of a configuration.

    Raises:
        RefusedError: a kind of scaling that GGUF has no keys for, or llama.cpp's graph of the family no place.
        InputError: a value that is no positive number.
    """
    head = family.rope_divisors_head
    parameters, legacy_scaling = (
        _mapping(config, "rope_parameters"),
        _mapping(config, "rope_scaling"),
    )
    scaling, local_base = parameters or legacy_scaling, None
    if family.has_sliding_rope_base:
        local_base = _local_base(config, _mapping(parameters, "sliding_attention"))
        scaling = _mapping(parameters, "full_attention") or scaling
    base = _positive_number(
        scaling, "rope_theta", config.get("rope_theta", family.default_rope_base)
    )
    kind = _rope_type(scaling)
    scaled_base = family.scaled_rope_base(config) if family.scaled_rope_base else None
    if scaled_base is not None:
        base, kind = scaled_base, ""
    if kind not in {*_UNSCALED, *family.rope_scalings}:
        raise RefusedError(
            f"rope scaling {kind!r} has no keys in GGUF for {family.arch}",
            "use --format compressed-tensors",
            subject="config.json",
        )
    rotated_share = _positive_number(
        scaling, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
    )
    spelled_parameters = _spelled(parameters)
    if parameters and {**spelled_parameters, **_spelled(legacy_scaling)} != spelled_parameters:
        raise InputError(
            "rope_parameters and rope_scaling say different things",
            "keep rope_parameters alone",
            subject="config.json",
        )
    return RopeParameters(
        width=sizes.size(head) if head else int(sizes.head * rotated_share),
        base=base,
        kind="default" if kind in _UNSCALED else kind,
        local_base=local_base,
        original=_original_context(config, scaling),
        context=sizes.positions,
        settings=scaling,
        has_divisors=bool(head),
    )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _local_base(config: Mapping[str, Any], sliding: Mapping[str, Any]) -> float:
    if _rope_type(sliding) not in _UNSCALED or sliding.get("partial_rotary_factor") not in {
        None,
        1,
    }:
        raise unsupported_in_gguf("rope scaling of layers that slide", "plain positions there")
    return _positive_number(
        sliding, "rope_theta", config.get("rope_local_base_freq", _DEFAULT_BASE)
    )


def _original_context(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Return the context length before scaling, 0 if it is not given."""
    key = "original_max_position_embeddings"
    value = config.get(key, scaling.get(key))  # what stands outside comes first in transformers
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value == value // 1 and value >= 1):
        raise InputError(
            f"{key} = {str(value)[:40]!r}", "a whole number from 1 on", subject="config.json"
        )
    return int(value or 0)


def _rope_type(scaling: Mapping[str, Any]) -> str:
    kind = str(scaling.get("rope_type", scaling.get("type", "")) or "")
    return {"su": "longrope", "mrope": ""}.get(kind, kind)  # of the latter the sections are a key


def _spelled(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope scaling settings with the key ``type`` renamed to ``rope_type``."""
    return {"rope_type" if key == "type" else key: value for key, value in scaling.items()}


def _positive_number(source: Mapping[str, Any], key: str, otherwise: object) -> float:
    """Return a positive number from a mapping; raise `InputError` for any other value."""
    value = source.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise InputError(f"{key} = {value!r}", "a positive number", subject="config.json")
    return float(value)


def rope_keys(rope: RopeParameters, family: GgufFamily) -> dict[str, MetadataValue]:
    """Return the rope keys without the architecture prefix; errors as `read_rope`."""
    keys = {"rope.dimension_count": u32_value(rope.width), "rope.freq_base": f32_value(rope.base)}
    if rope.local_base is not None:
        keys["rope.freq_base_swa"] = f32_value(rope.local_base)
    if rope.kind == "linear":
        keys["rope.scaling.type"] = string_value("linear")
        keys["rope.scaling.factor"] = f32_value(_positive_number(rope.settings, "factor", None))
    if rope.kind == "yarn":
        keys |= _yarn_keys(rope, family)
    if rope.kind == "longrope":
        scale = _positive_number(
            rope.settings, "factor", rope.context / (rope.original or rope.context)
        )
        factor = math.sqrt(1 + math.log(scale) / math.log(rope.original)) if scale > 1 else 1.0
        keys["rope.scaling.attn_factor"] = f32_value(
            _positive_number(rope.settings, "attention_factor", factor)
        )
    return keys


def _yarn_keys(rope: RopeParameters, family: GgufFamily) -> dict[str, MetadataValue]:
    keys: dict[str, MetadataValue] = {"rope.scaling.type": string_value("yarn")}
    keys["rope.scaling.factor"] = f32_value(_positive_number(rope.settings, "factor", None))
    keys["rope.scaling.original_context_length"] = u32_value(rope.original or rope.context)
    for name in _BETAS:
        if rope.settings.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = f32_value(
                _positive_number(rope.settings, name, None)
            )
    _check_yarn_range(rope, family)
    mscale_all_dim = rope.settings.get("mscale_all_dim")
    if mscale_all_dim and rope.settings.get("mscale") != mscale_all_dim:
        raise RefusedError(
            "mscale and mscale_all_dim of yarn scaling differ, for which GGUF has no key",
            "use --format compressed-tensors",
            subject="config.json",
        )
    if mscale_all_dim and not family.reads_yarn_multiplier:
        raise RefusedError(
            "mscale_all_dim of yarn scaling has no key in GGUF for this family",
            "use --format compressed-tensors",
            subject="config.json",
        )
    if mscale_all_dim:
        keys["rope.scaling.yarn_log_multiplier"] = f32_value(
            0.1 * _positive_number(rope.settings, "mscale", None)
        )
    if rope.settings.get("attention_factor") is not None:
        raise RefusedError(
            "attention_factor of yarn scaling has no key in GGUF",
            "use --format compressed-tensors",
            subject="config.json",
        )
    return keys


def rope_tensors(rope: RopeParameters) -> tuple[GgufTensor, ...]:
    """Return the tensors with rope frequency tables, whose bytes are known in advance."""
    if rope.has_divisors:
        return (_table_tensor(FREQUENCIES, _proportional_divisors(rope)),)
    if rope.kind == "llama3":
        return (_table_tensor(FREQUENCIES, _llama3_table(rope)),)
    if rope.kind == "longrope":
        tensors = []
        for name, key in ((LONG, "long_factor"), (SHORT, "short_factor")):
            values = rope.settings.get(key)
            if not isinstance(values, Sequence) or len(values) != rope.width // 2:
                raise InputError(
                    f"{key} is no list of {rope.width // 2} numbers", subject="config.json"
                )
            tensors.append(_table_tensor(name, [float(value) for value in values]))
        return tuple(tensors)
    return ()


def _llama3_table(rope: RopeParameters) -> list[float]:
    return llama3_divisors(
        rope.base,
        rope.width,
        _positive_number(rope.settings, "factor", 8.0),
        _positive_number(rope.settings, "low_freq_factor", 1.0),
        _positive_number(rope.settings, "high_freq_factor", 4.0),
        rope.original or rope.context,
    )


def _proportional_divisors(rope: RopeParameters) -> list[float]:
    """Return the divisors of all frequencies of a head; frequencies that do not rotate have a huge divisor."""
    if rope.kind != _PROPORTIONAL:
        return [1.0] * (rope.width // 2)
    rotated_share = _positive_number(rope.settings, "partial_rotary_factor", 1.0)
    turning = int(rotated_share * rope.width // 2)
    factor = _positive_number(rope.settings, "factor", 1.0)
    return [factor] * turning + [_NO_ROTATION] * (rope.width // 2 - turning)


def llama3_divisors(
    base: float, width: int, factor: float, low: float, high: float, original: int
) -> list[float]:
    """Return the frequency divisors of Llama 3's rope scaling; the module's docstring has the formula."""
    divisors = []
    for position in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (position / width)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth_factor = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth_factor) / factor + smooth_factor))
    return divisors


def _table_tensor(name: str, values: list[float]) -> GgufTensor:
    return GgufTensor(name, "F32", (len(values),), fixed=struct.pack(f"<{len(values)}f", *values))


def _check_yarn_range(rope: RopeParameters, family: GgufFamily) -> None:
    """Raise `RefusedError` if llama.cpp interpolates another range of frequencies than the configuration asks for.

    Raises:
        InputError: the range ends before it begins.
        RefusedError: naming the key.
    """
    betas = _betas(rope)
    values_text = ", ".join(f"{name} = {value:g}" for name, value in betas.items())
    if betas["beta_fast"] < betas["beta_slow"]:
        raise InputError(f"{values_text}", "exchange them", subject="config.json")
    if _yarn_range(rope, betas, rounded=_truncates(rope))[1] < 0:
        # transformers interpolates nothing then, and llama.cpp all
        tokens = rope.original or rope.context
        problem = f"yarn from {tokens} tokens, fewer than a turn of its slow frequencies,"
        raise unsupported_in_gguf(problem, "more")
    llama_cpp_betas = betas if family.reads_yarn_betas else _BETAS
    if _yarn_range(rope, betas, rounded=True) != _yarn_range(rope, llama_cpp_betas, rounded=True):
        usual = ", ".join(f"{name} = {value:g}" for name, value in _BETAS.items())
        flags = " ".join(
            f"--yarn-{name.replace('_', '-')} {value:g}" for name, value in betas.items()
        )
        raise unsupported_in_gguf(
            f"{values_text} of yarn scaling",
            f"{usual}; with these, llama.cpp has to be run with {flags}",
        )
    if (values_text := yarn_rounding(rope)) and not family.accepts_unrounded_yarn:
        raise unsupported_in_gguf(
            f"truncate = false of yarn scaling, by which {values_text},", "true"
        )


def yarn_rounding(rope: RopeParameters) -> str:
    """Describe the ranges that llama.cpp and transformers interpolate if they differ; "" if they agree."""
    if rope.kind != "yarn" or _truncates(rope):
        return ""
    betas = _betas(rope)
    exact_range, rounded_range = (
        _yarn_range(rope, betas, rounded=rounded) for rounded in (False, True)
    )
    if exact_range == rounded_range:
        return ""
    exact_text, rounded_text = (
        f"{exact_range[0]:.2f} to {exact_range[1]:.2f}",
        f"{rounded_range[0]:g} to {rounded_range[1]:g}",
    )
    return f"frequencies {exact_text} are interpolated, in llama.cpp {rounded_text}"


def _truncates(rope: RopeParameters) -> bool:
    return bool(rope.settings.get("truncate", True))


def _betas(rope: RopeParameters) -> dict[str, float]:
    return {name: _positive_number(rope.settings, name, usual) for name, usual in _BETAS.items()}


def _yarn_range(
    rope: RopeParameters, betas: Mapping[str, float], *, rounded: bool
) -> tuple[float, float]:
    """Return the first and last frequency that YaRN interpolates, rounded outward with ``rounded``."""
    original, base = rope.original or rope.context, 2 * math.log(max(rope.base, 1 + 1e-9))
    low, high = (
        rope.width * math.log(original / (2 * math.pi * turns)) / base for turns in betas.values()
    )
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope.width - 1)
