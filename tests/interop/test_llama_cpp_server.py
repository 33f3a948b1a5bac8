"""``bench --url`` on the server of llama.cpp: the engine that a GGUF file is for, measured as our own is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantforge import api
from quantforge.evaluation.llama_cpp import LlamaCpp
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from tests.runs import run_command

xllamacpp = pytest.importorskip("xllamacpp")
DEMO = Path(__file__).parents[2] / "models/demo"
NAME = "demo-q8"
SMALL = ("--requests", "5", "--prompt-tokens", "8..20", "--new-tokens", "3..6")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "demo.gguf"
    recipe = Recipe(format="gguf", type="Q8_0", calibration=CalibrationOptions(source="none"))
    api.export(str(DEMO), recipe, out, Settings())
    return out


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    """Serve the bundled model in llama.cpp on a free port of this machine."""
    if not hasattr(xllamacpp.Server, "listening_address"):
        pytest.skip("the wheel has no HTTP server")
    LlamaCpp(file, 64)  # the wheel loads the file at all
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.model_alias = {NAME}
    settings.hostnames, settings.port = ["127.0.0.1"], 0
    settings.n_ctx, settings.n_parallel = 2048, 4  # which all share
    settings.cpuparams.n_threads = 1
    settings.warmup, settings.verbosity = False, -1
    server = xllamacpp.Server(settings)
    yield f"{server.listening_address.rstrip('/')}/v1"
    del server


def test_requests_are_served_in_their_length(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "bench", DEMO, "--url", url, *SMALL, "--json")
    assert result.code == 0, result.err + result.out
    (row,) = json.loads(result.out)["rows"]
    figures = row["metrics"]
    assert (row["name"], figures["requests"], figures["failed"]) == (url, 5, 0)
    own = run_command(capsys, "bench", DEMO, *SMALL, "--json")
    (here,) = json.loads(own.out)["rows"]
    for count in ("prompt_tokens", "new_tokens"):
        assert figures[count] == here["metrics"][count]
    assert 0 < figures["ttft"]["50"] <= figures["ttft"]["99"]


def test_its_model_is_known_by_its_name(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = run_command(capsys, "bench", DEMO, "--url", url, *SMALL, "--served-name", NAME)
    assert named.code == 0, named.err
    other = run_command(capsys, "bench", DEMO, "--url", url, *SMALL, "--served-name", "another")
    assert other.code == 3
    assert NAME in other.err
