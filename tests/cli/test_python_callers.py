"""What a program that calls the verbs has set or hands over: bytes do not follow it, and it stays as it was."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quantforge
from quantforge.errors import UsageError
from quantforge.planning.recipe_options import build_recipe
from tests.conftest import Tiny


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("nvfp4", torch.bfloat16), ("nf4", torch.float64), ("mxfp4", torch.bfloat16), ("int4:g32", torch.float64)],
)  # fmt: skip
def test_bytes_do_not_follow_the_callers_defaults(
    tiny: Tiny, tmp_path: Path, scheme: str, kind: torch.dtype
) -> None:
    def made(name: str) -> bytes:
        settings = quantforge.Settings(threads=2)
        options: Any = {"method": "rtn", "calibration": "none", "scheme": scheme}
        quantforge.quantize(tiny("llama"), out=tmp_path / name, settings=settings, **options)
        return (tmp_path / name / "model.safetensors").read_bytes()

    expected, threads = made("plain"), torch.get_num_threads()
    torch.set_default_dtype(kind)
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made("other") == expected
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == kind
        assert torch.get_num_threads() == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1.5}, {"seed": True}, {"bits": numpy.int64(4)}, {"bits": True}, {"bits": "4"}, {"method": 5},
        {"method": ["rtn"]}, {"scheme": b"int4"}, {"head": True}, {"rules": "a=int8"}, {"rules": [5]},
        {"rules": [("a", "int8")]}, {"ignore": "lm_head"}, {"ignore": [None]}, {"calibration": Path("x")},
        {"engine": 5}, {"samples": "4"}, {"chat_template": "yes"}, {"tensor_parallel": 2.0}, {"refine": 1.5},
        {"max_shard_bytes": True}, {"pre": 5}, {"type": 5},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_type_are_refused(tiny: Tiny, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(quantforge.QuantForgeError) as refused:
        quantforge.plan(tiny("llama"), **options)
    place = {"calibration": "source", "rules": "rule"}.get(name, name)
    assert place in refused.value.message


@pytest.mark.parametrize(
    "given", [{"threads": 0}, {"threads": "2"}, {"activations": "gpu"}, {"device": "cuda:x"}]
)
def test_settings_that_nobody_could_run_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(quantforge.QuantForgeError, match=next(iter(given))):
        quantforge.Settings(**given)


@pytest.mark.parametrize("device", ["cuda:99", "cuda:x", "gpu"])
def test_verbs_name_a_device_that_is_not_there(device: str, tiny: Tiny) -> None:
    model = str(tiny("llama"))
    for verb in (quantforge.load, quantforge.verify):
        with pytest.raises(UsageError, match=f"device {device}:"):
            verb(model, device=device)


def test_choices_override_a_recipe_in_both_directions() -> None:
    recipe = quantforge.Recipe(calibration=quantforge.CalibrationOptions(chat_template=True))
    assert build_recipe(recipe).calibration.chat_template
    assert not build_recipe(recipe, chat_template=False).calibration.chat_template
    rule = quantforge.Rule("down_proj", "int8:g128:sym")
    assert build_recipe(None, rules=[rule, "up_proj=keep"]).rules[0] == rule
