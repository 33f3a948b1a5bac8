"""A result of several files has no single rename: after a kill the next run finishes its publication."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quantforge.artifacts import manifest
from quantforge.errors import RefusedError
from quantforge.files.disk import DISK, Disk
from quantforge.files.output_names import MANIFEST_SUFFIX
from quantforge.files.stage import FileStage, Stage
from tests.releases import NO_FSYNC_DISK, FailingDisk, manifest_of, release_text
from tests.runs import file_digests, quantize, recipe
from tests.thorough import parametrize_each_value

ONE_FILE = ("m.gguf",)
TWO_FILES = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
THREE_FILES = tuple(f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3))


class KilledError(BaseException):
    """Stands for a kill: no code that runs after it writes."""


def kill() -> None:
    raise KilledError


def make(out: Path, names: tuple[str, ...], text: str, disk: Disk = NO_FSYNC_DISK) -> None:
    with FileStage(out, overwrite=True, disk=disk) as stage:
        for name in (*names, "m.Modelfile"):
            stage.write_file(name, text.encode())
        stage.write_file(stage.manifest, manifest_of(stage, text))
        stage.publish()


def visible(out: Path) -> dict[str, str]:
    return {
        path.name: release_text(path.read_text())
        for path in out.parent.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


@parametrize_each_value(("new", [ONE_FILE, TWO_FILES]), ("old", [(), ONE_FILE, THREE_FILES]))
def test_the_next_run_finishes_a_publication_killed_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    complete = dict.fromkeys((*new, "m.Modelfile", f"m.gguf{MANIFEST_SUFFIX}"), "new")
    after = []
    for at in range(1, 100):
        out = tmp_path / f"{at}/m.gguf"
        out.parent.mkdir()
        if old:
            make(out, old, "old")
        earlier = visible(out)
        failing = FailingDisk(at, kill)
        disk = replace(failing.disk(), fsync=failing.wrap(lambda descriptor: None))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", failing.wrap(Path.unlink))
                make(out, new, "new", disk)
        except KilledError:
            pass
        else:
            break
        files = visible(out)
        side = files.get(f"m.gguf{MANIFEST_SUFFIX}")
        assert {text for name, text in files.items() if "gguf" in name} <= {side or "new", "old"}
        assert side is None or len({files[name] for name in files if ".gguf" in name}) == 1
        with suppress(RefusedError), FileStage(out, overwrite=False, disk=NO_FSYNC_DISK) as stage:
            stage.clear()
        after.append(visible(out))
        assert after[-1] in (earlier, complete)
        make(out, new, "new")  # the same command again
        assert visible(out) == complete
        assert not list(out.parent.glob(".*"))
    assert failing.count < at
    finished = [state == complete for state in after]
    assert finished == sorted(finished), "once it is decided, it is finished"
    assert len(complete) <= sum(finished) < len(finished) - len(complete)


def test_a_failed_rename_does_not_lose_staged_files(tmp_path: Path) -> None:
    """An export removes its stage after an error, but not once its publication has begun."""
    out = tmp_path / "m.gguf"

    def rename(source: Path, target: Path) -> None:
        if target == out.with_name(f"m.gguf{MANIFEST_SUFFIX}"):
            raise KilledError
        source.rename(target)

    with FileStage(out, overwrite=False, disk=replace(DISK, rename=rename)) as stage:
        stage.write_file("m.gguf", b"new")
        stage.write_file(stage.manifest, manifest_of(stage, "new"))
        with pytest.raises(KilledError):
            stage.publish()
        stage.discard()
    with pytest.raises(RefusedError, match="exists"), FileStage(out, overwrite=False):
        pass
    assert visible(out) == dict.fromkeys(("m.gguf", f"m.gguf{MANIFEST_SUFFIX}"), "new")


def test_an_existing_output_is_described_with_an_alternative_name(tmp_path):
    out = tmp_path / "demo-Q4_0.gguf"
    document = {"source": {"model": "demo-awq-int4"}, "method": "awq", "format": "gguf"}
    for text, from_there in (
        ("", ""),
        (json.dumps({"source": 5, "method": "awq"}), ""),
        (json.dumps(document), ", made from demo-awq-int4 (method awq, format gguf)"),
    ):
        out.write_text("old")
        out.with_name(f"{out.name}{MANIFEST_SUFFIX}").write_text(text)
        with pytest.raises(RefusedError) as refused, FileStage(out, overwrite=False):
            pass
        assert refused.value.message == f"{out}: exists{from_there}"
        assert refused.value.hint.startswith(f"another name: -o {tmp_path}/demo-Q4_0-2.gguf, or ")
    (tmp_path / "demo-Q4_0-2.gguf").touch()
    with pytest.raises(RefusedError) as refused, FileStage(out, overwrite=False):
        pass
    assert "demo-Q4_0-3.gguf" in refused.value.hint
    folder = tmp_path / "demo-4.06bpw"
    folder.mkdir()
    (folder / "quantforge.manifest.json").write_text(json.dumps(document))
    with pytest.raises(RefusedError, match=r"made from demo-awq-int4") as refused:
        Stage(folder, overwrite=False).__enter__()
    assert "demo-4.06bpw-2," in refused.value.hint


def kill_before_manifest(source: Path, target: Path) -> None:
    if target.name.endswith(MANIFEST_SUFFIX) and target.parent.name != "stage":
        raise KilledError
    source.rename(target)


def raise_killed(*arguments: object) -> None:
    raise KilledError


# What stands for a kill in the last step of publishing, or right after it.
KILLS = {
    "m.gguf": ("quantforge.api.output.FileStage", partial(FileStage, disk=replace(DISK, rename=kill_before_manifest))),
    "m": ("quantforge.execution.journal.Journal.remove", raise_killed),
}  # fmt: skip
RECIPES = {
    "m.gguf": recipe(type="Q4_0", format="gguf", scales="absmax"),
    "m": recipe(bits=8),
}


# Of ``another``: whether another command comes between.
@parametrize_each_value(("name", KILLS), ("another", [True, False]))
def test_repeating_a_command_after_a_late_kill_finds_the_result(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, another: bool
) -> None:
    recipe, out, plain = RECIPES[name], tmp_path / name, tmp_path / "plain" / name
    plain.parent.mkdir()
    quantize(model, plain, recipe)
    with monkeypatch.context() as patch:
        patch.setattr(*KILLS[name])
        with pytest.raises(KilledError):
            quantize(model, out, recipe)
    if another:
        with pytest.raises(RefusedError, match="exists"):
            quantize(model, out, replace(recipe, ignore=("layers.0.mlp.up_proj",)))
    again = quantize(model, out, recipe)
    assert again.resumed
    assert len(again.events) == len((manifest.read_manifest(out) or {})["events"])
    files = {
        path: digest for path, digest in file_digests(tmp_path).items() if path[:6] != "plain/"
    }
    assert files == file_digests(plain.parent)
    with pytest.raises(RefusedError, match="exists"):
        quantize(model, out, recipe)
