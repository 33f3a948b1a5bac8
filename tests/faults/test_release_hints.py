"""The hints about wrong arguments and deleted files of a release work when they are typed."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from tests.runs import file_digests, run_command
from tests.thorough import parametrize_each_value, thorough_case

SPEC_HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
"""
Q8 = '[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
SCORED = '[evaluation]\ntext = "builtin"\nwindows = 2\nlength = 16\n'
INT4 = """[[variant]]
name = "int4"
recipe = {method = "rtn", scheme = "int4:g32:sym"}
format = "compressed-tensors"
"""


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.chdir(tmp_path)


def write_spec(path, model, *parts):
    path.write_text(SPEC_HEAD.format(model=model) + "".join(parts or (Q8,)))
    return path


def run_hint(capsys, stderr):
    """Run the command that a hint shows after its colon."""
    hint = stderr.partition("hint: ")[2].splitlines()[0]
    return run_command(capsys, "release", *shlex.split(hint.rpartition(": ")[2]))


def test_a_directory_as_release_file_gets_a_usable_hint(model, tmp_path, capsys):
    directory = tmp_path / "a place"
    directory.mkdir()
    for name in ("release.toml", "own.toml"):
        write_spec(directory / name, model)
        ended = run_command(capsys, "release", "a place")
        assert (ended.code, "is a directory" in ended.err) == (3, True)
        assert run_hint(capsys, ended.err).code == 0
        (directory / name).unlink()
    empty = run_command(capsys, "release", "a place")
    assert "holds no .toml file" in empty.err


def test_a_release_directory_argument_gets_a_usable_hint(model, tmp_path, capsys):
    write_spec(tmp_path / "x.toml", model)
    assert run_command(capsys, "release", "x.toml", "-o", "made").code == 0
    before = file_digests(tmp_path / "made")
    ended = run_command(capsys, "release", "made")
    assert ended.code == 3
    assert run_hint(capsys, ended.err).code == 0
    assert file_digests(tmp_path / "made") == before
    assert {path.name for path in tmp_path.iterdir()} == {"x.toml", "made"}


@parametrize_each_value(
    ("deleted", ["gguf/q8.gguf", "compressed-tensors/int4/model.safetensors"]),
    ("join", [(), ("--join",)]),
)
def test_a_deleted_release_file_is_remade_by_the_hint(model, tmp_path, capsys, deleted, join):
    write_spec(tmp_path / "x.toml", model, Q8, INT4)
    arguments = ("release", "x.toml", "-o", "an out", *join)
    assert run_command(capsys, *arguments).code == 0
    before = file_digests(tmp_path / "an out")
    (tmp_path / "an out" / deleted).unlink()
    for more in ((), ("--dry-run",)):
        ended = run_command(capsys, *arguments, *more)
        assert ended.code == 4
        hint = ended.err.partition("hint: ")[2].splitlines()[0]
        assert "put" in ended.err
    (tmp_path / "ELSEWHERE").mkdir()
    subprocess.run(["sh", "-c", hint.rpartition(": ")[2]], check=True)
    again = run_command(capsys, *arguments)
    assert again.code == 0, again.err
    assert file_digests(tmp_path / "an out") == before


@pytest.mark.parametrize("scored", [thorough_case(""), SCORED])
def test_overwrite_remakes_deleted_release_files(model, tmp_path, capsys, scored):
    write_spec(tmp_path / "x.toml", model, scored, Q8, INT4)
    arguments = ("release", "x.toml", "-o", "out")
    assert run_command(capsys, *arguments).code == 0
    before = file_digests(tmp_path / "out")
    (tmp_path / "out/gguf/q8.gguf").unlink()
    (tmp_path / "out/compressed-tensors/int4/model.safetensors").unlink()
    again = run_command(capsys, *arguments, "--overwrite")
    assert again.code == 0, again.err
    assert file_digests(tmp_path / "out") == before
    assert ("KL" in (tmp_path / "out/compressed-tensors/int4/README.md").read_text()) == bool(
        scored
    )
