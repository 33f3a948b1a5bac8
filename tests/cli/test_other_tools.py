"""The page for those who come from other tools: each of our commands there is planned, or parsed, as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from quantforge.api import demo
from quantforge.cli.app import app
from tests.runs import run_command

PAGE = Path(__file__).parents[2] / "docs/other-tools.md"
COMMANDS = sorted(set(re.findall(r"`quantforge ([^`]*)`", PAGE.read_text())))
# Of `export`, those from the model itself; from results that nobody made are parsed
PLANNED = {"quantize", "plan"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("other")
    demo(found / "demo")
    (found / "text.txt").write_text("Some text of one's own.\n" * 9000)
    return found


def test_the_page_has_commands_of_five_tools() -> None:
    assert PAGE.read_text().count("\n## ") == 5
    assert len(COMMANDS) >= 25


def test_every_command_of_the_page_is_planned_or_parsed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    for line in COMMANDS:
        verb, *words = shlex.split(line)
        missing = {"imatrix.gguf"} & {*words}
        if not words:
            continue
        if not missing and (verb in PLANNED or (words[0] == "demo" and verb == "export")):
            ended = run_command(capsys, verb, *words, *(["--dry-run"] if verb != "plan" else []))
            assert ended.code == 0, (line, ended.err)
            continue
        group = typer.main.get_command(app)
        context = typer.Context(group, info_name="quantforge")
        parsed = group.commands[verb].make_context(verb, [*words], parent=context)
        assert not parsed.args, line
