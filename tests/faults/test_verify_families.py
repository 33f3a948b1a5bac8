"""Healthy artifacts of dense families pass verification against their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantforge
from tests.conftest import Tiny
from tests.thorough import mark_others_thorough

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt", "smollm3", "lfm2",
)  # fmt: skip
# Norms that add one, linears in one matrix, layers of several kinds; transposed ones `tests/acceptance` verifies.
KINDS = ("gemma3", "phi3", "lfm2")


@pytest.mark.parametrize("family", mark_others_thorough(FAMILIES, *KINDS))
def test_a_healthy_artifact_of_a_dense_family_passes(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    out = tmp_path / "out"
    quantforge.quantize(
        tiny(family), method="rtn", calibration="none", scheme="int8:row:sym", out=out
    )
    report = quantforge.verify(out, source=tiny(family))
    assert report.findings == []
    assert report.figures
