"""Cases that show on a further model, format or method what another case of the same test shows.

`scripts/test` leaves them out, as it does tests that are marked ``thorough``, which take seconds and stand beside
quicker ones; ``scripts/test -m ""`` runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

# Of the families of `tests.conftest`, one for each thing that code depends on; what only a declaration has is seen
# in `tests/equivalence`, where declared and derived families are compared and every stream is held against its model.
KINDS = (
    "llama", "llama-tied", "gemma3", "phi3", "gpt2", "opt", "lfm2", "olmo2", "cohere2", "gemma4", "falcon-h1",
    "qwen3.5", "gemma3-multimodal", "qwen3-moe", "deepseek-v3", "lfm2-moe", "granitemoe", "gemma4-moe", "gpt-oss",
    "llama4", "qwen3-next",
)  # fmt: skip


def further(*values: Any) -> Any:
    """Return a case of ``pytest.mark.parametrize`` that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def one_of_each(families: Iterable[str], *more: str) -> list[Any]:
    """Return families, of which only the whole suite runs those that are neither of `KINDS` nor ``more``."""
    found = list(families)
    return usual(found, *(name for name in KINDS if name in found), *more)


def usual(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases, of which only the whole suite runs those that are not ``kept``."""
    found = list(cases)
    assert all(case in found for case in kept)
    return [
        case if case in kept else further(*case if isinstance(case, tuple) else (case,))
        for case in found
    ]


def each_value(*axes: tuple[str, Iterable[Any]], ids: Any = None) -> pytest.MarkDecorator:
    """Parametrize with values that fail by themselves: each is in one case, beside the others' in turn.

    All their combinations are in the whole suite.

    Args:
        axes: names, several with commas, and their values, as ``pytest.mark.parametrize`` takes them.
        ids: of the values, as it takes them.
    """
    names = [name.strip() for name, _ in axes for name in name.split(",")]
    values = [[_as_case(value, "," in name) for value in found] for name, found in axes]
    kept = {
        tuple((at + at // len(found) * (len(found) < longest)) % len(found) for found in values)
        for longest in (max(map(len, values)),)
        for at in range(longest)
    }
    cases = [
        pytest.param(
            *(value for case in chosen for value in case.values),
            marks=[mark for case in chosen for mark in case.marks]
            + [pytest.mark.thorough] * (places not in kept),
        )
        for places in product(*(range(len(found)) for found in values))
        for chosen in ([found[place] for found, place in zip(values, places, strict=True)],)
    ]
    return pytest.mark.parametrize(names, cases, ids=ids)


def _as_case(value: Any, several: bool) -> Any:
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if several else pytest.param(value)
