"""Disk operations, files of an earlier result, and publication of new files one by one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantforge.api.demo import demo as copy_demo
from quantforge.errors import (
    BusyError,
    InputError,
    QuantForgeError,
    RefusedError,
    ResourceError,
)
from quantforge.files import disk
from quantforge.files.disk import (
    DISK,
    append_to_file,
    create_file,
    free_bytes,
    no_space_error,
    save_file,
)
from quantforge.files.output_names import MANIFEST_SUFFIX, final_name, side_path
from quantforge.files.previous_output import (
    DIRECTORY_SIGNATURE,
    MANIFEST,
    check_replaceable,
    file_size,
    read_previous_output,
)
from quantforge.files.stage import FileStage, Stage
from tests.releases import NO_FSYNC_DISK, make, manifest_of, stage_release

# ---- calls


def test_exchange_swaps_two_paths_or_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    DISK.exchange(Path("a"), Path("b"))
    assert (tmp_path / "a/b").exists()
    assert (tmp_path / "b/a").exists()
    with pytest.raises(FileNotFoundError):
        DISK.exchange(tmp_path / "a", tmp_path / "c")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        DISK.exchange(tmp_path / "a", tmp_path / "b")


def test_a_write_without_progress_raises_no_space(tmp_path: Path) -> None:
    counts = iter([2, 1, 0])
    short = replace(DISK, pwrite=lambda *_: next(counts))
    with (tmp_path / "a").open("wb") as file, pytest.raises(OSError, match="space") as raised:
        short.write_at(file.fileno(), memoryview(b"four"), 0)
    assert raised.value.errno == errno.ENOSPC
    assert next(counts, None) is None


def test_syncing_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    DISK.sync(tmp_path)
    with pytest.raises(OSError, match="symbolic"):
        DISK.sync(tmp_path / "link")


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(create_file(tmp_path / "a"))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666


def test_appending_keeps_content_and_refuses_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    append_to_file(log, b"one")
    append_to_file(log, b"two")
    assert log.read_bytes() == b"onetwo"
    (tmp_path / "link").symlink_to(log)
    with pytest.raises(ResourceError):
        append_to_file(tmp_path / "link", b"three")
    monkeypatch.setattr(os, "write", lambda *_: 1)
    with pytest.raises(ResourceError, match="No space"):
        append_to_file(log, b"three")


def test_saved_files_are_synced_before_the_rename(tmp_path: Path) -> None:
    target, calls = tmp_path / "report", []

    def fsync(_descriptor: int) -> None:
        calls.append("sync")
        assert not target.exists()

    save_file(target, b"whole", disk=replace(DISK, fsync=fsync))
    assert (target.read_bytes(), calls) == (b"whole", ["sync"])

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match="No space"):
        save_file(target, b"other", overwrite=True, disk=replace(DISK, fsync=full))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report": b"whole"}


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EDQUOT]
)
def test_permission_errors_are_not_reported_as_a_full_disk(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(QuantForgeError) as raised:
        save_file(tmp_path / "report", b"x", disk=replace(DISK, rename=refuse))
    may_not = number in {errno.EACCES, errno.EPERM, errno.EROFS}
    assert raised.value.exit_code == (3 if may_not else 7)
    assert ("cannot be written" in raised.value.message) == may_not
    assert ("free space" in raised.value.hint) == (number == errno.EDQUOT)
    assert os.strerror(number) in raised.value.message
    monkeypatch.setattr(sys.modules[copy_demo.__module__], "make_directory", refuse)
    with pytest.raises(type(raised.value), match=os.strerror(number)):
        copy_demo(tmp_path / "demo")
    assert [*tmp_path.iterdir()] == []


def test_write_permission_is_checked_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    for output in (file, tmp_path / "new"):
        with pytest.raises(InputError, match=f"no permission to write to {tmp_path}"):
            disk.check_new_file(output, "--report", overwrite=True)
    disk.check_new_file(file, overwrite=True, appends=True)
    with pytest.raises(InputError, match="cannot be written"):
        disk.check_new_file(tmp_path / "new", "--log", appends=True)


def test_unwritable_output_paths_are_refused_before_the_work(tmp_path: Path) -> None:
    disk.check_new_file(tmp_path / "new")
    with pytest.raises(InputError, match="no directory") as missing:
        disk.check_new_file(tmp_path / "a/b", "--report")
    assert "mkdir -p" in missing.value.hint
    assert missing.value.message.startswith("--report ")
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "file").touch()
    for overwrite in (False, True):
        with pytest.raises(RefusedError, match="is a link"):
            disk.check_new_file(tmp_path / "link", overwrite=overwrite)
        with pytest.raises(RefusedError, match="is no file"):
            disk.check_new_file(tmp_path, overwrite=overwrite)
    with pytest.raises(RefusedError, match="exists"):
        disk.check_new_file(tmp_path / "file")
    disk.check_new_file(tmp_path / "file", overwrite=True)
    with pytest.raises(InputError, match="too long"):
        disk.check_new_file(tmp_path / ("x" * 300))


def test_free_bytes_equal_the_free_space_of_the_file_system(tmp_path: Path) -> None:
    expected = shutil.disk_usage(tmp_path).free
    for path in (tmp_path, tmp_path / "a/b/c"):
        assert abs(free_bytes(path) - expected) < expected / 10
    assert free_bytes(Path("/proc/self")) == 0
    for path in (tmp_path, tmp_path / "file"):
        assert f" in {tmp_path} (" in no_space_error(path, 5, "full").hint


# ---- earlier results


def write_manifest(root: Path, *names: str, **more: object) -> None:
    outputs = {name: {"bytes": 0} for name in names}
    document = {"schema": "quantforge.manifest/2", "outputs": outputs, **more}
    (root / MANIFEST).write_text(json.dumps(document))


def previous_files(root: Path) -> set[str]:
    return set(read_previous_output(root, is_own_name=lambda name: name != "other").files)


EIGHT = "/".join("abcdefgh")


@pytest.mark.parametrize("name", ["a", "a/b", ".a", "a..b", EIGHT, "ü\n"])
def test_manifest_names_inside_the_result_are_accepted(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, name)
    assert previous_files(tmp_path) == {name, MANIFEST}


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/a", "/", "a/", "./a", "a//b", "a/./b", "a/../b", "../a", "a\0", f"{EIGHT}/i",
     "other", MANIFEST, DIRECTORY_SIGNATURE],
)  # fmt: skip
def test_manifest_names_outside_the_result_are_refused(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, "a", name)
    with pytest.raises(RefusedError, match="no file of this result"):
        previous_files(tmp_path)


def test_a_signature_is_own_only_with_the_manifest_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantforge.files.previous_output.signed_files", lambda _, data: json.loads(data)
    )
    write_manifest(tmp_path, "a")
    digest = hashlib.sha256((tmp_path / MANIFEST).read_bytes()).hexdigest()
    for signed_digests, own in (
        ({MANIFEST: digest}, True),
        ({MANIFEST: "0" * 64}, False),
        ({}, False),
    ):
        (tmp_path / DIRECTORY_SIGNATURE).write_text(json.dumps(signed_digests))
        assert (DIRECTORY_SIGNATURE in previous_files(tmp_path)) == own


def test_overwriting_is_refused_without_a_valid_manifest(tmp_path: Path) -> None:
    manifest_path = tmp_path / MANIFEST
    write_manifest(tmp_path, "a")
    good = manifest_path.read_text()
    (tmp_path / "copy").write_text(good)
    manifest_path.unlink()
    for make_it in (
        lambda: None,
        manifest_path.mkdir,
        lambda: manifest_path.symlink_to("copy"),
        lambda: os.mkfifo(manifest_path),
    ):
        make_it()
        with pytest.raises(RefusedError, match=f"{MANIFEST}: no regular file"):
            previous_files(tmp_path)
        if manifest_path.is_dir():
            manifest_path.rmdir()
        manifest_path.unlink(missing_ok=True)
    for changes in ({"schema": "other/1"}, {"schema": None}, {"outputs": None}, {"outputs": []}):
        write_manifest(tmp_path, "a", **changes)
        with pytest.raises(RefusedError, match="no manifest that lists"):
            previous_files(tmp_path)
    for entry in (None, {}, {"bytes": "0"}, {"bytes": True}, 7):
        write_manifest(tmp_path, outputs={"a": entry})
        with pytest.raises(RefusedError, match="states no size"):
            previous_files(tmp_path)


def test_file_size_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a/b/file")
    (tmp_path / "folder").symlink_to("a")
    sizes = {
        "a/b/file": 3, "a/b/none": None, "a/none/file": None, "a/b/file/x": -1, "a": -1, "a/b": -1, "link": -1,
        "folder/b/file": -1, "x" * 300: -1,
    }  # fmt: skip
    assert {name: file_size(tmp_path, name) for name in sizes} == sizes


def test_only_files_listed_in_the_manifest_are_removed(tmp_path: Path) -> None:
    names = ("a/b/one", "a/two", "z/three")
    for name in (*names, "z/mine"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    write_manifest(tmp_path, *names)
    read_previous_output(tmp_path).remove()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"z/mine"}


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_foreign_files_in_the_output_are_named(tmp_path: Path, count: int) -> None:
    make(tmp_path / "out", "old", NO_FSYNC_DISK)
    names = [f"note{number}" for number in range(count)]
    for name in names:
        (tmp_path / "out" / name).touch()
    with pytest.raises(RefusedError) as refused, Stage(tmp_path / "out", overwrite=True):
        pass
    message = refused.value.message
    assert message.startswith(f"{tmp_path}/out/note0: ")
    assert [name for name in names if name in message] == names[:5]
    assert (" ..." in message) == (count > 5)
    assert ("(and" in message) == (count > 1)


# ---- stages


def test_free_space_is_checked_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage(tmp_path / "out", overwrite=False) as stage:
        monkeypatch.setattr("quantforge.files.stage.free_bytes", lambda _: 1000)
        stage.check_space(1000)
        with pytest.raises(ResourceError, match="1001 bytes needed"):
            stage.check_space(1001)


def test_a_new_output_needs_no_exchange(tmp_path: Path) -> None:
    def unsupported(_first: Path, _second: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with Stage(tmp_path / "out", True, disk=replace(NO_FSYNC_DISK, exchange=unsupported)) as stage:
        stage_release(stage, "new", NO_FSYNC_DISK)
        stage.publish()
    assert (tmp_path / "out/config.json").read_text() == "new"


def test_a_journal_is_removed_only_with_its_stage(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "out", overwrite=False)
    with stage:
        stage.journal.mkdir()
    stage.path.mkdir()
    stage.remove_leftovers()
    assert stage.journal.is_dir()
    stage.path.rmdir()
    stage.remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_kill_after_the_exchange_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock distinguishes the replaced result in the stage directory from work to resume."""

    def killed(_stage: Stage) -> None:
        raise KeyboardInterrupt

    make(tmp_path / "out", "old", NO_FSYNC_DISK)
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "_remove_replaced", killed)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "out", "new", NO_FSYNC_DISK)
    assert (tmp_path / ".out.qf/stage/config.json").read_text() == "old"
    with Stage(tmp_path / "out", overwrite=True) as stage:
        assert stage.empty
    assert (tmp_path / "out/config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_held_empty_lock_is_reported_as_busy(tmp_path: Path) -> None:
    """The holder has truncated the lock file and not yet written its identity."""
    lock_directory = tmp_path / ".out.qf"
    lock_directory.mkdir()
    with (lock_directory / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match=r"process 0 on \?, started \?"):
            Stage(tmp_path / "out", overwrite=False).__enter__()
    for number in ("1", None, 1.5, True):
        (lock_directory / "lock").write_text(json.dumps({"publishing": number}))
        with pytest.raises(RefusedError, match="no lock"):
            Stage(tmp_path / "out", overwrite=False).__enter__()


# ---- files


def test_file_names_follow_the_output_name() -> None:
    part = "model-00002-of-00003.gguf"
    assert final_name(Path("x/m.gguf"), "model.gguf") == "m.gguf"
    assert final_name(Path("x/m.gguf"), part) == "m-00002-of-00003.gguf"
    assert final_name(Path("x/m"), part) == "m-00002-of-00003"
    assert side_path(Path("x/m.gguf")) == Path(f"x/m.gguf{MANIFEST_SUFFIX}")
    assert side_path(Path("x/m-00002-of-00003.gguf")) == Path(f"x/m.gguf{MANIFEST_SUFFIX}")
    assert side_path(Path("x/m-00002-of-00003"), ".sig") == Path("x/m.sig")


def test_files_are_renamed_in_reverse_order_of_opening(tmp_path: Path) -> None:
    """Side files first, then the weights (of several, the first one last), then the manifest."""
    for names in (("m.gguf",), tuple(f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3))):
        named = []
        directory = tmp_path / str(len(names))
        directory.mkdir()

        def rename(
            source: Path, target: Path, directory: Path = directory, named: list[str] = named
        ) -> None:
            source.rename(target)
            if target.parent == directory:
                named.append(target.name)

        with FileStage(
            directory / "m.gguf", False, disk=replace(NO_FSYNC_DISK, rename=rename)
        ) as stage:
            for name in (*names, "m.Modelfile"):
                stage.write_file(name, b"new")
            stage.write_file(stage.manifest, manifest_of(stage, "new"))
            stage.publish()
        assert named == ["m.Modelfile", *reversed(names), f"m.gguf{MANIFEST_SUFFIX}"]


def test_existing_output_files_are_kept_with_the_right_reason(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"

    def refused(overwrite: bool, reason: str) -> None:
        with pytest.raises(RefusedError, match=reason), FileStage(out, overwrite):
            pass

    out.mkdir()
    refused(True, "is no file")
    out.rmdir()
    out.touch()  # an empty one is somebody's too
    refused(False, "exists")
    refused(True, "is not a result of quantforge")
    out.unlink()
    with FileStage(out, overwrite=False, disk=NO_FSYNC_DISK) as stage:
        stage.write_file("m.gguf", b"new")
        stage.write_file(stage.manifest, manifest_of(stage, "new"))
        stage.publish()
    refused(False, "exists")
    out.write_bytes(b"")
    refused(True, "is not as the manifest of the earlier result lists it")


def test_an_older_manifest_schema_blocks_overwriting(
    tmp_path: Path,
) -> None:
    write_manifest(tmp_path, "a", schema="quantforge.manifest/1")
    (tmp_path / "a").touch()
    message = r"has schema quantforge\.manifest/1, and this version of quantforge reads quant.*/2;"
    with pytest.raises(RefusedError, match=message):
        check_replaceable(tmp_path, overwrite=True)
    assert (tmp_path / "a").exists()
