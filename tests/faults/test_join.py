"""Processes that share a run write the bytes of one process, even if one of them is killed or stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.errors import (
    BusyError,
    InputError,
    IntegrityError,
    RefusedError,
    ResourceError,
    UsageError,
)
from quantforge.execution import claims, shared_run
from quantforge.execution.claims import Claim
from quantforge.execution.shared_run import SharedStates, Worker
from quantforge.execution.unit_output import UnitOutput
from quantforge.files.stage import Stage
from quantforge.progress import Progress
from quantforge.recipe import Recipe
from tests.conftest import Tiny
from tests.runs import (
    StopError,
    copy_model,
    crash_after,
    fast_recipe,
    file_digests,
    fork_child,
    leftovers,
    quantize,
    run_command,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

PLAIN = fast_recipe(scales="absmax", bits=4)
GPTQ = fast_recipe("gptq", bits=4, lm_head="int8:row")
FILE = Recipe(type="Q4_K_M", format="gguf", scales="absmax", max_shard_bytes=100_000)
UNITS = ".out.qf/units"
Start = Callable[[Callable[[], object]], int]


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten heartbeats, so that claims are taken over after a second."""
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(shared_run, "POLL_SECONDS", 0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start work in child processes that are killed at the end of the test."""
    children: list[int] = []

    def started(work: Callable[[], object]) -> int:
        children.append(fork_child(work, tmp_path / f"m-errors-{len(children)}"))
        return children[-1]

    yield started
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def join(model: Path, out: Path, recipe: Recipe = PLAIN, **settings: Any) -> None:
    """Join a run, or a calibrated one as a rank of torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        if recipe.method != PLAIN.method:
            patch.setenv("TORCHELASTIC_RUN_ID", "x")
        quantize(model, out, recipe, join=True, **settings)


def before_call(owner: object, name: str, number: int, act: Callable[[], None]) -> None:
    """Make this child process act before the given call of a function."""
    function, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            act()
        return function(*arguments, **named)

    setattr(owner, name, counted)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("out.gguf", FILE),
        ("out", replace(GPTQ, tune=2)),  # calibrated blocks, and what is done behind them
        thorough_case("out", PLAIN),
        thorough_case("out", GPTQ),
        thorough_case("out", fast_recipe("awq", bits=4)),
    ],
)
def test_two_processes_write_the_same_bytes_as_one(
    model: Path, tmp_path: Path, start: Start, name: str, recipe: Recipe
) -> None:
    directories = {kind: tmp_path / kind for kind in ("one", "two", "log")}
    for directory in directories.values():
        directory.mkdir()
    quantize(model, directories["one"] / name, recipe)

    def worker(own_log: str, other_log: str) -> None:
        def progress(done: Progress) -> None:
            """Wait after the first unit until the other process has done one, too."""
            if not done.part:
                return
            with (directories["log"] / own_log).open("a") as file:
                file.write(f"{done.part}\n")
            wait_until((directories["log"] / other_log).exists)

        join(model, directories["two"] / name, recipe, progress=progress)

    children = [start(partial(worker, "a", "b")), start(partial(worker, "b", "a"))]
    assert [wait_for_exit_code(child) for child in children] == [0, 0]
    assert file_digests(directories["two"]) == file_digests(directories["one"])
    assert leftovers(directories["two"] / "m") == {
        path.name for path in directories["one"].iterdir()
    }
    done = [(directories["log"] / log_name).read_text().split("\n")[:-1] for log_name in "ab"]
    assert all(done)
    tuned = ["tune", "tune block 0", "tune block 1"] if recipe.tune else []
    assert sorted(done[0] + done[1]) == ["block 0", "block 1", "head", "outer", *tuned]


def test_tuning_continues_after_the_tuning_process_is_killed(
    model: Path, tmp_path: Path, start: Start
) -> None:
    recipe, log = replace(GPTQ, tune=1), tmp_path / "m-log"
    quantize(model, tmp_path / "one", recipe)

    def first(done: Progress) -> None:
        if done.part == "tune block 0":
            os.kill(os.getpid(), signal.SIGKILL)

    def second(done: Progress) -> None:
        with log.open("a") as file:
            file.write(f"{done.part}\n")

    killed = start(lambda: join(model, tmp_path / "two", recipe, progress=first))
    assert wait_for_exit_code(killed) == -signal.SIGKILL
    assert (
        wait_for_exit_code(start(lambda: join(model, tmp_path / "two", recipe, progress=second)))
        == 0
    )
    assert [line for line in log.read_text().split("\n") if "tune" in line][-1] == "tune block 1"
    assert "tune block 0\n" not in log.read_text()
    assert file_digests(tmp_path / "two") == file_digests(tmp_path / "one")


