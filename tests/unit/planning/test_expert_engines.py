"""Verdicts on packed experts in transformers follow what was tried with version 5.23."""

from __future__ import annotations

from typing import Any

import pytest

import quantforge
from tests.conftest import Tiny


def transformers_verdict(tiny: Tiny, **options: Any) -> tuple[bool, str]:
    plan = quantforge.plan(tiny("mixtral"), method="rtn", calibration="none", **options)
    return next(
        (verdict.loads, verdict.reason)
        for verdict in plan.engines
        if verdict.engine == "transformers"
    )


@pytest.mark.parametrize(
    "scheme", ["int3:g32:sym", "int4:g32:sym", "int8:g32:sym", "fp8:row", "mxfp4"]
)
def test_experts_of_supported_schemes_load_in_transformers(tiny: Tiny, scheme: str) -> None:
    assert transformers_verdict(tiny, scheme=scheme)[0]
    assert transformers_verdict(tiny, scheme=scheme, rules=["*self_attn*=int8:g32:sym"])[0]


@pytest.mark.parametrize("scheme", ["W8A8", "mxfp8", "nvfp4"])
def test_experts_of_other_schemes_do_not_load(tiny: Tiny, scheme: str) -> None:
    loads, reason = transformers_verdict(tiny, scheme=scheme)
    assert not loads
    assert "cannot join packed experts" in reason


@pytest.mark.parametrize(
    "rule", ["*w2=int8:g32:sym", "*experts.0.*=int8:g32:sym", "*layers.1.*experts*=int8:g32:sym"]
)
def test_experts_of_mixed_schemes_do_not_load(tiny: Tiny, rule: str) -> None:
    loads, reason = transformers_verdict(tiny, scheme="int4:g32:sym", rules=[rule])
    assert not loads
    assert "all of them need one scheme" in reason
