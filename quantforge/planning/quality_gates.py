"""Gates of a release: limits that every variant has to keep, and what is beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quantforge.errors import InputError

_LIMITS = (
    ("max_kl", "kl_mean", "KL divergence {:.4g}, at most {:.4g}"),
    ("max_ppl_increase", "perplexity_increase", "perplexity increased by {:.2%}, at most {:.2%}"),
    ("max_bytes", "weight_bytes", "{} bytes, at most {}"),
)


@dataclass(frozen=True, slots=True)
class QualityGates:
    """``[gates]``: what every variant has to keep; those of a variant override them."""

    max_kl: float | None = None  # nats per token
    max_ppl_increase: float | None = None  # of the source's: 0.02 is 2 %
    max_bytes: int | None = None  # of the weights

    @property
    def scored(self) -> tuple[str, ...]:
        """Return the names of the limits that need a text to be scored."""
        return tuple(n for n in ("max_kl", "max_ppl_increase") if getattr(self, n) is not None)


def beyond(limits: QualityGates, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the limits that figures are beyond; one that is no number keeps none."""
    stated = [(getattr(limits, name), values.get(key), text) for name, key, text in _LIMITS]
    return tuple(
        "not measured" if value is None else text.format(value, limit)
        for limit, value, text in stated if limit is not None and (value is None or not value <= limit)
    )  # fmt: skip


def checked(limits: QualityGates, origin: str) -> QualityGates:
    """Return limits that are some; `InputError` for one that is none, or whose unit nobody knows."""
    for item in fields(limits):
        value = getattr(limits, item.name)
        if value is not None and not 0 <= value < float("inf"):
            raise InputError(f"{origin}: {item.name} = {value}: no limit", "a number from 0 on")
    share = limits.max_ppl_increase
    if share is not None and share >= 1:
        raise InputError(
            f"{origin}: max_ppl_increase = {share:g}: {share:g}% or {share:.0%}?",
            f"a share below 1: {share / 100:g} is {share:g}%",
        )
    return limits
