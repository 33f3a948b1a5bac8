"""What is printed names no directory that was not typed: errors, notes, tables and documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantforge.cli import allocate
from quantforge.cli.console import Console
from quantforge.cli.path_arguments import restore_typed_paths
from tests.conftest import Tiny
from tests.runs import run_command


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


REFUSED = [
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
]


def test_a_refusal_names_paths_as_they_were_typed(place, capsys):
    for arguments, said in REFUSED:
        ended = run_command(capsys, *arguments.split())
        assert ended.code, arguments
        assert said in ended.err, arguments
        assert str(place.parent) not in ended.out + ended.err, arguments
        assert "output:" not in ended.err  # nothing is announced that is then refused


def test_what_is_made_is_named_as_it_was_typed(place, capsys):
    made = run_command(
        capsys,
        *["quantize", "../wren", "--method", "rtn", "--scales", "absmax", "-o", "../out", "--json"],
    )
    assert json.loads(made.out)["path"] == "../out"
    name = (place / "wren").resolve().name
    told = run_command(capsys, *["export", "../out", "--format", "gptq"])
    assert told.out == f"{name}-rtn-int4-gptq\n"
    assert f"output: ./{name}-rtn-int4-gptq\n" in told.err
    assert str(place.parent) not in told.err + made.err


SHORTENED = [
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
    ("--output=-x", "sh /h/u/w/-x/y", "sh ./-x/y"),
]


def test_paths_below_the_working_and_the_home_directory_are_shortened(monkeypatch):
    monkeypatch.setenv("HOME", "/h/u")
    monkeypatch.setattr("quantforge.cli.path_arguments._working_directory", lambda: "/h/u/w")
    for typed, text, told in SHORTENED:
        monkeypatch.setattr(sys, "argv", ["quantforge", "verb", typed])
        assert restore_typed_paths(text) == told, text


def test_a_line_break_in_a_name_ends_no_line(
    place: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "two\nlines").symlink_to(tiny("llama-wide"), target_is_directory=True)
    shown = run_command(capsys, "inspect", "two\nlines")
    assert shown.out.startswith("two\\nlines  llama  plain\n")
    missing = run_command(capsys, "inspect", "two\nlines/absent")
    assert missing.code == 3
    planned = run_command(capsys, "plan", "two\nlines", "--scheme", "int4:g0")
    assert planned.code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "wren", "--bits", "4", "-o", "a\nb"),
        ("quantize", "wren", "--type", "Q8_0", "-o", "a\x1b.gguf"),
        ("sweep", "wren", "--over", "bits=4", "-o", "a\rb"),
        ("eval", "wren", "--no-speed", "--report", "a\u2028b.md"),
        ("allocate", "wren", "--target", "4bpw", "-o", "a\nb.toml"),
    ],
)
def test_a_name_with_a_control_character_is_not_made(
    place: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*place.iterdir()}
    ended = run_command(capsys, *arguments)
    assert ended.code == 2, ended.err
    assert "a control character in a name" in ended.err
    assert "\n" not in ended.err.partition("\nhint: ")[0]
    assert {*place.iterdir()} == before


def test_what_nobody_copies_is_broken_into_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Console().print_footer("some words " * 30)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])


def test_schemes_that_are_no_candidates_are_counted() -> None:
    left = {f"int{bits}": f"vllm does not load int{bits}" for bits in range(2, 8)}
    found: Any = SimpleNamespace(left_out=left, recipe=SimpleNamespace(engine="vllm", format=""))
    said = allocate._left_out(found)
    assert "6 usual schemes are no candidates: vllm does not take them" in said
    assert "int2" not in said
