"""The model that most commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Tiny


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")
