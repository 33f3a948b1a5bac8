"""A command that takes each shard when it is final: nothing else changes, whatever happens to it or to the run."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shlex
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quantforge import verbs
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.cli.app import main
from quantforge.errors import IntegrityError, RefusedError, ResourceError, UsageError
from quantforge.execution import handover
from quantforge.execution.handover import held_bytes
from quantforge.execution.journal import Workspace
from quantforge.formats.opening import open_model
from quantforge.planning.planner import make_plan
from quantforge.settings import Settings
from quantforge.verbs import output
from tests.conftest import Tiny
from tests.runs import (
    CALIBRATION,
    ROWS,
    StopError,
    command,
    crash_after,
    ended,
    forked,
    moving,
    quantize,
    script,
    swift,
    tree,
)

WANTED = swift("gptq", bits=4, max_shard_bytes=60_000)
STAGE = ".out.qf/stage"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    place = tmp_path / "away"
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the same run without a command."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(tiny("llama-wide"), out, WANTED)
    return tree(out)


def shards(files: dict[str, str]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def test_shards_that_are_moved_away_change_no_byte(model, out, away, whole, capsys):
    quantize(model, out, WANTED, on_shard=moving(away))
    assert len(shards(whole)) > 3
    assert sorted(tree(away)) == shards(whole)
    assert tree(out) | tree(away) == whole
    assert [file for file in tree(out) if file.endswith(".safetensors")] == []
    found = command(capsys, "verify", out, "--no-forward")
    assert found.code == 5
    for name in shards(whole):
        assert f"{name}" in found.out
    assert found.out.count("is listed in the manifest and missing") == len(shards(whole))
    for shard in away.iterdir():
        shard.rename(out / shard.name)
    assert command(capsys, "verify", out, "--no-forward").code == 0


def test_what_is_not_there_is_to_be_put_back_first(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arch").mkdir()
    words = ("quantize", model, "--bits", 8, *ROWS, "--max-shard-bytes", 60000, "-o", "q")
    taker = "mv {} arch/"
    said = command(capsys, *words, "--on-shard", taker).err
    count = len([*(tmp_path / "arch").iterdir()])
    first = (
        f"{count} weight files were handed over to {taker} and are not in q: put them back first"
    )
    assert count > 1
    assert said.index(f"{first}\n") < said.index("next: quantforge eval")
    again = f"{count} weight files are not in q: put them back first (a command of --on-shard moves"
    assert again in command(capsys, "verify", "q").err
    for file in (tmp_path / "arch").iterdir():
        file.rename(tmp_path / "q" / file.name)
    assert "put" not in command(capsys, "verify", "q").err


def test_it_is_called_once_for_each_in_order_when_it_is_complete(model, out, away, whole):
    lines = "assert shard.is_absolute()\n(place / 'order').open('a').write(f'{shard.name} {shard.stat().st_size}\\n')"
    quantize(model, out, WANTED, on_shard=script(away, lines))
    said = [line.split() for line in (away / "order").read_text().splitlines()]
    assert [name for name, _ in said] == shards(whole)
    assert [(out / name).stat().st_size for name, _ in said] == [int(size) for _, size in said]
    assert tree(out) == whole  # what is left where it was is published


def test_a_link_to_where_it_was_moved_is_none_of_the_result(model, out, away, whole):
    lines = (
        "import shutil\nshutil.move(shard, place)\nshard.symlink_to(place.resolve() / shard.name)\n"
    )
    quantize(model, out, WANTED, on_shard=script(away, lines))
    assert tree(out) | {name: tree(away)[name] for name in shards(whole)} == whole
    assert not [path for path in out.iterdir() if path.is_symlink()]


def test_what_it_leaves_beside_a_shard_is_not_published(model, out, tmp_path, whole):
    settings = {"on_shard": "cp {} {}.copy"}
    with pytest.raises(RefusedError, match=r"\.copy: is no file of the result") as raised:
        quantize(model, out, WANTED, **settings)
    assert f"mv {out.parent / STAGE}" in raised.value.hint
    (out.parent / STAGE / "mine.txt").write_text("of somebody")
    for name in ["mine.txt", *(f"{name}.copy" for name in shards(whole))]:
        with pytest.raises(RefusedError, match=name):
            quantize(model, out, WANTED)
        (out.parent / STAGE / name).rename(tmp_path / name)
    assert quantize(model, out, WANTED).resumed
    assert tree(out) == whole


def test_what_it_says_does_not_come_on_stdout(model, out, capfd):
    quantize(model, out, WANTED, on_shard="echo took")
    said = capfd.readouterr()
    assert "took" not in said.out
    assert f"took {out.parent / STAGE / 'model-00001-of-'}" in said.err


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_files_that_are_not_begun_take_no_room(model, out, away, method, monkeypatch):
    wanted = replace(WANTED, method=method)
    most, allocate = [0], Workspace.commit

    def watched(self, *arguments):
        held = sum(file.stat().st_size for file in (out.parent / STAGE).glob("*.safetensors"))
        most[0] = max(most[0], held)
        allocate(self, *arguments)

    monkeypatch.setattr(Workspace, "commit", watched)
    quantize(model, out, wanted, on_shard=moving(away))
    planned = make_plan(wanted, open_model(model))
    forecast = held_bytes(planned.plan, [file.size for file in planned.files])
    assert most[0] == forecast < planned.plan.output_bytes
    settings = Settings(on_shard="true")
    checkpoint = open_model(model)
    saved = output.space(checkpoint, planned, Settings()) - output.space(
        checkpoint, planned, settings
    )
    assert saved == planned.plan.output_bytes - forecast


def test_a_command_that_fails_stops_the_run_and_the_same_goes_on(model, out, away, whole, capsys):
    lines = "sys.exit(3 if '00003' in shard.name and not (place / 'mended').exists() else 0)"
    words = (
        "quantize",
        model,
        "--method",
        "gptq",
        "--bits",
        4,
        "--max-shard-bytes",
        60_000,
        *ROWS,
        "-o",
        out,
    )
    taker = script(away, lines)
    failed = command(capsys, *words, "--on-shard", taker)
    assert failed.code == 7
    assert "model-00003-of-" in failed.err
    assert "ended with 3" in failed.err
    assert "goes on with this shard" in failed.err
    assert not out.exists()
    (away / "mended").touch()
    parts: list[str] = []
    verbs.quantize(
        model, None, out,
        Settings(on_shard=taker, progress=lambda done: parts.append(done.part)),
        method="gptq", bits=4, max_shard_bytes=60_000, samples=6, length=24,
    )  # fmt: skip
    again = command(capsys, *words[:-1], out.with_name("plain"))
    assert again.code == 0
    assert tree(out) == tree(out.with_name("plain"))
    assert "outer" not in parts


def test_one_that_cannot_be_started_is_refused_before_the_work(model, out):
    for wrong in ("no-such-program-here {}", "", "'"):
        with pytest.raises(UsageError, match="--on-shard"):
            quantize(model, out, WANTED, on_shard=wrong)
    assert not out.parent.joinpath(".out.qf").exists()


def test_no_level_of_effort_tunes_what_is_handed_on(model):
    rows = replace(CALIBRATION, samples=128)
    for level in ("medium", "high"):
        wanted = replace(WANTED, effort=level, calibration=rows)
        assert verbs.plan(str(model), wanted).tune
        plan = verbs.plan(str(model), wanted, Settings(on_shard="true"))
        assert plan.tune == 0
        assert "not tuned: --on-shard hands on files as soon as they are rounded" in plan.notes


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"format": "gguf", "type": "Q4_0", "bits": None}, {}),
        ({"calibration": replace(CALIBRATION, propagate="quantized")}, {}),
        ({"tune": 1, "format": "gptq"}, {}),
        ({}, {"join": True}),
        ({}, {"overwrite": True}),
    ],
)
def test_what_cannot_work_is_refused(model, out, changes, settings):
    place = out.with_suffix(".gguf") if changes.get("format") == "gguf" else out
    with pytest.raises(UsageError, match="--on-shard, and ") as refused:
        quantize(model, place, replace(WANTED, **changes), on_shard="true", **settings)
    assert (refused.value.hint == "--tune 0") == ("tune" in changes)


def test_a_shard_that_the_command_changes_is_found(model, out, away):
    lines = "shard.write_bytes(shard.read_bytes()[:-1] + b'!')"
    with pytest.raises(IntegrityError, match="was changed by the command"):
        quantize(model, out, WANTED, on_shard=script(away, lines))
    assert not out.exists()


def test_killed_between_a_shard_and_the_end_of_its_command_it_is_called_again(
    model, out, away, whole
):
    """The command kills the run, once before and once after it has moved the shard."""
    for moment, moves in (("00002", False), ("00003", True)):
        lines = f"first = {moment!r} in shard.name and not (place / {moment!r}).exists()\n"
        lines += f"if {moves} or not first: shutil.move(shard, place / shard.name)\n"
        lines += f"if first: (place / {moment!r}).touch(); os.kill(os.getppid(), signal.SIGKILL)\n"
        taker = script(away, lines)
        child = forked(
            lambda taker=taker: quantize(model, out, WANTED, on_shard=taker), out.parent / "e"
        )
        assert ended(child) == -signal.SIGKILL, (out.parent / "e").read_text()
        deadline = time.monotonic() + 120
        while not (away / moment).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not out.exists()
    quantize(model, out, WANTED, on_shard=moving(away))
    taken = {name: digest for name, digest in tree(away).items() if name in whole}
    assert sorted(taken) == shards(whole)
    assert tree(out) | taken == whole


def test_killed_at_any_moment_it_ends_with_the_same_bytes(model, out, away, whole):
    errors, moments, kills = out.parent / "errors", random.Random(5), 0
    work = partial(quantize, model, out, WANTED, on_shard=moving(away))
    start = time.monotonic()
    quantize(model, out.with_name("timed"), WANTED)
    seconds = time.monotonic() - start
    while not out.exists():
        child = forked(work, errors)
        if kills < 8:
            time.sleep(seconds * moments.random())
            os.kill(child, signal.SIGKILL)
        code = ended(child)
        assert code in {0, -signal.SIGKILL}, errors.read_text()
        kills += 1
    assert tree(out) | tree(away) == whole


def test_after_a_kill_behind_the_publication_the_result_is_there(
    model, out, away, whole, monkeypatch
):
    def stop(self: object) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "remove", stop)
        with pytest.raises(StopError):
            quantize(model, out, WANTED, on_shard=moving(away))
    assert out.exists()
    quantize(model, out, WANTED, on_shard=moving(away))
    assert tree(out) | tree(away) == whole
    assert not out.parent.joinpath(".out.qf").exists()


def test_after_a_kill_before_the_publication_nothing_is_quantized_again(
    model, out, away, whole, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "publish", lambda self: (_ for _ in ()).throw(StopError))
        with pytest.raises(StopError):
            quantize(model, out, WANTED, on_shard=moving(away))
    for file in (out.parent / STAGE).iterdir():  # a model without any file beside its weights
        file.unlink()
    parts: list[str] = []
    quantize(
        model, out, WANTED, on_shard=moving(away), progress=lambda done: parts.append(done.part)
    )
    assert not any(parts)
    assert tree(out) | tree(away) == whole


def test_with_or_without_the_command_a_run_goes_on(model, out, away, whole):
    with pytest.raises(StopError):
        quantize(model, out, WANTED, progress=crash_after("outer"))
    with pytest.raises(StopError):
        quantize(model, out, WANTED, on_shard=moving(away), progress=crash_after("block 0"))
    assert quantize(model, out, WANTED).resumed
    assert 0 < len(tree(away)) < len(shards(whole))
    assert tree(out) | tree(away) == whole


def test_experts_go_with_their_shards(tiny: Tiny, out, away):
    model = tiny("mixtral")
    quantize(model, out.with_name("whole"), WANTED)
    with pytest.raises(StopError):
        quantize(
            model, out, WANTED, on_shard=moving(away), progress=crash_after("block 1 expert 1")
        )
    assert tree(away)
    quantize(model, out, WANTED, on_shard=moving(away))
    assert tree(out) | tree(away) == tree(out.with_name("whole"))


def test_a_damaged_record_is_named(model, out, away):
    with pytest.raises(StopError):
        quantize(model, out, WANTED, on_shard=moving(away), progress=crash_after("block 1"))
    record = out.parent / ".out.qf/journal" / handover.RECORD
    for wrong in (b"{", b'{"model-00001-of-00006.safetensors": 1}'):
        record.write_bytes(wrong)
        with pytest.raises(IntegrityError, match="journal of the interrupted run is damaged"):
            quantize(model, out, WANTED, on_shard=moving(away))


def test_a_signal_ends_the_command_too(model, out, away, whole):
    lines = "import time\n(place / 'begun').touch(); time.sleep(200); (place / 'late').touch()"
    words = ["quantize", model, "--method", "gptq", "--bits", 4, "--max-shard-bytes", 60_000, *ROWS]

    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = ["quantforge", *map(str, (*words, "-o", out, "--on-shard", script(away, lines)))]
        main()

    child = forked(run, out.parent / "errors")
    deadline = time.monotonic() + 120
    while not (away / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    start = time.monotonic()
    os.kill(child, signal.SIGTERM)
    assert ended(child) == 143, (out.parent / "errors").read_text()
    assert time.monotonic() - start < 60
    assert "same command" in (out.parent / "errors").read_text()
    assert not out.exists()


def test_a_disk_that_fills_up_meanwhile_stops_the_run_and_it_goes_on(
    model, out, away, whole, monkeypatch
):
    allocate, calls = WeightsWriter._allocate_one, itertools.count()

    def full(self, *arguments):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "_allocate_one", full)
        with pytest.raises(ResourceError, match="No space left"):
            quantize(model, out, WANTED, on_shard=moving(away))
    assert not out.exists()
    quantize(model, out, WANTED, on_shard=moving(away))
    assert tree(out) | tree(away) == whole


def test_the_files_of_a_sweep_are_not_handed_over(model, tmp_path):
    settings = Settings(on_shard="true")
    with pytest.raises(UsageError, match="all results are measured"):
        verbs.sweep(str(model), {"bits": [4, 8]}, tmp_path / "s", settings=settings)
    assert not (tmp_path / "s").exists()


def test_the_name_of_the_result_can_be_asked_for(model, out, away, whole):
    (away / "out").mkdir()
    quantize(model, out, WANTED, on_shard=f"mv {{}} {shlex.quote(str(away))}/{{name}}/")
    assert tree(out) | tree(away / "out") == whole
