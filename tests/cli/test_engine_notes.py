"""`export --for`: a format that the engine loads, or every reason why there is none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from quantforge.formats import detect_format
from tests.conftest import Tiny
from tests.runs import quantize, recipe, run_command
from tests.thorough import thorough_case


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(scheme: str, form: str) -> Path:
        out = tmp_path_factory.mktemp("made") / "source"
        quantize(tiny("llama-wide"), out, recipe(scheme=scheme, format=form, scales="absmax"))
        return out

    return make


@pytest.mark.parametrize(
    ("scheme", "form", "engine", "found"),
    [
        ("int4:g128:sym:f16", "gptq", "vllm", "gptq"),  # as it is
        ("int4:g128:sym:f16", "gptq", "mlx", "mlx"),
        thorough_case("int4:g32:sym", "compressed-tensors", "transformers", "compressed-tensors"),
        ("mxfp4", "mlx", "vllm", "compressed-tensors"),
    ],
)
def test_a_quantized_model_goes_where_the_engine_loads_it(
    scheme: str, form: str, engine: str, found: str, made, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    result = run_command(capsys, "export", made(scheme, form), "--for", engine, "-o", out)
    assert result.code == 0, result.err
    assert found == detect_format(json.loads((out / "config.json").read_text())).KEY
    assert "serve it with: " in result.err
    assert str(out) in result.err.partition("serve it with: ")[2]


def test_numbers_that_an_engine_loads_in_no_format_are_refused_with_all_reasons(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "export", made("nf4", "bnb"), "--for", "mlx", "-o", tmp_path / "o")
    assert result.code == 4
    for words in ("bnb: mlx does not load", "compressed-tensors: ", "gptq: ", "--for mlx"):
        assert words in result.err
    assert not (tmp_path / "o").exists()


def test_a_split_that_does_not_divide_is_refused(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made("int4:g128:sym:f16", "gptq")
    asked = ("export", source, "--for", "vllm", "--tensor-parallel", "64", "-o", tmp_path / "o")
    result = run_command(capsys, *asked)
    assert result.code == 4
    assert "64 devices" in result.err


def test_a_plain_model_is_rounded_into_what_the_engine_is_fast_with(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ("export", tiny("llama-wide"), "--for", "lmdeploy", "--calibration", "none", "-o", out)
    result = run_command(capsys, *asked)
    assert result.code == 0, result.err
    assert detect_format(json.loads((out / "config.json").read_text())).KEY == "awq"
    assert f"lmdeploy serve api_server {out}" in result.err
    assert run_command(capsys, "export", out, "-o", tmp_path / "o").code == 2
