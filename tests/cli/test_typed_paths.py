"""What is printed names no directory that was not typed: errors, notes, tables and documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quantforge.cli.typed_paths import as_typed
from tests.conftest import Tiny
from tests.runs import command


@pytest.fixture
def place(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory beside a model, a result and what is in the way."""
    here = tmp_path / "work"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "wren").symlink_to(tiny("llama-wide"), target_is_directory=True)
    (here / "wren").symlink_to(tiny("llama-wide"), target_is_directory=True)
    (here / "there").mkdir()
    (here / "there" / "notes.txt").write_text("mine")
    (tmp_path / "there").mkdir()
    (here / "there.gguf").write_bytes(b"")
    (here / "link").symlink_to("there")
    (here / "bad").mkdir()
    (here / "bad" / "config.json").write_text("{")
    return here


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("quantize wren --bits 4 -o there", "error: there: exists"),
        ("quantize wren --bits 4 --output=there", "error: there: exists"),
        ("quantize ../wren --bits 4 -o ../there", "error: ../there: exists"),
        ("quantize wren --bits 4 -o ./there/", "error: ./there: exists"),
        ("quantize wren --bits 4 -o there.gguf", "error: there.gguf: exists"),
        ("quantize wren --bits 4 -o link", "leads to: there"),
        ("quantize wren --bits 4 -o no/x", "mkdir -p no"),
        ("quantize wren --bits 4 -o ../no/x", "mkdir -p ../no"),
        ("quantize wren --bits 4 -o there --overwrite", "error: there: is not a result"),
        ("export wren --format gguf --type Q8_0 -o there.gguf", "error: there.gguf: exists"),
        ("quantize wren --bits 4 -o wren/x", "overlaps the model wren"),
        ("inspect bad", "error: bad/config.json: not JSON"),
        ("inspect ../work/bad", "error: ../work/bad/config.json: not JSON"),
        ("quantize wren --bits 4 -o there --json", '"message": "there: exists"'),
        ("reproduce there --source wren", "error: there"),
    ],
)
def test_a_refusal_names_paths_as_they_were_typed(place, arguments, said, capsys):
    ended = command(capsys, *arguments.split())
    assert ended.code
    assert said in ended.err
    assert str(place.parent) not in ended.out + ended.err
    assert "output:" not in ended.err  # nothing is announced that is then refused


def test_what_is_made_is_named_as_it_was_typed(place, capsys):
    made = command(
        capsys,
        *["quantize", "../wren", "--method", "rtn", "--scales", "absmax", "-o", "../out", "--json"],
    )
    assert json.loads(made.out)["path"] == "../out"
    name = (place / "wren").resolve().name
    told = command(capsys, *["export", "../out", "--format", "gptq"])
    assert told.out == f"{name}-rtn-int4-gptq\n"
    assert f"output: ./{name}-rtn-int4-gptq\n" in told.err
    assert str(place.parent) not in told.err + made.err


@pytest.mark.parametrize(
    ("typed", "text", "told"),
    [
        ("x", "/h/u/w/x: exists", "x: exists"),
        ("../x", "mv /h/u/x ELSEWHERE", "mv ../x ELSEWHERE"),
        ("../x", "/h/u/x.gguf is in '/h/u/w'", "../x.gguf is in '.'"),
        ("--output=../x", "/h/u/x/y", "../x/y"),
        ("x", "/h/u/.cache, /h/u2, /h/u", "~/.cache, /h/u2, ~"),
        ("/h/u/w/x", "/h/u/w/x and /h/u/w/y", "/h/u/w/x and /h/u/w/y"),
        ("/h/u/x", "/h/u/x: /h/u/w/y", "/h/u/x: y"),
        ("x", "https://h/u/w/x a/h/u/w/x", "https://h/u/w/x a/h/u/w/x"),
        ("x\0", "no path", "no path"),
        ("x\\1", "/h/u/w/x\\1: bad", "x\\1: bad"),
    ],
)
def test_the_rule(typed, text, told, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quantforge", "verb", typed])
    monkeypatch.setenv("HOME", "/h/u")
    monkeypatch.setattr("quantforge.cli.typed_paths._here", lambda: "/h/u/w")
    assert as_typed(text) == told
