"""A release replaces no foreign file, publishes nothing damaged, and checks its paths and text before work."""

from __future__ import annotations

import os
import subprocess

import pytest

from quantforge.api import release, sweep
from quantforge.errors import InputError, IntegrityError, RefusedError
from tests.runs import file_digests, run_command

SPEC_HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
[evaluation]
text = "{text}"
windows = 2
length = 16
"""
Q8 = '[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
INT4 = """[[variant]]
name = "int4"
recipe = {method = "rtn", scheme = "int4:g32:sym"}
format = "compressed-tensors"
"""


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


def write_spec(tmp_path, model, *parts, text="builtin"):
    path = tmp_path / "asked.toml"
    path.write_text(SPEC_HEAD.format(model=model, text=text) + "".join(parts))
    return path


def file_states(directory):
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino)
        for path in directory.rglob("*") if path.is_file()
    }  # fmt: skip


def test_a_directory_with_foreign_files_is_not_a_release(model, tmp_path, capsys):
    spec, project = write_spec(tmp_path, model, Q8), tmp_path / "project"
    project.mkdir()
    (project / "release.toml").write_bytes(spec.read_bytes())  # as `-o .` beside the file finds it
    for name in ("upload.sh", "SHA256SUMS", "evaluation.md"):
        (project / name).write_text("mine")
    before = file_digests(project)
    for more in ((), ("--dry-run",)):
        ended = run_command(capsys, "release", spec, "-o", project, *more)
        assert (ended.code, "exists, and is no release" in ended.err) == (4, True), ended.err
        assert file_digests(project) == before
    (project / "release.json").write_text('{"schema": "theirs"}')
    with pytest.raises(RefusedError, match="is no release"):
        release(spec, project)
    (project / "release.json").write_text('{"schema": "quantforge.release/1"}')
    with pytest.raises(RefusedError, match=r"has schema quantforge\.release/1"):
        release(spec, project)


def test_a_partial_file_of_a_killed_release_does_not_block(model, tmp_path):
    spec, out = write_spec(tmp_path, model, Q8), tmp_path / "out"
    out.mkdir()
    (out / ".release.json.0123abcd.part").touch()
    assert release(spec, out).made == ("q8",)


def test_unwritable_release_paths_are_refused_before_work(model, tmp_path):
    out = tmp_path / "out"
    release(write_spec(tmp_path, model, Q8), out)
    spec = write_spec(tmp_path, model, Q8, INT4)
    for path, spoil in (
        ("SHA256SUMS", lambda target: target.symlink_to(tmp_path / "elsewhere")),
        ("upload.sh", lambda target: target.mkdir()),
        ("compressed-tensors", lambda target: target.symlink_to(tmp_path)),
        ("gguf/README.md", lambda target: target.write_text("no parts\n")),
    ):
        target, kept = out / path, tmp_path / "kept"
        if target.exists():
            target.rename(kept)
        spoil(target)
        before = file_states(out)
        with pytest.raises((InputError, RefusedError), match=path):
            release(spec, out)
        assert file_states(out) == before
        target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink()
        if kept.exists():
            kept.rename(target)
    assert release(spec, out).made == ("int4",)


def test_repeating_a_finished_release_touches_no_file(model, tmp_path):
    spec, out = write_spec(tmp_path, model, Q8, INT4), tmp_path / "out"
    release(spec, out)
    before = file_states(out)
    assert release(spec, out).made == ()
    assert file_states(out) == before


def test_a_changed_evaluation_text_is_scored_again(model, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    spec = write_spec(tmp_path, model, Q8, text=text)
    text.write_text("one two three four " * 40)
    (first,) = release(spec, out).variants
    text.write_text("five six seven eight nine " * 40)
    (second,) = release(spec, out).variants
    assert first.figures != second.figures
    release(spec, tmp_path / "anew")
    assert file_digests(out) == file_digests(tmp_path / "anew")


@pytest.mark.parametrize("name", ["gguf/q8.gguf", "compressed-tensors/int4/model.safetensors"])
def test_a_damaged_variant_is_refused(name, model, tmp_path):
    spec, out = write_spec(tmp_path, model, Q8, INT4), tmp_path / "out"
    release(spec, out)
    data = (out / name).read_bytes()
    (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = file_digests(out)
    with pytest.raises(IntegrityError, match="is not what its manifest states"):
        release(spec, out)
    assert file_digests(out) == before


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no file"), ("short", "nothing to score")]
)
def test_an_unusable_evaluation_text_is_refused_before_work(
    content, message, model, tmp_path, capsys
):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    spec, before = write_spec(tmp_path, model, Q8, text=text), {*tmp_path.iterdir()}
    for more in ((), ("--dry-run",)):
        ended = run_command(capsys, "release", spec, "-o", tmp_path / "out", *more)
        assert (ended.code, message in ended.err) == (3, True), ended.err
    with pytest.raises(InputError, match=message):
        sweep(model, {"bits": [4, 8]}, tmp_path / "swept", measured={"text": str(text)})
    assert {*tmp_path.iterdir()} - {spec} == before - {spec}


def test_the_upload_script_stops_when_a_file_is_missing(model, tmp_path):
    release(write_spec(tmp_path, model, Q8), tmp_path / "out")
    (tmp_path / "hf").write_text("#!/bin/sh\necho uploaded\n")
    (tmp_path / "hf").chmod(0o755)
    (tmp_path / "out/gguf/q8.gguf").rename(tmp_path / "away")
    words, path = ["sh", "out/upload.sh", "me/it"], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for stdout, code in (("", 1), ("uploaded\n", 0)):
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=path)  # fmt: skip
        assert (ran.stdout, ran.returncode) == (stdout, code)
        if code:
            assert "gguf/q8.gguf is missing: put it back first" in ran.stderr
            (tmp_path / "away").rename(tmp_path / "out/gguf/q8.gguf")


def test_the_upload_script_ignores_cdpath(model, tmp_path):
    release(write_spec(tmp_path, model, Q8), tmp_path / "out")
    (tmp_path / "others/out").mkdir(parents=True)
    (tmp_path / "hf").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "hf").chmod(0o755)
    ran = subprocess.run(
        ["sh", "out/upload.sh", "me/it"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"CDPATH": str(tmp_path / "others"), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ran.stdout == f"{tmp_path.resolve()}/out\n"
