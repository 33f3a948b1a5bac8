"""Processes that share a release write the bytes of one process, and each makes its own variants."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantforge.api import release, sweep
from quantforge.api.release import SPEC
from quantforge.cli import processes
from quantforge.errors import UsageError
from quantforge.files.disk import run_folder
from quantforge.settings import Settings
from tests.runs import file_digests, fork_child, run_command, wait_for_exit_code

ROOT = Path(__file__).parents[2]
SPEC_HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
[evaluation]
text = "builtin"
windows = 2
length = 16
"""
VARIANT = """[[variant]]
name = "{name}"
recipe = {{method = "{method}", scheme = "{scheme}"}}
format = "compressed-tensors"
"""
VARIANTS = {
    "int2": ("gptq", "int2:g32:sym"),
    "plain": ("rtn", "int8:row:sym"),
}
DEADLINE = 240


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


@pytest.fixture
def spec(model, tmp_path):
    return write_spec(model, tmp_path / "release.toml")


def write_spec(model, path):
    """Write a release of three variants."""
    variants = (
        VARIANT.format(name=name, method=method, scheme=scheme)
        for name, (method, scheme) in VARIANTS.items()
    )
    path.write_text(
        SPEC_HEAD.format(model=model)
        + "".join(variants)
        + '[[variant]]\nname = "q8"\nrecipe = {method = "rtn", scales = "absmax"}\ntype = "Q8_0"\n'
    )
    return path


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Make the same release in one process, once for all tests."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        release(write_spec(tiny("llama-wide"), directory / "release.toml"), directory / "out")
    return directory / "out"


def start_joining(spec, out, log_directory):
    """Start a process that takes part; ``log_directory / NAME`` says afterwards that it made a variant."""

    def work():
        for name in release(spec, out, Settings(join=True)).made:
            (log_directory / name).touch(exist_ok=False)

    return fork_child(work, log_directory / f"errors-{random.random()}")


@pytest.mark.thorough
def test_three_processes_make_each_variant_once(spec, whole, tmp_path):
    shared, log_directory = tmp_path / "shared", tmp_path / "made"
    log_directory.mkdir()
    children = [start_joining(spec, shared, log_directory) for _ in range(3)]
    assert [wait_for_exit_code(child) for child in children] == [0, 0, 0]
    assert {path.name for path in log_directory.iterdir() if "errors" not in path.name} == {
        *VARIANTS,
        "q8",
    }
    assert file_digests(shared) == file_digests(whole)
    assert release(spec, shared, Settings(join=True)).made == ()
    assert file_digests(shared) == file_digests(whole)


@pytest.mark.thorough
def test_tuned_and_guided_variants_are_distributed_between_processes(model, tmp_path):
    variant = VARIANT.replace('"}}', '", {more}}}')
    alone = {
        "tuned": "tune = 1",
        "guided": "guided_hessians = 1",
    }
    text = SPEC_HEAD.format(model=model) + "".join(
        variant.format(name=name, method="gptq", scheme="int4:g32:sym", more=more)
        for name, more in alone.items()
    )
    spec, log_directory = tmp_path / "release.toml", tmp_path / "made"
    spec.write_text(text)
    log_directory.mkdir()
    children = [start_joining(spec, tmp_path / "shared", log_directory) for _ in range(2)]
    assert [wait_for_exit_code(child) for child in children] == [0, 0]
    assert {path.name for path in log_directory.iterdir() if "errors" not in path.name} == {*alone}
    release(spec, tmp_path / "one")
    assert file_digests(tmp_path / "shared") == file_digests(tmp_path / "one")


def test_variants_of_a_killed_process_are_made_by_others(spec, whole, tmp_path):
    shared, log_directory = tmp_path / "shared", tmp_path / "made"
    log_directory.mkdir()

    def until(step):
        def kill(progress):
            if step in f"{progress.phase}: {progress.step}":
                os.kill(os.getpid(), signal.SIGKILL)

        return fork_child(
            lambda: release(spec, shared, Settings(join=True, progress=kill)),
            log_directory / "errors",
        )

    for step in ("block 1: rounding", "scoring"):
        assert wait_for_exit_code(until(step)) == -signal.SIGKILL, (
            log_directory / "errors"
        ).read_text()
    left = [start_joining(spec, shared, log_directory) for _ in range(2)]
    assert [wait_for_exit_code(child) for child in left] == [0, 0]
    assert file_digests(shared) == file_digests(whole)


