"""Under torchrun the ranks share one run, only the first one prints, and a dead rank ends them all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from quantforge.cli import processes
from quantforge.cli.app import main
from quantforge.errors import UsageError
from quantforge.settings import under_torchrun
from tests.releases import TWO_VARIANTS
from tests.runs import (
    CALIBRATION_ARGUMENTS,
    StopError,
    crash_after,
    fast_recipe,
    file_digests,
    fork_child,
    leftovers,
    quantize,
    run_command,
    wait_for_exit_code,
)

STARTED = "TORCHELASTIC_RUN_ID"
ROOT = Path(__file__).parents[2]
OPTIONS = ("--method", "gptq", "--bits", "4", "--lm-head", "int8:row", *CALIBRATION_ARGUMENTS)


def torchrun(words: tuple[object, ...], count: int, errors: Path) -> int:
    """Start what torchrun starts, ranks included, as forks, which have the imports of this process."""

    def work() -> None:
        sys.argv = ["quantforge", *map(str, words)]
        main()

    def launch() -> None:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=0, start_method="fork",
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="x", local_addr="localhost",
            monitor_interval=0.05,
        )  # fmt: skip
        try:
            elastic_launch(config, work)()
        except ChildFailedError as failed:
            raise SystemExit(1) from failed

    return fork_child(launch, errors)


def rank(words: tuple[object, ...], log_directory: Path, number: int) -> int:
    """Start one of the processes of torchrun as a fork, which has the imports of this one."""

    def work() -> None:
        os.environ |= {STARTED: "x", "RANK": str(number), "LOCAL_RANK": str(number)}
        sys.argv = ["quantforge", *map(str, words)]
        sys.stdout = log_directory.joinpath(f"out-{number}").open("w")
        main()

    return fork_child(work, log_directory / f"errors-{number}")


def children(process: int) -> list[int]:
    return [
        int(number)
        for task in Path(f"/proc/{process}/task").iterdir()
        for number in (task / "children").read_text().split()
    ]


def test_a_run_resumes_with_more_ranks_after_one_dies(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(capsys, "quantize", model, *OPTIONS, "-o", out.with_name("m")).code == 0
    words, errors = ("quantize", model, *OPTIONS, "--json", "-o", out), out.with_name("m.errors")
    first = torchrun(words, 2, errors)
    units = out.parent / ".out.qf/units"
    deadline = time.monotonic() + 240
    while not [*units.glob("*/*.held")]:
        assert os.waitpid(first, os.WNOHANG) == (0, 0), errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(children(first)[0], signal.SIGKILL)
    assert wait_for_exit_code(first) == 1, errors.read_text()
    errors.unlink()
    log_directory = out.with_name("m.output")
    log_directory.mkdir()
    again = [rank(words, log_directory, number) for number in range(3)]
    assert [wait_for_exit_code(child) for child in again] == [0, 0, 0]
    outputs = [log_directory.joinpath(f"out-{number}").read_text() for number in range(3)]
    assert [text.count("quantforge.quantize/2") for text in outputs] == [1, 0, 0]
    shutil.rmtree(log_directory)
    assert file_digests(out) == file_digests(out.with_name("m"))
    assert leftovers(out) == {"out"}


def test_ranks_with_options_of_another_run_are_refused(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ((STARTED, "x"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    recipe = fast_recipe("gptq", bits=3)
    with pytest.raises(StopError):
        quantize(model, out, recipe, join=True, progress=crash_after("outer"))
    refused = run_command(capsys, "quantize", model, *OPTIONS, "--json", "-o", out)
    assert refused.code == 5
    assert "bits: 3 there, 4 here" in refused.err + refused.out
    assert "when no process works on it any more" in refused.err + refused.out
    quantize(model, out, recipe, join=True)
    assert leftovers(out) == {"out"}


@pytest.mark.thorough
def test_the_slurm_array_example_matches_a_single_release(
    model: Path, out: Path, tmp_path: Path
) -> None:
    program, spec = tmp_path / "bin/quantforge", tmp_path / "release.toml"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m quantforge "$@"\n')
    program.chmod(0o755)
    spec.write_text(TWO_VARIANTS.format(model=model))
    arguments = [ROOT / "docs/examples/slurm-array.sh", spec, out, "--quiet"]
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SOURCE_DATE_EPOCH": "0",
    }
    tasks = [
        subprocess.Popen(
            arguments, env={**environment, "SLURM_ARRAY_TASK_ID": str(number)}, cwd=ROOT
        )
        for number in range(2)
    ]
    assert [task.wait() for task in tasks] == [0, 0]
    alone = out.with_name("m")
    subprocess.run([program, "release", spec, "-o", alone], env=environment, cwd=ROOT, check=True)
    assert file_digests(out) == file_digests(alone)


def test_each_rank_uses_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (under_torchrun(), processes.is_silent()) == (False, False)
    for name, value in ((STARTED, "x"), ("RANK", "5"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert processes.is_silent()
    assert [processes.rank_device(device) for device in ("cpu", "cuda", "cuda:3")] == [
        "cpu",
        "cuda:1",
        "cuda:3",
    ]


def test_verbs_that_ranks_cannot_share_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STARTED, "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="share nothing of 'eval'"):
        processes.check_ranks(["eval"])
    refused = run_command(capsys, "inspect", model)
    assert refused.code == 2
    assert "torchrun is for quantize" in refused.err


@pytest.mark.tokens
@pytest.mark.thorough
def test_two_ranks_generate_the_answer_of_one_process(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two processes holds half of the packed weights; the answer equals that of one, printed once."""
    arguments = ("--method", "rtn", "--scheme", "int4:g32:sym", "-o", out)
    assert run_command(capsys, "quantize", model, *arguments).code == 0
    words = ("generate", out, "the weights of", "--max-tokens", "8", "--json")
    alone = json.loads(run_command(capsys, *words).out)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    shared = subprocess.run(
        [*launch, "--standalone", "-m", "tests.choices", *words],
        capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
    )  # fmt: skip
    assert shared.returncode == 0, shared.stderr
    shared_document = json.loads(shared.stdout)
    first, other = (document["answers"][0]["choices"][0] for document in (alone, shared_document))
    assert other["tokens"] == first["tokens"]
    assert len(other["tokens"]) == 8
    for name, value in ((STARTED, "x"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for more, message in (
        (("generate", out), "no terminal and no standard input in common"),
        (("generate", out, "x", "--draft", "ngram"), "share one model"),
    ):
        refused = run_command(capsys, *more)
        assert refused.code == 2
        assert message in refused.err


def test_an_error_of_all_ranks_is_printed_once(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun gives each process an error file in sibling directories."""
    monkeypatch.setenv(STARTED, "x")
    results = []
    for rank in ("1", "0"):
        directory = out.with_name("m") / "attempt" / rank
        directory.mkdir(parents=True)
        for name, value in (
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            (processes.ERROR_FILE_VARIABLE, str(directory / "error.json")),
        ):
            monkeypatch.setenv(name, value)
        results += [
            run_command(capsys, "generate", out, "x"),
            run_command(capsys, "generate", out, "x", "-n", 0),
        ]
    assert [result.code for result in results] == [3, 2, 3, 2]
    assert [bool(result.err) for result in results] == [True, True, False, False]
    monkeypatch.setenv(processes.ERROR_FILE_VARIABLE, "error.json")  # of nobody else
    assert run_command(capsys, "generate", out, "x").err
