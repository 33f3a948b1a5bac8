"""The model directory of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calibration.support import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with a tokenizer of single bytes (ids 2..257), <s> = 0 and </s> = 1."""
    return write_model(tmp_path / "model")