def test_jobs_starts_workers_and_prints_once(spec, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        processes, "_start_worker", record_starts(processes._start_worker, started := [])
    )
    shared = tmp_path / "shared"
    ended_command = run_command(capsys, "release", spec, "-o", shared, "--jobs", "2")
    assert ended_command.code == 0
    assert [process.returncode for process in started] == [0]
    assert {line.split()[0] for line in ended_command.out.splitlines()[1:]} >= {*VARIANTS, "q8"}
    assert ended_command.out.count("q8") == 1
    assert "processes failed" not in ended_command.err
    assert file_digests(shared) == file_digests(whole)


def record_starts(start, started):
    """Return a wrapper of ``start`` that records the processes that it starts."""

    def other(argument):
        started.append(start(argument))
        return started[-1]

    return other


@pytest.mark.thorough
def test_a_sweep_with_jobs_matches_a_single_process(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        processes, "_start_worker", record_starts(processes._start_worker, started := [])
    )
    common = ["sweep", model, "--over", "method=rtn,gptq", "--bits", "4", "--samples", "4", "--length", "16",
              "--windows", "2", "--window-length", "16", "--json"]  # fmt: skip
    assert run_command(capsys, *common, "-o", tmp_path / "alone").code == 0
    assert not started
    ended_command = run_command(capsys, *common, "-o", tmp_path / "shared", "--jobs", "2")
    assert ended_command.code == 0
    assert [process.returncode for process in started] == [0]
    assert len(json.loads(ended_command.out)["results"]) == 2
    assert json.loads(ended_command.out)["failed_processes"] == []
    assert ended_command.err == ""
    assert file_digests(tmp_path / "shared") == file_digests(tmp_path / "alone")
    with pytest.raises(UsageError, match="begins late"):
        sweep(
            model,
            {"bits": ["4"]},
            tmp_path / "shared",
            settings=Settings(join=True, overwrite=True),
        )


@pytest.mark.thorough
def test_interrupting_the_main_process_ends_all_jobs(spec, tmp_path):
    out = tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-m", "quantforge", "release", spec, "-o", out, "--jobs", "2"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE
    while not (out / SPEC).exists():
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=DEADLINE)  # every process has closed its end
    assert run.returncode == 130
    assert "goes on behind what it had finished" in errors
    assert not run_folder(out / SPEC).exists()


def test_join_with_overwrite_is_refused(spec, tmp_path):
    with pytest.raises(UsageError, match="begins late"):
        release(spec, tmp_path / "out", Settings(join=True, overwrite=True))
    assert not (tmp_path / "out").exists()


def test_variants_over_the_budget_are_skipped_by_name(spec, whole, tmp_path, capsys):
    out = tmp_path / "out"
    released = json.loads((whole / "release.json").read_text())["variants"]
    sizes = {variant["name"]: variant["weight_bytes"] for variant in released}
    most = sorted(sizes.values())[1]
    for more in (("--dry-run",), ()):
        ended_command = run_command(
            capsys, "release", spec, "-o", out, "--budget", f"{most}B", *more
        )
        assert ended_command.code == 0
        beyond = {name for name, size in sizes.items() if size > most}
        assert {
            line.split(" is left out")[0]
            for line in ended_command.err.splitlines()
            if "is left out" in line
        } == beyond
    variants = json.loads((out / "release.json").read_text())["variants"]
    assert {variant["name"] for variant in variants} == {*sizes} - beyond
    assert {path.name for path in (out / "compressed-tensors").iterdir()} <= {*sizes} - beyond
    ended_command = run_command(capsys, "release", spec, "-o", tmp_path / "none", "--budget", "1B")
    assert ended_command.code == 4
    assert "the smallest, int2, has" in ended_command.err
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="budget = '8GB'"):
        release(spec, out, budget="8GB")
    with pytest.raises(UsageError, match="number of bytes"):
        release(spec, out, budget=0)