@pytest.fixture(scope="module")
def reference(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that one process writes."""
    out = tmp_path_factory.mktemp("reference") / "m"
    quantize(tiny("llama-wide"), out, PLAIN)
    return file_digests(out)


@pytest.fixture(scope="module")
def calibrated(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that one process writes with a calibrated recipe."""
    out = tmp_path_factory.mktemp("calibrated") / "m"
    quantize(tiny("llama-wide"), out, GPTQ)
    return file_digests(out)


@pytest.fixture
def whole(
    reference: dict[str, str], calibrated: dict[str, str]
) -> Callable[[Recipe], dict[str, str]]:
    """Return a function from one of the two recipes to the files that one process writes."""
    return lambda recipe: reference if recipe is PLAIN else calibrated


def held_units(out: Path) -> list[str]:
    return [path.name for path in (out.parent / UNITS).glob("*/*.held")]


@pytest.mark.parametrize("write", [thorough_case(1), 20])
def test_another_process_redoes_the_unit_of_a_killed_one(
    model: Path, out: Path, reference: dict[str, str], start: Start, write: int
) -> None:
    def killed() -> None:
        before_call(UnitOutput, "write", write, send(signal.SIGKILL))
        join(model, out)

    assert wait_for_exit_code(start(killed)) == -signal.SIGKILL
    assert len(held_units(out)) == 1
    join(model, out)
    assert file_digests(out) == reference
    assert not out.with_name(".out.qf").exists()


STOP_POINTS = [
    thorough_case(UnitOutput, "write", 1),
    (UnitOutput, "write", 9),
    (Claim, "finish", 1),
    (claims, "write_durably", 2),
]


@pytest.mark.parametrize(("owner", "name", "number"), STOP_POINTS)
def test_a_resumed_process_that_lost_its_unit_changes_nothing(
    model: Path,
    out: Path,
    reference: dict[str, str],
    start: Start,
    owner: object,
    name: str,
    number: int,
) -> None:
    """It is continued when the result exists."""

    def stopped() -> None:
        before_call(owner, name, number, send(signal.SIGSTOP))
        join(model, out)

    child = start(stopped)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    join(model, out)
    assert file_digests(out) == reference
    os.kill(child, signal.SIGCONT)
    assert wait_for_exit_code(child) == 0
    assert file_digests(out) == reference
    assert leftovers(out) == {"out", "m-errors-0"}


def test_two_claims_of_a_unit_do_not_interfere(
    model: Path, out: Path, reference: dict[str, str], start: Start
) -> None:
    """The stopped process continues while the other works on the same unit, the last one."""

    def worker(write: int) -> None:
        before_call(UnitOutput, "write", write, send(signal.SIGSTOP))
        join(model, out)

    first = start(lambda: worker(24))  # a block has 7 matrices of 3 tensors
    assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    assert held_units(out) == ["0002.1.held"]
    second = start(lambda: worker(3))
    assert os.WIFSTOPPED(os.waitpid(second, os.WUNTRACED)[1])
    assert held_units(out) == ["0002.2.held"]
    os.kill(first, signal.SIGCONT)
    time.sleep(0.5)
    assert held_units(out) == ["0002.2.held"]
    os.kill(second, signal.SIGCONT)
    assert [wait_for_exit_code(first), wait_for_exit_code(second)] == [0, 0]
    assert file_digests(out) == reference
    assert not out.with_name(".out.qf").exists()


# Within the first block, and within the head, which reads what a block has handed on.
@pytest.mark.parametrize("write", [thorough_case(9), thorough_case(26), 44])
def test_another_process_redoes_the_calibrated_block_of_a_killed_one(
    model: Path, out: Path, calibrated: dict[str, str], start: Start, write: int
) -> None:
    def killed() -> None:
        before_call(UnitOutput, "write", write, send(signal.SIGKILL))
        join(model, out, GPTQ)

    assert wait_for_exit_code(start(killed)) == -signal.SIGKILL
    assert len(held_units(out)) == 1
    join(model, out, GPTQ)
    assert file_digests(out) == calibrated
    assert leftovers(out) == {"out", "m-errors-0"}


@pytest.mark.parametrize(
    ("owner", "name", "number"), [(UnitOutput, "write", 9), thorough_case(Claim, "finish", 2)]
)
def test_a_process_that_lost_a_calibrated_block_recomputes_its_rows(
    model: Path,
    out: Path,
    calibrated: dict[str, str],
    start: Start,
    owner: object,
    name: str,
    number: int,
) -> None:
    """Another process has done block 1 and the head, has taken over block 0, and is stopped in it."""

    def stopped(owner: object, name: str, number: int) -> None:
        before_call(owner, name, number, send(signal.SIGSTOP))
        join(model, out, GPTQ)

    first = start(partial(stopped, owner, name, number))
    assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    second = start(partial(stopped, UnitOutput, "write", 26))
    assert os.WIFSTOPPED(os.waitpid(second, os.WUNTRACED)[1])
    assert held_units(out) == ["0001.2.held"]
    os.kill(first, signal.SIGCONT)
    assert wait_for_exit_code(first) == 0
    assert file_digests(out) == calibrated
    os.kill(second, signal.SIGCONT)
    assert wait_for_exit_code(second) == 0
    assert file_digests(out) == calibrated
    assert leftovers(out) == {"out", "m-errors-0", "m-errors-1"}


def test_a_worker_takes_over_the_block_it_waits_for(
    model: Path, out: Path, calibrated: dict[str, str], start: Start
) -> None:
    """The first process is stopped in block 0 after it has shared one of two micro-batches."""

    def stopped() -> None:
        write, calls = SharedStates.write, [0]

        def counted(states: SharedStates, *arguments: Any) -> None:
            calls[0] += 1
            if calls[0] == 4:
                states.flush()
                os.kill(os.getpid(), signal.SIGSTOP)
            write(states, *arguments)

        SharedStates.write = counted  # type: ignore[method-assign]
        join(model, out, GPTQ)

    child = start(stopped)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    states = next((out.parent / UNITS).glob("*/states"))
    assert sorted(path.name for path in states.iterdir()) == ["0.0", "0.4", "1.0"]
    parts: list[str] = []
    join(model, out, GPTQ, progress=lambda done: parts.append(done.part))
    assert [*filter(None, parts)] == ["block 0", "block 1", "head"]
    assert file_digests(out) == calibrated
    os.kill(child, signal.SIGCONT)
    assert wait_for_exit_code(child) == 0
    assert file_digests(out) == calibrated
    assert leftovers(out) == {"out", "m-errors-0"}


@pytest.mark.parametrize("damage", ["changed", thorough_case("cut"), "removed"])
def test_damaged_shared_states_are_refused(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    read = SharedStates.read

    def harmed(states: SharedStates, start: int, stop: int) -> torch.Tensor:
        path = states._file(states.block, start)
        if states.block == 1:
            data = bytearray(path.read_bytes())
            data[9] ^= 1
            path.write_bytes({"changed": data, "cut": data[:-9]}.get(damage, b""))
            if damage == "removed":
                path.unlink()
        return read(states, start, stop)

    monkeypatch.setattr(SharedStates, "read", harmed)
    with pytest.raises(IntegrityError, match="is not what a worker had written") as refused:
        join(model, out, GPTQ)
    assert refused.value.hint == f"start afresh: rm -r {out.parent / UNITS}"
    assert not out.exists()


def test_shared_states_are_removed_after_use(model: Path, out: Path) -> None:
    there: list[set[str]] = []

    def look(_: Progress) -> None:
        paths = (out.parent / UNITS).glob("*/states/*.*")
        there.append({path.name.partition(".")[0] for path in paths})

    join(model, out, GPTQ, progress=look)
    assert max(map(len, there)) <= 3


@pytest.mark.parametrize("recipe", [PLAIN, GPTQ])
def test_a_single_process_resumes_a_shared_run(
    model: Path, out: Path, whole: Callable[[Recipe], dict[str, str]], recipe: Recipe
) -> None:
    with pytest.raises(StopError):
        join(model, out, recipe, progress=crash_after("block 0"))
    parts: list[str] = []
    quantize(model, out, recipe, progress=lambda done: parts.append(done.part))
    assert [*filter(None, parts)] == ["block 1", "head"]
    assert file_digests(out) == whole(recipe)
    assert leftovers(out) == {"out"}


# Of plain rounding no block needs what is before it; of GPTQ every one.
@pytest.mark.parametrize(
    ("recipe", "crashed"),
    [
        thorough_case(PLAIN, "outer"),
        thorough_case(GPTQ, "outer"),
        (PLAIN, "block 1"),
        (GPTQ, "block 0"),
    ],
)
def test_a_shared_run_keeps_the_work_of_one_process(
    model: Path, out: Path, whole: Callable[[Recipe], dict[str, str]], recipe: Recipe, crashed: str
) -> None:
    order = ["outer", "block 0", "block 1", "head"]
    with pytest.raises(StopError):
        quantize(model, out, recipe, progress=crash_after(crashed))
    done: list[str] = []
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        written = Worker._write_unit
        patch.setattr(
            Worker,
            "_write_unit",
            lambda *arguments: done.append(arguments[2].name) or written(*arguments),
        )
        with pytest.raises(StopError):  # and on the way there the shared run crashes, too
            join(model, out, recipe, progress=crash_after(order[order.index(crashed) + 1]))
        join(model, out, recipe, note=notes.append)
    assert sorted(done) == sorted(order[order.index(crashed) + 1 :])
    kept = order.index(crashed) + 1
    assert notes[0] == f"{kept} of 4 parts are kept, which one process had finished"
    assert file_digests(out) == whole(recipe)
    assert leftovers(out) == {"out"}


def test_a_shared_run_redoes_experts_of_an_unfinished_block(
    tiny: Tiny, out: Path, tmp_path: Path
) -> None:
    model = tiny("mixtral")
    quantize(model, tmp_path / "m", GPTQ)
    with pytest.raises(StopError):
        quantize(model, out, GPTQ, progress=crash_after("block 1 expert 1"))
    notes: list[str] = []
    join(model, out, GPTQ, note=notes.append)
    assert notes[0].startswith("2 of 5 parts")
    assert file_digests(out) == file_digests(tmp_path / "m")


def test_foreign_files_in_the_units_directory_are_kept(model: Path, out: Path) -> None:
    units = out.parent / UNITS
    units.mkdir(parents=True)
    (units / "mine").write_text("kept")
    (units.parent / "lock").touch()
    with pytest.raises(RefusedError, match="is no directory of a shared run") as refused:
        join(model, out)
    assert (units / "mine").read_text() == "kept"
    typed = refused.value.hint.partition(": ")[2].replace("ELSEWHERE", str(out.with_name("m")))
    subprocess.run(typed.split(), check=True)
    join(model, out)
    assert leftovers(out) == {"out"}


def test_units_of_another_run_are_refused_with_a_usable_hint(
    model: Path, out: Path, reference: dict[str, str]
) -> None:
    """Other processes may work on the run, so that the hint does not suggest to overwrite."""
    other = out.with_name("other")
    for output, recipe in ((out, PLAIN), (other, fast_recipe(scales="absmax", bits=8))):
        with pytest.raises(StopError):
            join(model, output, recipe, progress=crash_after("block 0"))
    shutil.rmtree(out.parent / UNITS)
    shutil.move(out.parent / ".other.qf/units", out.parent / UNITS)
    shutil.rmtree(out.parent / ".other.qf")
    with pytest.raises(IntegrityError, match="differs in: bits: 8 there, 4 here") as refused:
        join(model, out)
    assert "when no process works on it any more" in refused.value.hint
    assert "--overwrite" not in refused.value.hint
    shutil.rmtree(refused.value.hint.partition("rm -r ")[2])
    join(model, out)
    assert file_digests(out) == reference


def test_joining_a_run_with_a_damaged_journal_is_refused(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        quantize(model, out, PLAIN, progress=crash_after("block 0"))
    journal = out.with_name(".out.qf") / "journal/journal.jsonl"
    journal.write_bytes(b"x" + journal.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="is damaged"):
        join(model, out)


def test_joining_a_finished_run_accepts_its_result(
    model: Path, out: Path, reference: dict[str, str]
) -> None:
    """A late process finds the result; another recipe is refused."""
    join(model, out)
    join(model, out)
    assert file_digests(out) == reference
    with pytest.raises(Exception, match="exists"):
        join(model, out, fast_recipe(scales="absmax", bits=8))
    assert leftovers(out) == {"out"}


def test_joining_with_another_recipe_is_refused(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        join(model, out, progress=crash_after("outer"))
    for shared in (True, False):
        with pytest.raises(IntegrityError, match="differs in: bits: "):
            quantize(model, out, fast_recipe(scales="absmax", bits=8), join=shared)
    join(model, out)


def test_an_overwrite_ends_a_shared_run_of_another_recipe(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        join(model, out, progress=crash_after("outer"))
    quantize(model, out, fast_recipe(scales="absmax", bits=8), overwrite=True)
    assert leftovers(out) == {"out"}


def test_joining_with_another_recipe_keeps_an_interrupted_run(
    model: Path, out: Path, calibrated: dict[str, str]
) -> None:
    with pytest.raises(StopError):
        quantize(model, out, GPTQ, progress=crash_after("block 0"))
    with pytest.raises(IntegrityError, match="differs in: bits: ") as refused:
        join(model, out, fast_recipe("gptq", bits=3))
    assert refused.value.hint.endswith(f"rm -r {out.with_name('.out.qf')}")
    join(model, out, GPTQ)
    assert file_digests(out) == calibrated


def test_the_hint_about_another_recipe_works(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        join(model, out, GPTQ, progress=crash_after("block 0"))
    with pytest.raises(IntegrityError, match="differs in: calibration; ") as refused:
        join(model, out, PLAIN)
    shutil.rmtree(refused.value.hint.partition("rm -r ")[2])
    join(model, out, PLAIN)
    assert leftovers(out) == {"out"}


def test_a_changed_byte_of_a_finished_unit_is_detected(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        join(model, out, progress=crash_after("block 0"))
    file = next((out.parent / UNITS).glob("*/0001.*.done/*.data"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="block 0 is not what") as refused:
        join(model, out)
    assert refused.value.hint == f"start afresh: rm -r {out.parent / UNITS}"
    assert not out.exists()


def test_a_nan_weight_ends_a_shared_run_without_leftovers(model: Path, out: Path) -> None:
    source = copy_model(model, out.parent / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight. holds nan"):
        join(source, out)
    assert leftovers(out) == set()


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        (fast_recipe("gptq", guided_hessians=1), {}, "--guided-hessians"),
        (PLAIN, {"overwrite": True}, "--overwrite"),
    ],
)
def test_join_refuses_guided_hessians_and_overwrite(
    model: Path, out: Path, recipe: Recipe, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        join(model, out, recipe, **changes)
    assert leftovers(out) == set()


def test_a_calibrated_run_is_shared_only_under_torchrun(model: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="one after the other") as refused:
        quantize(model, out, GPTQ, join=True)
    assert "torchrun" in refused.value.hint
    assert leftovers(out) == set()


def test_joining_an_unshared_run_is_refused_as_busy(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_run, "LOCK_TIMEOUT_SECONDS", 0.2)
    with Stage(out, overwrite=False), pytest.raises(BusyError, match=f"process {os.getpid()} "):
        join(model, out)


def test_join_option_on_the_command_line(
    model: Path, out: Path, reference: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("quantize", model, "--scales", "absmax", "--bits", "4", "--join", "-o", out)
    assert run_command(capsys, *arguments).code == 0
    assert file_digests(out).keys() == reference.keys()
    again = run_command(capsys, *arguments)
    assert again.code == 0, again.err
    assert "resumed" not in again.err
    refused = run_command(capsys, *arguments[:-1], out.with_name("m2"), "--overwrite")
    assert refused.code == 2
    assert "write to a new directory" in refused.err


@pytest.mark.parametrize(
    ("name", "damage"), [("model.safetensors", "cut"), ("config.json", "removed")]
)
def test_joining_with_a_damaged_result_is_refused(
    model: Path, tmp_path: Path, name: str, damage: str
) -> None:
    out = tmp_path / "out"
    join(model, out)
    join(model, out)  # whole: it is there already
    if damage == "removed":
        (out / name).unlink()
    else:
        os.truncate(out / name, 10)
    with pytest.raises(RefusedError, match="out"):
        join(model, out)


def test_joining_refuses_a_result_without_the_requested_provenance(
    model: Path, tmp_path: Path
) -> None:
    join(model, tmp_path / "out")
    with pytest.raises(RefusedError, match="out"):
        join(model, tmp_path / "out", provenance=True)
    join(model, tmp_path / "other", provenance=True)
    join(model, tmp_path / "other", provenance=True)
    assert (tmp_path / "other/provenance.intoto.json").exists()


def test_a_block_with_unwritable_states_is_not_finished(
    model: Path, out: Path, calibrated: dict[str, str]
) -> None:
    def full(path: Path, *arguments: Any, **named: Any) -> None:
        if path.name == "1.4":  # behind block 0, the last rows
            raise ResourceError("no space", "free some")
        save(path, *arguments, **named)

    save = shared_run.save_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_run, "save_file", full)
        with pytest.raises(ResourceError, match="no space"):
            join(model, out, GPTQ)
    done = sorted(path.name[:4] for path in (out.parent / UNITS).glob("*/*.done"))
    assert done == ["0000"]  # what is outside of the blocks
    assert held_units(out) == []
    join(model, out, GPTQ)
    assert file_digests(out) == calibrated
