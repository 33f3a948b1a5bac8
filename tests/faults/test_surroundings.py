"""Clocks, home directory, permissions, long paths and memory limits do not change a run."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from quantforge import api
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import (
    copy_model,
    file_digests,
    fork_child,
    keep_first_blocks,
    leftovers,
    quantize,
    recipe,
    run_command,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

MEGABYTE = 1 << 20
DEMO = Path(__file__).parents[2] / "models" / "demo"


def run_in_child(work: Callable[[], object], directory: Path) -> None:
    """Run ``work`` in a process of its own."""
    errors = directory / "child.log"
    code = wait_for_exit_code(fork_child(work, errors))
    assert code == 0, errors.read_text()


def test_backward_clocks_do_not_change_the_output(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(tiny("llama"), tmp_path / "a", recipe("gptq", bits=4))
    now = time.time()
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now - 1000 * next(ticks))
    quantize(tiny("llama"), tmp_path / "b", recipe("gptq", bits=4))
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")


@pytest.mark.parametrize("home", [None, "/nonexistent"])
def test_quantize_works_without_a_home_directory(
    home: str | None, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    for name in ("XDG_CACHE_HOME", "HF_HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    done = run_command(
        capsys, "quantize", tiny("llama"), "--scales", "absmax", "-o", tmp_path / "out"
    )
    assert done.code == 0, done.err
    assert run_command(capsys, "verify", tmp_path / "out", "--source", tiny("llama")).code == 0


def test_an_output_path_of_4000_bytes_works(tiny: Tiny, tmp_path: Path) -> None:
    directory = tmp_path
    while len(bytes(directory)) < 3700:
        directory /= "ü" * 100
    directory.mkdir(parents=True)
    out = directory / ("o" * (4000 - len(bytes(directory)) - 1))
    assert len(bytes(out)) == 4000
    quantize(tiny("llama"), out, recipe(scales="absmax", bits=4))
    quantize(tiny("llama"), tmp_path / "short", recipe(scales="absmax", bits=4))
    assert file_digests(out) == file_digests(tmp_path / "short")


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "config.json", "tokenizer.json", "."]
)
def test_an_unreadable_file_is_named(
    name: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryDirectory() as public:
        Path(public).chmod(0o777)
        model, out = copy_model(tiny("llama"), Path(public) / "m"), Path(public) / "out"
        for path in (model, *model.iterdir()):
            path.chmod(0o755)
        (model / name).chmod(0)

        def run() -> None:
            if os.geteuid() == 0:  # may read everything
                os.setuid(65534)
            raise SystemExit(run_command(capsys, "quantize", model, "-o", out).code)

        code = wait_for_exit_code(fork_child(run, tmp_path / "child.log"))
        (model / name).chmod(0o755)
        assert not leftovers(out)
    stderr = (tmp_path / "child.log").read_text()
    assert (code, f"{model / name}: Permission denied" in stderr) == (3, True), stderr


@pytest.mark.thorough
def test_uninitialized_memory_does_not_reach_the_output(tiny: Tiny, tmp_path: Path) -> None:
    """The output is the same when torch fills new memory with NaN and the largest numbers."""
    model = tiny("llama")

    def run(directory: Path) -> None:
        directory.mkdir()
        quantize(model, directory / "gptq", recipe("gptq", bits=3))
        export = Recipe(format="gguf", type="Q4_0")
        api.export(str(model), export, directory / "m.gguf", Settings())

    def run_filled() -> None:
        torch.use_deterministic_algorithms(True)
        assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4
        run(tmp_path / "filled")

    run(tmp_path / "plain")
    run_in_child(run_filled, tmp_path)
    assert file_digests(tmp_path / "plain" / "gptq") == file_digests(tmp_path / "filled" / "gptq")
    first, second = (tmp_path / name / "m.gguf" for name in ("plain", "filled"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("method", [thorough_case("rtn"), "gptq"])
def test_a_run_fits_into_120_percent_of_planned_memory(
    method: str, tiny: Tiny, tmp_path: Path
) -> None:
    """The limit is on address space, beyond imports, compiled loops and the stack of a thread."""
    model, requested = (
        keep_first_blocks(copy_model(DEMO, tmp_path / "demo"), 1),
        recipe(method, bits=4),
    )
    peak = api.plan(str(model), requested).peak_memory_bytes
    quantize(model, tmp_path / "free", requested, threads=1)

    def run() -> None:
        quantize(tiny("llama"), tmp_path / "small", requested, threads=1)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = taken + int(1.2 * peak) + 8 * MEGABYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        quantize(model, tmp_path / "under", requested, threads=1)

    run_in_child(run, tmp_path)
    assert file_digests(tmp_path / "free") == file_digests(tmp_path / "under")
