"""Cases that show on a further model, format or method what another case of the same test shows.

`scripts/test` leaves them out, as it does tests that are marked ``thorough``, which take seconds and stand beside
quicker ones; ``scripts/test -m ""`` runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def further(*values: Any) -> Any:
    """Return a case of ``pytest.mark.parametrize`` that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def usual(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases, of which only the whole suite runs those that are not ``kept``."""
    found = list(cases)
    assert all(case in found for case in kept)
    return [
        case if case in kept else further(*case if isinstance(case, tuple) else (case,))
        for case in found
    ]
