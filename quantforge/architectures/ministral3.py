"""Ministral 3: a mistral whose queries grow with the logarithm of their position, beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import mistral
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError

_BETA, _MOST = "llama_4_scaling_beta", 1e6


def growth(config: Mapping[str, Any]) -> float | None:
    """Return by how much queries grow with the logarithm of their position; None where they do not.

    Raises:
        InputError: it is no number, or below 0.
    """
    beta = _rope(config).get(_BETA)
    if beta is None:
        return None
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < _MOST:
        raise InputError(f"config.json: {_BETA} = {str(beta)[:40]!r}", "a number from 0 on")
    return float(beta) or None


def multiplier(config: Mapping[str, Any]) -> float | None:
    """Return 1 where two equal factors of YaRN cancel, as 1 does in llama.cpp; None where there are none."""
    return 1.0 if _rope(config).get("mscale_all_dim") else None


def beyond_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what llama.cpp does not compute and what it does, or None; errors as `growth`."""
    rope = _rope(config)
    if config.get("model_type") != "ministral3":  # transformers takes another family then
        return "a decoder without model_type", "model_type = ministral3"
    if not rope:  # transformers' own default is YaRN with all that belongs to it
        return "a configuration without rope_parameters", "rope_parameters that are stated"
    if rope.get(_BETA) is None:
        return f"rope_parameters without {_BETA}, which transformers needs", "0 for none"
    if growth(config) and rope.get("rope_type", rope.get("type")) != "yarn":
        return f"{_BETA} without yarn", "the original context, a key of yarn"
    return None


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    return stated if isinstance(stated, Mapping) else {}


ARCHITECTURE = replace(
    mistral.ARCHITECTURE,
    model_type="ministral3",
    defaults={**mistral.ARCHITECTURE.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
    windows=WindowRule(every=True, listed=False),
    gguf=Family(
        "mistral3",
        interleaved=True,
        reals={
            "attention.temperature_scale": growth,
            "rope.scaling.yarn_log_multiplier": multiplier,
        },
        obstacle=beyond_llama_cpp,
        yarn_multiplier=True,
        yarn_betas=True,
    ),
)
