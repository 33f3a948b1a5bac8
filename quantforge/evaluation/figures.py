"""Figures of one model as a row of an evaluation: those of its files, and those of its quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantforge.evaluation.divergence import ModelScores
from quantforge.results import manifest
from quantforge.runtime.load import Loaded

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_MEASURED = (  # None where there is no figure: of the reference, or without speed
    "perplexity", "perplexity_se", "perplexity_increase", "perplexity_increase_se", "nll",
    "kl_mean", "kl_se", "kl_median", "kl_p99", "kl_quantiles", "top1_agreement", "block_errors", "generated",
    "peak_bytes", "prefill_tokens_per_second", "decode_tokens_per_second", "ttft_seconds",
    "tpot_seconds", "tpot_spread", "bandwidth_use", "llama_cpp_perplexity",
    "decoder", "ttft_by_prompt", "decode_by_batch", "kv_bytes_per_token", "processor_share", "tasks", "caches",
)  # fmt: skip
_OF_FILES = (
    "path", "format", "scheme", "bits_per_weight", "bits_per_weight_total", "weight_bytes", "held_bytes",
    "read_bytes_per_token", "kv_cache", "kernels", "made_by", "events",
)  # fmt: skip
KEYS = frozenset({*_OF_FILES, *_MEASURED})  # of every row


def identity(loaded: Loaded) -> dict[str, Any]:
    """Return a row of a model with what its files say; figures that are measured are None yet."""
    history = manifest.read(loaded.path) or {}
    return {
        "path": str(loaded.path),
        "format": loaded.format,
        "scheme": loaded.scheme,
        "bits_per_weight": loaded.bits_per_weight,
        "bits_per_weight_total": loaded.bits_per_weight_total,
        "weight_bytes": loaded.weight_bytes,
        "held_bytes": loaded.held_bytes,
        "read_bytes_per_token": loaded.read_bytes,
        "kv_cache": loaded.kv_cache,
        "kernels": dict(loaded.kernels),
        "made_by": _made_by(history),
        "events": [*history.get("events", ()), *(event.to_json() for event in loaded.events)],
        **dict.fromkeys(_MEASURED),
    }


def _made_by(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return method, source and recipe that a manifest states; of an export those of what it restates."""
    if not history:
        return None
    origin = {**history, **history.get("lineage", {})}
    return {
        "method": origin.get("method"),
        "source": origin.get("source", {}).get("model"),
        "exported": "lineage" in history,
        "recipe": origin.get("recipe") or None,
    }


def quality(scores: ModelScores, reference: ModelScores | None) -> dict[str, Any]:
    """Return the figures of quality; those that compare are of a model with a ``reference`` alone."""
    figures = {
        "perplexity": scores.perplexity.mean,
        "perplexity_se": scores.perplexity.error,
        "nll": scores.mean_nll.mean,
    }
    if reference is None or scores.divergence is None:
        return figures
    increase, divergence = scores.increase(reference), scores.divergence
    return figures | {
        "perplexity_increase": increase.mean,
        "perplexity_increase_se": increase.error,
        "kl_mean": divergence.mean.mean,
        "kl_se": divergence.mean.error,
        "kl_median": divergence.quantile(0.5),
        "kl_p99": divergence.quantile(0.99),
        "kl_quantiles": {str(share): divergence.quantile(share) for share in QUANTILES},
        "top1_agreement": divergence.agreement.mean,
    }


def plain(value: object) -> object:
    """Replace NaN by None: JSON has no NaN, and an error estimated from one window is no figure."""
    return None if isinstance(value, float) and math.isnan(value) else value
