"""Messages: what a person reads holds no value of Python, and no path of this repository, which a wheel has not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import Enum, StrEnum
from importlib import import_module
from typing import Any

import pytest

from scripts.structure import modules, parsed

RAW = (tuple, list, set, frozenset, dict, range, type, type(None))
HERE = re.compile(r"\b(docs|tests|scripts|benchmarks)/[\w-]|CONTRIBUTING|CHANGELOG")
OURS = [
    name
    for name in modules()
    if name.partition(".")[0] == "quantforge" and not name.endswith("__main__")
]


def shown(tree: ast.Module) -> Iterator[ast.expr]:
    """The constants, and attributes of modules, that texts are made with as they are."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FormattedValue)
            and isinstance(node.value, ast.Name | ast.Attribute)
            and node.conversion == -1
        ):
            yield node.value


def value_of(place: Any, name: ast.expr) -> Any:
    """The value that a name has in a module; a text where only a run knows."""
    if isinstance(name, ast.Attribute):
        owner = value_of(place, name.value)
        return "" if isinstance(owner, str) else getattr(owner, name.attr, "")
    return getattr(place, name.id, "") if isinstance(name, ast.Name) else ""


def raw(name: str) -> Iterator[str]:
    """The constants of a module that a text shows as Python writes them."""
    place = import_module(name)
    for node in shown(parsed(name)):
        if isinstance(node, ast.Name) and not node.id.isupper():
            continue  # of a function
        value = value_of(place, node)
        if isinstance(value, RAW) or (isinstance(value, Enum) and not isinstance(value, StrEnum)):
            yield f"{name}, line {node.lineno}: {ast.unparse(node)}"


def test_a_constant_in_a_text_is_a_word_or_a_number() -> None:
    assert [said for name in OURS for said in raw(name)] == []


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """The texts of a module that are no documentation of it."""
    told = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node


def paths(name: str) -> Iterator[str]:
    """The texts of a module that name a file of this repository."""
    for node in texts(parsed(name)):
        if HERE.search(str(node.value)):
            yield f"{name}, line {node.lineno}: {node.value!r}"


def test_no_text_names_a_file_of_the_repository() -> None:
    assert [said for name in OURS for said in paths(name)] == []


def test_what_is_looked_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "quantforge.formats.mlx"
    planted = ast.parse('def told():\n    return f"{SUPPORTED_BITS} bits, see docs/formats.md"')
    monkeypatch.setitem(globals(), "parsed", lambda _: planted)
    assert [len([*raw(name)]), len([*paths(name)])] == [1, 1]
