"""AutoRound's files: layouts of GPTQ and AWQ under a ``quant_method`` of their own.

``packing_format`` says which: ``auto_round:auto_gptq`` stores ``zero - 1`` as the first GPTQ layout does,
``auto_round`` and ``auto_round:gptqmodel`` the zero point itself, ``auto_round:auto_awq`` is AWQ's gemm. Layers that
differ are in ``extra_config`` by name or pattern; those of 16 bits or more are not quantized. (auto-round 0.16,
``inference/backend.py``.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

METHODS = ("auto-round", "intel/auto-round")
PACKINGS: Mapping[str, Mapping[str, str]] = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
_PLAIN_BITS = 16


def translated(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``quantization_config`` of AutoRound in the words of the format whose layout it has.

    Any other configuration, and a packing that is not read, comes back as it is.
    """
    packing = PACKINGS.get(str(found.get("packing_format")))
    extra = found.get("extra_config") or {}
    if (
        found.get("quant_method") not in METHODS
        or packing is None
        or not isinstance(extra, Mapping)
    ):
        return found
    common = {"zero_point": not found.get("sym", True), "desc_act": False}
    if packing["quant_method"] == "awq":
        return {**found, **common, **packing, "modules_to_not_convert": _plain(extra)}
    return {**found, **common, **packing, "dynamic": _rules(extra)}


def _plain(extra: Mapping[str, Any]) -> list[str]:
    return [name for name, values in extra.items() if _is_plain(values)]


def _rules(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the exceptions as GPTQ's ``dynamic`` has them; a name with a star or a bracket is a pattern."""
    rules = {}
    for name, values in extra.items():
        pattern = name if re.search(r"[*\\\[(^$]", name) else f"{re.escape(name)}$"
        rules[f"{'-' if _is_plain(values) else '+'}:{pattern}"] = values
    return rules


def _is_plain(values: object) -> bool:
    bits = values.get("bits") if isinstance(values, Mapping) else None
    return isinstance(bits, int) and bits >= _PLAIN_BITS
