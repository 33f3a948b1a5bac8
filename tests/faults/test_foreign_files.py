"""A user's files beside or inside an output are named, and never removed, replaced or written to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge.errors import BusyError, IntegrityError, QuantForgeError, RefusedError
from quantforge.files.disk import DISK, create_file, make_directory, open_existing, save_file
from quantforge.files.output_names import MANIFEST_SUFFIX
from quantforge.files.previous_output import MANIFEST
from quantforge.files.stage import FileStage, Stage
from tests.releases import NO_FSYNC_DISK, make, manifest_of, read_release, stage_release
from tests.thorough import parametrize_each_value

Plant = Callable[[Path], object]


def publish_file(out: Path, names: tuple[str, ...], text: str) -> None:
    with FileStage(out, overwrite=True, names=names, disk=NO_FSYNC_DISK) as stage:
        for name in names:
            stage.write_file(name, text.encode())
        stage.write_file(stage.manifest, manifest_of(stage, text))
        stage.publish()


def run(stage: Stage, work: Callable[[Stage], object]) -> None:
    with stage:
        work(stage)


def publish_directory(stage: Stage, text: str = "new") -> None:
    stage_release(stage, text, NO_FSYNC_DISK)
    stage.publish()


def assert_refused(
    out: Path, work: Callable[[], object], kind: type[QuantForgeError], word: str
) -> None:
    """Check that ``work`` is refused with ``word`` in its message, and changes no file but its lock."""
    before = files_without_lock(out.parent)
    with pytest.raises(kind) as caught:
        work()
    assert word in caught.value.message
    assert caught.value.hint
    assert files_without_lock(out.parent) == before


def files_without_lock(directory: Path) -> dict[str, bytes]:
    return {
        name: data
        for name, data in read_release(directory).items()
        if not name.endswith(".qf/lock")
    }


def edit_manifest(out: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = out / MANIFEST if out.is_dir() else out.with_name(f"{out.name}{MANIFEST_SUFFIX}")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# ---- a directory

PLANTED_INSIDE: dict[str, tuple[Plant, str]] = {
    "a note": (lambda out: (out / "notes.txt").write_text("mine"), "notes.txt"),
    "a note in a folder of the result": (
        lambda out: (out / "additional_chat_templates/mine.jinja").write_text("mine"), "mine.jinja",
    ),
    "a folder": (lambda out: (out / "runs").mkdir(), "runs"),
    "a link": (lambda out: (out / "link").symlink_to("config.json"), "link"),
    "a shard of another model": (
        lambda out: (out / "model-00003-of-00003.safetensors").touch(), "model-00003-of-00003",
    ),
    "a card with figures": (lambda out: (out / "config.json").write_text("longer than it was"), "config.json"),
    "a file that became a link": (
        lambda out: ((out / "config.json").rename(out.parent / "x"), (out / "config.json").symlink_to("../x")),
        "config.json",
    ),
    "a signature of something else": (lambda out: (out / "model.sig").write_text("{}"), "model.sig"),
    "a manifest that lists a way out": (
        lambda out: edit_manifest(out, lambda d: d["outputs"].update({"../canary": {"bytes": 6}})), "../canary",
    ),
    "a manifest that lists an absolute name": (
        lambda out: edit_manifest(out, lambda d: d["outputs"].update({"/etc/hosts": {"bytes": 6}})),
        "/etc/hosts",
    ),
    "a manifest that lists less": (
        lambda out: edit_manifest(out, lambda d: d["outputs"].pop("config.json")), "config.json",
    ),
    "a manifest of an older version": (lambda out: edit_manifest(out, lambda d: d.pop("outputs")), MANIFEST),
    "a manifest without sizes": (
        lambda out: edit_manifest(out, lambda d: d.update(outputs=dict.fromkeys(d["outputs"]))), "states no size",
    ),
    "a manifest of something else": (lambda out: edit_manifest(out, lambda d: d.update(schema="x")), MANIFEST),
    "a manifest that is damaged": (lambda out: (out / MANIFEST).write_text("["), MANIFEST),
    "a manifest that is a link": (
        lambda out: ((out / MANIFEST).rename(out.parent / "x"), (out / MANIFEST).symlink_to("../x")), MANIFEST,
    ),
    "a folder that is a link": (
        lambda out: ((out / "additional_chat_templates").rename(out.parent / "t"),
                     (out / "additional_chat_templates").symlink_to("../t")),
        "additional_chat_templates",
    ),
}  # fmt: skip


@parametrize_each_value(
    ("case", PLANTED_INSIDE), ("late", [False, True])
)  # before or during the run
def test_overwrite_refuses_files_missing_from_the_manifest(
    tmp_path: Path, case: str, late: bool
) -> None:
    plant, word = PLANTED_INSIDE[case]
    out = tmp_path / "out"
    (tmp_path / "canary").write_text("mine!!")
    make(out, "old", NO_FSYNC_DISK)

    def overwrite() -> None:
        with Stage(out, overwrite=True, disk=NO_FSYNC_DISK) as stage:
            stage_release(stage, "new", NO_FSYNC_DISK)
            if late:
                plant(out)
            stage.publish()

    if not late:
        plant(out)
        assert_refused(out, overwrite, RefusedError, word)
        return
    with pytest.raises(RefusedError, match=word):
        overwrite()
    assert read_release(out).get("config.json") != b"new"
    assert (tmp_path / "canary").read_text() == "mine!!"


def test_a_file_added_during_the_swap_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old", NO_FSYNC_DISK)

    def exchange(first: Path, second: Path) -> None:
        if second == out and not (out / "notes.txt").exists():
            (out / "notes.txt").write_text("mine")
        DISK.exchange(first, second)

    with pytest.raises(RefusedError, match=r"notes\.txt"):
        run(
            Stage(out, overwrite=True, disk=replace(NO_FSYNC_DISK, exchange=exchange)),
            publish_directory,
        )
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "config.json").read_text() == "old"
    (out / "notes.txt").unlink()
    make(out, "new", NO_FSYNC_DISK)
    assert (out / "config.json").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_overwrite_accepts_a_result_with_missing_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "old", NO_FSYNC_DISK)
    (out / "config.json").unlink()
    make(out, "new", NO_FSYNC_DISK)
    assert (out / "config.json").read_text() == "new"


# ---- files

HF = tuple(f"m-{n:05}-of-00002.safetensors" for n in (1, 2))
PARTS = tuple(f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3))


def test_a_file_result_keeps_similarly_named_files(tmp_path: Path) -> None:
    """Names that only look alike, of any suffix and with characters of patterns, are no part of the result."""
    for folder_name, name in (("a", "m.gguf"), ("b", "[m]*.gguf")):
        out = tmp_path / folder_name / name
        out.parent.mkdir()
        stem = out.stem
        foreign = [
            *(file.replace("m-", f"{stem}-", 1) for file in HF), f"{stem}-00001-of-00002.txt", f"{stem}.txt",
            f"{stem}.gguf.part", "mm.gguf", "m-00001-of-00002", f"{stem}-00001-of-00002.gguf.bak",
        ]  # fmt: skip
        for file in foreign:
            (out.parent / file).write_text("mine")
        publish_file(out, tuple(file.replace("m-", f"{stem}-", 1) for file in PARTS), "old")
        publish_file(out, (out.name,), "new")
        remaining = read_release(out.parent)
        assert {file: remaining.pop(file) for file in foreign} == dict.fromkeys(foreign, b"mine")
        assert remaining.keys() == {out.name, f"{out.name}{MANIFEST_SUFFIX}"}
        assert remaining[out.name] == b"new"


PLANTED_BESIDE: dict[str, tuple[Plant, str]] = {
    "somebody's file": (lambda out: (out.unlink(), out.write_text("somebody's")), "m.gguf"),
    "a part of somebody's": (lambda out: (out.parent / PARTS[0]).write_text("mine"), PARTS[0]),
    "a Modelfile": (lambda out: (out.parent / "m.Modelfile").write_text("FROM mine"), "m.Modelfile"),
    "a signature": (lambda out: (out.parent / "m.gguf.sig").write_text("{}"), "m.gguf.sig"),
    "a directory": (lambda out: (out.parent / "m.Modelfile").mkdir(), "m.Modelfile"),
    "a link": (lambda out: (out.parent / "m.Modelfile").symlink_to("nowhere"), "m.Modelfile"),
    "a manifest that lists a neighbour": (
        lambda out: edit_manifest(out, lambda d: d["outputs"].update({HF[0]: {"bytes": 4}})), HF[0],
    ),
    "a manifest that lists a way out": (
        lambda out: edit_manifest(out, lambda d: d["outputs"].update({"../canary": {"bytes": 6}})), "../canary",
    ),
    "a manifest of an older version": (lambda out: edit_manifest(out, lambda d: d.pop("outputs")), MANIFEST_SUFFIX),
    "no manifest": (lambda out: out.with_name(f"{out.name}{MANIFEST_SUFFIX}").unlink(), "is not a result"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED_BESIDE)
def test_overwriting_a_file_refuses_foreign_files(tmp_path: Path, case: str) -> None:
    plant, word = PLANTED_BESIDE[case]
    out = tmp_path / "place/m.gguf"
    out.parent.mkdir()
    (tmp_path / "canary").write_text("mine!!")
    publish_file(out, ("m.gguf",), "old")
    (out.parent / HF[0]).write_text("mine")
    plant(out)
    assert_refused(
        out, lambda: publish_file(out, ("m.gguf", "m.Modelfile"), "new"), RefusedError, word
    )
    assert {path.name for path in tmp_path.iterdir()} == {"place", "canary"}


def test_a_file_created_after_a_kill_is_kept(tmp_path: Path) -> None:
    """The next run finishes the renames of a killed one, after it has checked every name again."""
    out = tmp_path / "m.gguf"

    def rename(source: Path, target: Path) -> None:
        if target == out:
            raise KeyboardInterrupt
        source.rename(target)

    def work(stage: Stage) -> None:
        stage.write_file("m.gguf", b"new")
        stage.write_file(stage.manifest, manifest_of(stage, "new"))
        stage.publish()

    with pytest.raises(KeyboardInterrupt):
        run(FileStage(out, overwrite=False, disk=replace(NO_FSYNC_DISK, rename=rename)), work)
    out.write_text("mine")
    with pytest.raises(RefusedError, match=r"m\.gguf"), FileStage(out, overwrite=True):
        pass
    assert out.read_text() == "mine"
    out.unlink()
    with pytest.raises(RefusedError, match="exists"), FileStage(out, overwrite=False):
        pass
    assert out.read_text() == "new"
    moving = tmp_path / ".m.gguf.qf/stage/.moving.json"
    assert not moving.exists()


@pytest.mark.parametrize("names", [["../canary"], ["/etc/hosts"], [7], "m.gguf", None])
def test_a_rename_list_outside_the_output_is_refused(tmp_path: Path, names: object) -> None:
    out = tmp_path / "place/m.gguf"
    out.parent.mkdir()
    (tmp_path / "canary").write_text("mine")
    with FileStage(out, overwrite=False) as stage:  # as a kill leaves it
        stage.write_file(stage.manifest, b"{}")
        stage.write_file(".moving.json", json.dumps({"names": names, "earlier": {}}).encode())
    assert_refused(
        out, FileStage(out, overwrite=True).__enter__, IntegrityError, "no list of this run"
    )


# ---- what a run keeps beside its output

PLANTED_RUN_DIRECTORIES: dict[str, tuple[Plant, str]] = {
    "a directory of somebody's": (lambda d: (d.mkdir(), (d / "a").write_text("mine")), "no lock"),
    "a file": (lambda d: d.write_text("mine"), "no directory"),
    "a link to a directory": (lambda d: d.symlink_to("elsewhere"), "no directory"),
    "a link to nothing": (lambda d: d.symlink_to("nothing"), "no directory"),
    "a lock that is a text": (lambda d: (d.mkdir(), (d / "lock").write_text("mine")), "no lock"),
    "a lock that is other JSON": (lambda d: (d.mkdir(), (d / "lock").write_text('{"x": 1}')), "no lock"),
    "a lock that is a link": (lambda d: (d.mkdir(), (d / "lock").symlink_to("../elsewhere/b")), "no lock"),
    "a lock that is another name": (
        lambda d: (d.mkdir(), (d.parent / "empty").touch(), (d / "lock").hardlink_to(d.parent / "empty")), "no lock",
    ),
    "a lock that is a pipe": (lambda d: (d.mkdir(), os.mkfifo(d / "lock")), "no lock"),
    "a stage that is a link": (
        lambda d: (d.mkdir(), (d / "lock").touch(), (d / "stage").symlink_to("../elsewhere")), "stage",
    ),
    "a journal that is a link": (
        lambda d: (d.mkdir(), (d / "lock").touch(), (d / "journal").symlink_to("../elsewhere")), "journal",
    ),
}  # fmt: skip


@parametrize_each_value(
    ("case", PLANTED_RUN_DIRECTORIES),
    ("name", ["out", "m.gguf"]),
)
def test_a_foreign_run_directory_is_refused_and_untouched(
    tmp_path: Path, case: str, name: str
) -> None:
    plant, word = PLANTED_RUN_DIRECTORIES[case]
    out = tmp_path / name
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b").write_text("mine")
    plant(tmp_path / f".{name}.qf")
    stage = (FileStage if "." in name else Stage)(out, overwrite=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RefusedError, match=word) as caught:
        stage.__enter__()
    assert caught.value.hint
    lock = tmp_path / f".{name}.qf/lock"
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before.pop(lock, None)
    now.pop(lock, None)
    assert now == before


@pytest.mark.parametrize("name", ["additional_chat_templates", "config.json", "config.json.part"])
def test_links_inside_a_stage_are_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a").write_text("mine")
    for target in ("../../elsewhere", "../../elsewhere/a"):
        with Stage(tmp_path / "out", overwrite=False, disk=NO_FSYNC_DISK) as stage:
            stage.clear()
            (stage.path / name).symlink_to(target)
            try:
                stage_release(stage, "new", NO_FSYNC_DISK)
            except QuantForgeError:
                assert name == "additional_chat_templates"
            stage.discard()
        assert read_release(tmp_path / "elsewhere") == {"a": b"mine"}


def test_a_run_survives_the_removal_of_its_lock(tmp_path: Path) -> None:
    """The run succeeds, and a second one is refused while it works."""
    out = tmp_path / "out"
    with Stage(out, overwrite=False, disk=NO_FSYNC_DISK) as stage:
        stage_release(stage, "new", NO_FSYNC_DISK)
        (tmp_path / ".out.qf/lock").unlink()
        with pytest.raises(RefusedError, match="may still work"), Stage(out, overwrite=True):
            pass
        stage.publish()
    assert (out / "config.json").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_run_that_lost_its_lock_does_not_publish(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Stage(out, overwrite=False, disk=NO_FSYNC_DISK) as stage:
        stage_release(stage, "first", NO_FSYNC_DISK)
        (tmp_path / ".out.qf").rename(tmp_path / "moved")
        with Stage(out, overwrite=False, disk=NO_FSYNC_DISK) as second:
            with pytest.raises(QuantForgeError):
                stage.publish()
            stage_release(second, "second", NO_FSYNC_DISK)
            second.publish()
    assert (out / "config.json").read_text() == "second"


def test_publishing_fails_when_another_run_took_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Stage(out, overwrite=False, disk=NO_FSYNC_DISK) as stage:
        stage_release(stage, "first", NO_FSYNC_DISK)
        lock = tmp_path / ".out.qf/lock"
        lock.unlink()
        lock.touch()  # of a run that begins
        with pytest.raises(BusyError, match="another run has begun"):
            stage.publish()
    assert not out.exists()


def test_removing_the_run_directory_raises_a_typed_error(tmp_path: Path) -> None:
    for step in range(3):
        out = tmp_path / f"out{step}"

        def work(stage: Stage, step: int = step) -> None:
            for n in range(3):
                if n == step:
                    shutil.rmtree(stage.path.parent)
                stage.write_file(f"{n}", b"x")
            stage.publish()

        with pytest.raises(QuantForgeError):
            run(Stage(out, overwrite=False, disk=NO_FSYNC_DISK), work)
        assert not out.exists()


# ---- opening for writing


def test_file_creation_and_replacement_refuse_links_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "nowhere").symlink_to("new")
    (tmp_path / "other").hardlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("mine", "link", "nowhere", "other", "pipe"):
        with pytest.raises(FileExistsError):
            create_file(tmp_path / name)
    for name in ("link", "nowhere", "other", "pipe"):
        with pytest.raises(OSError, match=r"no file|symbolic|No such|device"):
            os.close(open_existing(tmp_path / name))
    for name in ("link", "nowhere", "mine"):
        with pytest.raises(OSError, match="exists"):
            make_directory(tmp_path / name)
    for name in ("link", "nowhere", "pipe"):
        with pytest.raises(RefusedError):
            save_file(tmp_path / name, b"x", overwrite=True)
    with pytest.raises(RefusedError, match="exists"):
        save_file(tmp_path / "mine", b"x")
    (tmp_path / "other").unlink()
    save_file(tmp_path / "mine", b"x", overwrite=True)
    assert (tmp_path / "mine").read_text() == "x"
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))
