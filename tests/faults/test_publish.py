"""Publishing a result: stages, locks, refusals, copies, and the order of syncs and renames."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge.errors import (
    BusyError,
    InputError,
    IntegrityError,
    QuantForgeError,
    RefusedError,
    UsageError,
)
from quantforge.files.disk import DISK
from quantforge.files.previous_output import MANIFEST
from quantforge.files.stage import Stage
from tests.releases import NO_FSYNC_DISK, make, read_release, sibling_names, stage_release

# --- publishing -----------------------------------------------------------------------------------


def test_an_output_appears_only_when_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Stage(out, overwrite=False) as stage:
        stage_release(stage, "new")
        assert not out.exists()
        stage.publish()
        assert len(read_release(out)) == 5
    assert sibling_names(out) == set()


def test_overwrite_removes_all_files_of_the_old_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")
    make(out, "new")
    assert read_release(out)["config.json"] == b"new"
    assert len(read_release(out)) == 5
    assert sibling_names(out) == set()


def test_a_stage_outlives_an_error_and_can_be_discarded(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupted() -> None:
        with Stage(out, overwrite=False) as stage:
            stage.write_file("journal", b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with Stage(out, overwrite=False) as stage:
        assert not stage.empty
        assert read_release(stage.path) == {"journal": b"1"}
        stage.clear()
        assert stage.empty
        stage.discard()
        stage.discard()
    with Stage(out, overwrite=False) as stage:
        assert stage.empty
    assert sibling_names(out) == set()


def test_stale_stage_files_do_not_reach_the_output(tmp_path: Path) -> None:
    make(tmp_path / "expected", "new", NO_FSYNC_DISK)
    with Stage(tmp_path / "out", overwrite=False) as stage:
        for name in read_release(tmp_path / "expected"):
            (stage.path / name).parent.mkdir(exist_ok=True)
            (stage.path / name).write_bytes(b"?" * 5000)
            if not name.endswith((".safetensors", MANIFEST)):
                (stage.path / f"{name}.part").write_bytes(b"?" * 5000)
        stage_release(stage, "new")
        stage.publish()
    assert read_release(tmp_path / "out") == read_release(tmp_path / "expected")


def test_files_are_synced_before_the_output_is_renamed(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path))

    disk = replace(
        DISK,
        fsync=lambda d: (log.append(("sync", path_of(d))), os.fsync(d))[1],
        rename=lambda a, b: (log.append(("rename", str(b.relative_to(tmp_path)))), a.rename(b))[1],
    )
    make(tmp_path / "out", "new", disk)
    stage = ".out.qf/stage"
    published = log.index(("rename", "out"))
    assert log[published + 1] == ("sync", ".")
    for name in read_release(tmp_path / "out"):
        synced = name if name.endswith(".safetensors") else f"{name}.part"
        assert log.index(("sync", f"{stage}/{synced}")) < published
    for folder in (stage, f"{stage}/additional_chat_templates"):
        last_rename = max(
            n for n, (call, name) in enumerate(log) if call == "rename" and folder in name
        )
        assert ("sync", folder) in log[last_rename:published]


def test_the_lock_records_the_publication_before_the_swap(tmp_path: Path) -> None:
    """After a power failure the lock distinguishes the replaced result in the stage from work to resume."""
    out, lock = tmp_path / "out", tmp_path / ".out.qf/lock"
    make(out, "old", NO_FSYNC_DISK)
    durable = {"lock": b"", "swaps": 0}

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), lock.stat()):
            durable["lock"] = lock.read_bytes()

    def exchange(first: Path, second: Path) -> None:
        if second == out:
            durable["swaps"] += 1
            assert json.loads(durable["lock"])["publishing"] == first.stat().st_ino
        DISK.exchange(first, second)

    make(out, "new", replace(DISK, fsync=fsync, exchange=exchange))
    assert durable["swaps"] == 1
    assert read_release(out)["config.json"] == b"new"


# --- refusals -------------------------------------------------------------------------------------


def refusal_text(
    out: Path, overwrite: bool, kind: type[QuantForgeError], source: Path | None
) -> str:
    before = read_release(out) if out.is_dir() else None
    with pytest.raises(kind) as caught, Stage(out, overwrite, source):
        pass
    assert before is None or read_release(out) == before
    assert caught.value.hint
    return f"{caught.value.message} | {caught.value.hint}"


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert "--overwrite" in refusal_text(out, False, RefusedError, None)
    with Stage(out, overwrite=True) as stage:  # an empty directory may be replaced
        stage_release(stage, "old")
        stage.publish()
    assert "--overwrite" in refusal_text(out, False, RefusedError, None)
    (out / MANIFEST).unlink()
    assert "is not a result of quantforge" in refusal_text(out, True, RefusedError, None)
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("out")
    for overwrite in (False, True):
        assert "is a file" in refusal_text(file, overwrite, RefusedError, None)
        assert "is a link" in refusal_text(link, overwrite, RefusedError, None)
    assert not [name for name in sibling_names(out) if name.endswith("stage")]


@pytest.mark.parametrize("location", ["model", "model/out", "model/a/../out", ".", "link"])
def test_an_output_that_overlaps_the_model_is_refused(tmp_path: Path, location: str) -> None:
    model = tmp_path / "work/model"
    (model / "a").mkdir(parents=True)
    (model / MANIFEST).touch()
    (tmp_path / "work/link").symlink_to("model")
    out = tmp_path / "work" / location
    message = refusal_text(out, True, UsageError, model)
    assert "overlaps the model" in message
    with Stage(tmp_path / "work/model2", True, model):
        pass


def test_an_output_without_a_valid_location_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "mkdir -p" in refusal_text(tmp_path / "a/b", False, InputError, None)
    assert "no name" in refusal_text(Path(), False, UsageError, None)
    (tmp_path / "inner").mkdir()
    assert "no name" in refusal_text(tmp_path / "inner" / "..", False, UsageError, None)
    assert "too long" in refusal_text(tmp_path / ("x" * 255), False, InputError, None)
    assert "cannot write here" in refusal_text(Path("/proc/out"), False, InputError, None)
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refusal_text(tmp_path / "loop/out", False, InputError, None)
    assert "is a link" in refusal_text(tmp_path / "loop", False, RefusedError, None)


def test_output_names_with_spaces_work(tmp_path: Path) -> None:
    out = tmp_path / "a b ü"
    make(out, "old")
    make(out, "new")
    assert read_release(out)["config.json"] == b"new"


def test_an_output_created_during_the_run_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Stage(out, overwrite=False) as stage:
        stage_release(stage, "new")
        out.mkdir()
        (out / "precious").touch()
        with pytest.raises(RefusedError, match="exists"):
            stage.publish()
    assert read_release(out) == {"precious": b""}


def test_a_file_system_without_swap_is_refused_before_the_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old")

    def unsupported(first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    disk = replace(DISK, exchange=unsupported)
    with pytest.raises(RefusedError, match="cannot swap") as caught, Stage(out, True, disk=disk):
        pass
    assert "rm -r" in caught.value.hint
    make(tmp_path / "fresh", "new", disk)
    assert read_release(out)["config.json"] == b"old"


@pytest.mark.parametrize("name", ["../x", "/x", "", ".", "a/../../x", "a\\b", "x\0"])
def test_files_stay_inside_of_the_stage(tmp_path: Path, name: str) -> None:
    with Stage(tmp_path / "out", overwrite=False) as stage:
        with pytest.raises(ValueError, match="no place inside"):
            stage.write_file(name, b"x")
        assert read_release(stage.path) == {}


# --- copies ---------------------------------------------------------------------------------------


def test_copies_are_exact_and_follow_no_links_out(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    data = os.urandom(3 * 2**20 + 1)
    (model / "LICENSE").write_bytes(data)
    (model / "LICENSE").chmod(0o444)
    (model / "additional_chat_templates/x.jinja").symlink_to("../LICENSE")
    (tmp_path / "secret").touch()
    (model / "NOTICE").symlink_to("../secret")
    with Stage(tmp_path / "out", overwrite=False) as stage:
        stage.copy_file(model / "LICENSE", "LICENSE")
        relative = "additional_chat_templates/x.jinja"
        stage.copy_file(model / relative, relative, model)
        with pytest.raises(InputError, match="is a link to"):
            stage.copy_file(model / "NOTICE", "NOTICE")
        assert read_release(stage.path) == {"LICENSE": data, relative: data}
        assert not (stage.path / relative).is_symlink()
        assert os.access(stage.path / "LICENSE", os.W_OK)


def test_a_file_that_grows_during_its_copy_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(b"x" * 10)

    def growing(descriptor: int, data: memoryview, offset: int) -> int:
        with source.open("ab") as stream:
            stream.write(b"y")
        return os.pwrite(descriptor, data, offset)

    disk = replace(DISK, pwrite=growing)
    with Stage(tmp_path / "out", overwrite=False, disk=disk) as stage:
        with pytest.raises(IntegrityError, match="changed while it was being read"):
            stage.copy_file(source, "tokenizer.json")
        assert not (stage.path / "tokenizer.json").exists()


# --- one writer -----------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from quantforge.files.stage import Stage
with Stage(Path(sys.argv[1]), overwrite=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):
            with pytest.raises(BusyError) as caught, Stage(out, overwrite=True):
                pass
            assert f"process {holder.pid} on {socket.gethostname()}, started 20" in str(
                caught.value
            )
        with Stage(tmp_path / "other", overwrite=False):
            pass
        holder.kill()
    with Stage(out, overwrite=False):
        pass


def test_a_damaged_lock_file_does_not_block_a_run(tmp_path: Path) -> None:
    lock = tmp_path / ".out.qf/lock"
    for text in ("", '{"pid": 1}', "\0" * 100):  # of a run that was killed while it wrote
        lock.parent.mkdir(exist_ok=True)
        lock.write_text(text)
        busy = pytest.raises(BusyError, match=f"process {os.getpid()}")
        with Stage(tmp_path / "out", overwrite=False), busy:
            Stage(tmp_path / "out", overwrite=False).__enter__()


def test_the_lock_file_records_the_process(tmp_path: Path) -> None:
    with Stage(tmp_path / "out", overwrite=False):
        holder = json.loads((tmp_path / ".out.qf/lock").read_text())
    assert holder["pid"] == os.getpid()
    assert holder["publishing"] == 0
