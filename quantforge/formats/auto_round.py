"""AutoRound files: GPTQ and AWQ layouts with their own ``quant_method``.

``packing_format`` says which: ``auto_round:auto_gptq`` stores ``zero - 1`` as the first GPTQ layout does,
``auto_round`` and ``auto_round:gptqmodel`` the zero point itself, ``auto_round:auto_awq`` is AWQ's gemm. Layers that
differ are in ``extra_config`` by name or pattern; those of 16 bits or more are not quantized. (auto-round 0.16,
``inference/backend.py``.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

QUANT_METHODS = ("auto-round", "intel/auto-round")
CONFIG_BY_PACKING_FORMAT: Mapping[str, Mapping[str, str]] = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
_UNQUANTIZED_BITS = 16


def translate_config(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate AutoRound's ``quantization_config`` to that of the format (GPTQ or AWQ) whose layout it uses.

    Any other configuration, and a packing that is not read, comes back as it is.
    """
    target_keys = CONFIG_BY_PACKING_FORMAT.get(str(quantization.get("packing_format")))
    exceptions = quantization.get("extra_config") or {}
    if (
        quantization.get("quant_method") not in QUANT_METHODS
        or target_keys is None
        or not isinstance(exceptions, Mapping)
    ):
        return quantization
    shared_fields = {"zero_point": not quantization.get("sym", True), "desc_act": False}
    if target_keys["quant_method"] == "awq":
        return {
            **quantization,
            **shared_fields,
            **target_keys,
            "modules_to_not_convert": _unquantized_names(exceptions),
        }
    return {**quantization, **shared_fields, **target_keys, "dynamic": _dynamic_rules(exceptions)}


def _unquantized_names(exceptions: Mapping[str, Any]) -> list[str]:
    return [name for name, values in exceptions.items() if _is_unquantized(values)]


def _dynamic_rules(exceptions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the per-layer exceptions as GPTQ's ``dynamic`` rules; names with regex characters are patterns."""
    rules = {}
    for name, values in exceptions.items():
        pattern = name if re.search(r"[*\\\[(^$]", name) else f"{re.escape(name)}$"
        rules[f"{'-' if _is_unquantized(values) else '+'}:{pattern}"] = values
    return rules


def _is_unquantized(values: object) -> bool:
    bits = values.get("bits") if isinstance(values, Mapping) else None
    return isinstance(bits, int) and bits >= _UNQUANTIZED_BITS
