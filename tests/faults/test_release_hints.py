"""What is typed wrongly at a release, and files of it that are gone: what the hint says works when it is typed."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from tests.runs import command, tree
from tests.thorough import each_value, further

HEAD = """model = "{model}"
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
def _one_day(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.chdir(tmp_path)


def written(place, model, *parts):
    place.write_text(HEAD.format(model=model) + "".join(parts or (Q8,)))
    return place


def typed(capsys, said):
    """Type what a hint says behind its colon."""
    hint = said.partition("hint: ")[2].splitlines()[0]
    return command(capsys, "release", *shlex.split(hint.rpartition(": ")[2]))


def test_a_directory_as_release_file_gets_a_usable_hint(model, tmp_path, capsys):
    place = tmp_path / "a place"
    place.mkdir()
    for name in ("release.toml", "own.toml"):
        written(place / name, model)
        said = command(capsys, "release", "a place")
        assert (said.code, "is a directory" in said.err) == (3, True)
        assert typed(capsys, said.err).code == 0
        (place / name).unlink()
    empty = command(capsys, "release", "a place")
    assert "holds no .toml file" in empty.err


def test_a_release_directory_argument_gets_a_usable_hint(model, tmp_path, capsys):
    written(tmp_path / "x.toml", model)
    assert command(capsys, "release", "x.toml", "-o", "made").code == 0
    before = tree(tmp_path / "made")
    said = command(capsys, "release", "made")
    assert said.code == 3
    assert typed(capsys, said.err).code == 0
    assert tree(tmp_path / "made") == before
    assert {path.name for path in tmp_path.iterdir()} == {"x.toml", "made"}


@each_value(
    ("gone", ["gguf/q8.gguf", "compressed-tensors/int4/model.safetensors"]),
    ("join", [(), ("--join",)]),
)
def test_a_deleted_release_file_is_remade_by_the_hint(model, tmp_path, capsys, gone, join):
    written(tmp_path / "x.toml", model, Q8, INT4)
    asked = ("release", "x.toml", "-o", "an out", *join)
    assert command(capsys, *asked).code == 0
    before = tree(tmp_path / "an out")
    (tmp_path / "an out" / gone).unlink()
    for more in ((), ("--dry-run",)):
        said = command(capsys, *asked, *more)
        assert said.code == 4
        hint = said.err.partition("hint: ")[2].splitlines()[0]
        assert "put" in said.err
    (tmp_path / "ELSEWHERE").mkdir()
    subprocess.run(["sh", "-c", hint.rpartition(": ")[2]], check=True)
    again = command(capsys, *asked)
    assert again.code == 0, again.err
    assert tree(tmp_path / "an out") == before


@pytest.mark.parametrize("scored", [further(""), SCORED])
def test_overwrite_remakes_deleted_release_files(model, tmp_path, capsys, scored):
    written(tmp_path / "x.toml", model, scored, Q8, INT4)
    asked = ("release", "x.toml", "-o", "out")
    assert command(capsys, *asked).code == 0
    before = tree(tmp_path / "out")
    (tmp_path / "out/gguf/q8.gguf").unlink()
    (tmp_path / "out/compressed-tensors/int4/model.safetensors").unlink()
    again = command(capsys, *asked, "--overwrite")
    assert again.code == 0, again.err
    assert tree(tmp_path / "out") == before
    assert ("KL" in (tmp_path / "out/compressed-tensors/int4/README.md").read_text()) == bool(
        scored
    )
