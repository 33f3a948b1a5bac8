"""Markers for test cases that repeat on another model, format or method what a default case already shows.

`scripts/test` leaves them out, as it does slow tests that are marked ``thorough``; ``scripts/test -m ""`` runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

# Of the families of `tests.conftest`, one for each thing that code depends on; what only a declaration has is seen
# in `tests/equivalence`, where declared and derived families are compared and every stream is held against its model.
REPRESENTATIVE_FAMILIES = (
    "llama", "llama-tied", "gemma3", "phi3", "gpt2", "opt", "lfm2", "olmo2", "cohere2", "gemma4", "falcon-h1",
    "qwen3.5", "gemma3-multimodal", "qwen3-moe", "deepseek-v3", "lfm2-moe", "granitemoe", "gemma4-moe", "gpt-oss",
    "llama4", "qwen3-next",
)  # fmt: skip


def thorough_case(*values: Any) -> Any:
    """Return a case of ``pytest.mark.parametrize`` that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def representative_families(families: Iterable[str], *more: str) -> list[Any]:
    """Return all families; those neither in `REPRESENTATIVE_FAMILIES` nor in ``more`` are marked thorough."""
    names = list(families)
    representative = (name for name in REPRESENTATIVE_FAMILIES if name in names)
    return mark_others_thorough(names, *representative, *more)


def mark_others_thorough(cases: Iterable[Any], *default: Any) -> list[Any]:
    """Return all cases; those that are not in ``default`` are marked thorough: only the whole suite runs them."""
    cases = list(cases)
    assert all(case in cases for case in default)
    return [
        case if case in default else thorough_case(*case if isinstance(case, tuple) else (case,))
        for case in cases
    ]


def parametrize_each_value(
    *axes: tuple[str, Iterable[Any]], ids: Any = None
) -> pytest.MarkDecorator:
    """Parametrize so that each value of each axis is in a default case; the other combinations are thorough.

    Args:
        axes: argument names, several with commas, and their values, as ``pytest.mark.parametrize`` takes them.
        ids: of the values, as it takes them.
    """
    names = [name.strip() for name, _ in axes for name in name.split(",")]
    values = [[_as_case(value, "," in name) for value in column] for name, column in axes]
    default = {
        tuple(
            (index + index // len(column) * (len(column) < longest)) % len(column)
            for column in values
        )
        for longest in (max(map(len, values)),)
        for index in range(longest)
    }
    cases = [
        pytest.param(
            *(value for case in chosen for value in case.values),
            marks=[mark for case in chosen for mark in case.marks]
            + [pytest.mark.thorough] * (indices not in default),
        )
        for indices in product(*(range(len(column)) for column in values))
        for chosen in ([column[index] for column, index in zip(values, indices, strict=True)],)
    ]
    return pytest.mark.parametrize(names, cases, ids=ids)


def _as_case(value: Any, several: bool) -> Any:
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if several else pytest.param(value)
