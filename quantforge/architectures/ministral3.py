"""Ministral 3: a mistral whose queries grow with the logarithm of their position, beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import mistral
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family

ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    model_type="ministral3",
    defaults={**mistral.ARCHITECTURE.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=WindowRule(every=True, listed=False),
    gguf=Family(
        "mistral3",
        interleaved=True,
        reals={
            "attention.temperature_scale": f"{__name__}.growth",
            "rope.scaling.yarn_log_multiplier": f"{__name__}.multiplier",
        },
        obstacle=f"{__name__}.beyond_llama_cpp",
        is_read=False,
    ),
)


def growth(config: Mapping[str, Any]) -> float | None:
    """Return by how much queries grow with the logarithm of their position; None where they do not."""
    return _rope(config).get("llama_4_scaling_beta") or None


def multiplier(config: Mapping[str, Any]) -> float | None:
    """Return 1 where two equal factors of YaRN cancel, as 1 does in llama.cpp; None where there are none."""
    return 1.0 if _rope(config).get("mscale_all_dim") else None


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None."""
    if growth(config) and _rope(config).get("rope_type") != "yarn":
        return "llama_4_scaling_beta without yarn", "the original context, a key of yarn"
    return None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    return stated if isinstance(stated, Mapping) else {}
