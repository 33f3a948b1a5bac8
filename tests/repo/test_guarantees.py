"""What the documents say is kept by a test is kept by one that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["guarantees.md", "cases.md"])
def test_every_test_that_is_named_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, function in named:
        assert file in FILES, f"{name}: {file}"
        assert not function or function in functions(FILES[file]), f"{name}: {file}::{function}"


def test_every_case_has_a_row() -> None:
    """71 cases and 21 guarantees: each is spoken of, once."""
    text = (ROOT / "docs" / "cases.md").read_text()
    numbers: list[int] = []
    for cell in re.findall(r"^\| ([0-9][0-9, to]*) \|", text, re.MULTILINE):
        first, *rest = [int(word) for word in re.findall(r"[0-9]+", cell)]
        numbers += range(first, rest[0] + 1) if " to " in cell else [first, *rest]
    assert numbers == list(range(1, 72))
    promises = re.findall(
        r"^\| G([0-9]+) \|", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE
    )
    assert promises == [str(n) for n in range(1, 22)]
