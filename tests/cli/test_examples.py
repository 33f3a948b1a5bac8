"""What README and every ``--help`` tell a person to type runs as written, anywhere, behind `quantforge demo`."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import typer

import quantforge
from quantforge.api import bench
from quantforge.api.scored_text import REFERENCE_TEXT
from quantforge.cli.app import app
from quantforge.errors import RefusedError
from quantforge.evaluation import speed
from quantforge.planning import allocation
from quantforge.recipe import CalibrationOptions
from quantforge.serving import server
from quantforge.serving.server import ModelServer, listen
from tests.runs import keep_first_blocks, run_command

ROOT = Path(__file__).parents[2]
# Calibration of the same commands, so that the test is quick
SMALLER = {"samples": 2, "length": 32}


def examples() -> list[str]:
    """Return the commands of README, then those of the verbs, each once."""
    shown = re.findall(r"^    (quantforge .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    helped = [str(verb.epilog or "").removeprefix("Example: ") for verb in commands.values()]
    words = [" ".join(shlex.split(line, comments=True)) for line in shown]
    known = [line for line in helped if line and " ".join(shlex.split(line)) not in words]
    return [*shown, *known]


async def begun(_server: ModelServer, _counter: int) -> bool:
    """Stop a server as soon as it has begun."""
    return True


def test_examples_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = inspect.unwrap(CalibrationOptions.__init__)
    defaults = {field.name: field.default for field in fields(CalibrationOptions)} | SMALLER
    monkeypatch.setattr(start, "__defaults__", tuple(defaults.values()))
    monkeypatch.setattr(speed, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(allocation, "INTEGER_BITS", (3, 4))  # of an allocation
    evaluation = import_module("quantforge.api.evaluate")
    read = evaluation.read_text
    monkeypatch.setattr(  # a few windows of the text
        evaluation,
        "read_text",
        lambda source, _, offline: read(source, 2_000, offline=offline),
    )
    drawn = bench._requests
    monkeypatch.setattr(bench, "_requests", lambda *given: drawn(*given)[:2])
    monkeypatch.setattr(ModelServer, "on_tick", begun)
    monkeypatch.setattr(server, "listen", lambda host, _: listen(host, 0))
    monkeypatch.chdir(tmp_path)
    release = ROOT / "docs/examples/release.toml"
    (tmp_path / release.name).write_bytes(release.read_bytes())
    lines = examples()
    assert len(lines) >= 12
    assert lines[0].startswith("quantforge demo ")
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "quantforge"
        ended = run_command(capsys, *arguments)
        if arguments[0] == "demo":
            keep_first_blocks(tmp_path / "demo", 1)  # so that the test is quick
        different = 5 if arguments[0] == "diff" else 0  # two methods, other values
        assert ended.code == different, (line, ended.err)


def test_the_example_of_a_release_runs_behind_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "docs/examples/release.toml"
    (tmp_path / example.name).write_bytes(example.read_bytes())
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^#     (quantforge .*)$", example.read_text(), re.MULTILINE)
    assert [line.split()[1] for line in lines] == ["demo", "release"]
    assert run_command(capsys, *lines[0].split()[1:]).code == 0
    planned = run_command(capsys, *lines[1].split()[1:], "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert len(json.loads(planned.out)["variants"]) == 2


def test_no_command_of_the_pages_names_a_place_of_a_checkout() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/examples").iterdir()]
    places = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"quantforge"}
    for page in pages:
        for line in re.findall(
            r"^[# ]*(quantforge .*|model = .*)$", page.read_text(), re.MULTILINE
        ):
            named = {word.strip("\"'").partition("/")[0] for word in line.split() if "/" in word}
            assert not named & places, (page.name, line)


def test_the_demo_is_the_model_whole_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantforge.demo(tmp_path / "mine")
    source = ROOT / "models/demo"
    held = {path.name: path.read_bytes() for path in made.iterdir()}
    assert held.pop(REFERENCE_TEXT)
    assert held == {path.name: path.read_bytes() for path in source.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}
    with pytest.raises(RefusedError, match="exists"):
        quantforge.demo(made)
    assert run_command(capsys, "demo", tmp_path / "no" / "where").code == 3
    assert run_command(capsys, "demo", made).code == 4
