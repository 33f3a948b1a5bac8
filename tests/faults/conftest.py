"""Fixtures of the fault tests: a tiny model and an output path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Tiny


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
