"""Changes of values in documents: numbers, words, lists, keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Place = tuple[Any, ...]


def places(node: Any, at: Place = ()) -> Iterator[Place]:
    """Every place of a document, outer ones first."""
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def get(node: Any, at: Place) -> Any:
    """The value at a place."""
    for key in at:
        node = node[key]
    return node


def put(node: Any, at: Place, value: Any) -> None:
    """Set the value at a place."""
    get(node, at[:-1])[at[-1]] = value


def drop(node: Any, at: Place) -> None:
    """Remove a place."""
    del get(node, at[:-1])[at[-1]]


def altered(value: Any, chance: random.Random) -> Any:
    """Another value of the same type, near the old one as often as far from it; of None a number or a word."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(
            (value + 1, value - 1, value * 2, value // 2 if value > 1 else 7, -value or 3)
        )
    if isinstance(value, float):
        return chance.choice((value * 1.1, value * 2, value / 2, value * 10, value + 1.0))
    if isinstance(value, str):
        cut = chance.randrange(len(value) + 1)
        return chance.choice((value + "x", value[:cut] + "~" + value[cut:], value[:-1] or "y"))
    if isinstance(value, list):
        if not value:
            return ["x"]
        at = chance.randrange(len(value))
        return chance.choice(
            (value[:at] + value[at + 1 :], [*value, value[at]], value[1:] + value[:1])
        )
    if isinstance(value, dict):
        return {}
    return chance.choice((1, 16, "x", True))


def shown(at: Place) -> str:
    """A place as text."""
    return ".".join(map(str, at))[:60]


def mutated(document: Any, chance: random.Random, additions: dict[str, Any]) -> str | None:
    """Change, remove or add one key of a document; the text of what was done."""
    turn = chance.random()
    if additions and turn < 0.4:
        key = chance.choice(sorted(additions))
        if isinstance(document, dict) and document.get(key) != additions[key]:
            document[key] = additions[key]
            return f"{key} = {additions[key]!r}"[:100]
    found = list(places(document))
    if not found:
        return None
    at = chance.choice(found)
    if turn > 0.8:
        drop(document, at)
        return f"{shown(at)} removed"
    old = get(document, at)
    new = altered(old, chance)
    put(document, at, new)
    return f"{shown(at)}: {new!r} for {old!r}"[:140]
