"""Sixty fixed hostile commands, and the failures that their judge reports; see `scripts/hostile.py`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import hostile
from tests.fuzz.hostile import judge
from tests.fuzz.hostile.cases import Case, draw
from tests.fuzz.hostile.judge import Verdict


@pytest.mark.thorough
def test_hostile_commands_end_with_results_or_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what cases need: each of them is a fork all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["hostile.py", "--cases", "60", "--seed", "1"])
    with pytest.raises(SystemExit) as ended:
        hostile.main()
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.out + printed.err
    assert "| 1 | 60 | 0 |" in printed.out


def _judge_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[..., int]
) -> Verdict:
    monkeypatch.setattr(judge, "run", verb)
    (tmp_path / "tree").mkdir()
    return judge._run(Case(0, ["plan", "--json"]), tmp_path / "tree", tmp_path)


def _raises(_: list[str]) -> int:
    raise KeyError("a bug")


def _prints(text: str, code: int) -> Callable[[list[str]], int]:
    def verb(_: list[str]) -> int:
        sys.stdout.write(text)
        return code

    return verb


def _grows(_: list[str]) -> int:
    bytearray(b"1" * (700 << 20))
    return 3


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (_raises, "bug"),
        (_prints("{}", 1), "exit 1"),
        (_prints("{}", -11), "exit"),
        (_prints("\x1b[31m", 3), "raw"),
        (_prints("\u202e", 3), "raw"),
        (_prints("{}{}", 0), "no document"),
        (_prints(judge.CANARY, 3), "another directory"),
        (_grows, "MB"),
    ],
)
def test_the_judge_reports_every_kind_of_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[list[str]], int], expected: str
) -> None:
    verdict = _judge_command(tmp_path, monkeypatch, verb)
    assert any(expected in wrong for wrong in verdict.wrong), verdict.wrong


@pytest.mark.parametrize(("linked", "wrong"), [("prompts.txt", 0), ("model/config.json", 1)])
def test_only_links_inside_a_model_leak_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str, wrong: int
) -> None:
    """The judge reports the canary if a link inside a model led to it, not if an argument is the link."""
    tree = tmp_path / "tree"
    (tree / "model").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text(judge.CANARY)
    (tree / linked).symlink_to(tmp_path / "outside.txt")
    monkeypatch.setattr(judge, "run", _prints(judge.CANARY, 0))
    case = Case(0, ["eval", "model", "--generated", "prompts.txt:text"])
    assert len(judge._run(case, tree, tmp_path).wrong) == wrong


def test_the_judge_reports_waiting_and_busy_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "GIVEN_UP", 0.3)
    monkeypatch.setattr(judge, "SECONDS", 0.1)

    def waits(_: list[str]) -> int:
        os.read(os.pipe()[0], 1)
        return 0

    def computes(_: list[str]) -> int:
        return 3 if sum(range(10_000_000)) else 0

    assert "no answer" in _judge_command(tmp_path, monkeypatch, waits).wrong[0]
    (tmp_path / "tree").rmdir()
    monkeypatch.setattr(judge, "GIVEN_UP", 60.0)
    assert any(" s" in wrong for wrong in _judge_command(tmp_path, monkeypatch, computes).wrong)


def test_the_judge_accepts_a_json_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _judge_command(tmp_path, monkeypatch, _prints('{"a": 1}\n', 0)).wrong


def test_a_case_is_deterministic_for_seed_and_number(tmp_path: Path) -> None:
    """Only the names in the tree affect what is drawn."""
    cases = [draw(3, number, tmp_path) for number in range(200)]
    again = [draw(3, number, tmp_path) for number in range(200)]
    assert [case.arguments for case in cases] == [case.arguments for case in again]
    assert len({tuple(case.arguments) for case in cases}) > 100
