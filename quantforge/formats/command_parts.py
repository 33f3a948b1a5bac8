"""Parts of commands: options, lines of a file that a command reads, and what comes before it, with words filled in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class PartKind(StrEnum):
    """Kinds of parts of a command."""

    OPTION = "option"
    LINE = "line"  # of the file that the command reads
    BEFORE = "before"  # a command of its own, before all others


@dataclass(frozen=True, slots=True)
class Part:
    """Text for one thing that is asked: ``{out}``, ``{context}``, ``{devices}``, ``{name}`` are filled in."""

    text: str
    kind: PartKind = PartKind.OPTION


@dataclass(frozen=True, slots=True)
class Command:
    """How one engine is started.

    Attributes:
        start: the command, with ``{out}`` for the result.
        context, devices: for these; None where there is no option.
        caches: by type of the cache.
        named: gives the model the name ``{name}`` in requests.
        before: a command that comes first.
        file: that the command reads, "" for none.
        lines: that this file always has.
        by_format: options that files of a format need, with ``{source}`` for the original model.
        lacks: why there is no option, by what is asked.
    """

    start: str
    context: Part | None = None
    caches: Mapping[str, Part] = field(default_factory=dict)
    devices: Part | None = None
    named: str = ""
    before: str = ""
    file: str = ""
    lines: tuple[str, ...] = ()
    by_format: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


def filled(part: Part, words: Mapping[str, str]) -> str:
    """Return a part as a shell reads it, with ``words`` by name."""
    return part.text.format(**{key: shlex.quote(word) for key, word in words.items()})


def line_of(text: str, words: Mapping[str, str]) -> str:
    """Return a line of YAML or of a Modelfile, in which texts with other characters stand in quotes."""
    return text.format(
        **{
            key: word if re.fullmatch(r"[\w./+-]+", word) else json.dumps(word)
            for key, word in words.items()
        }
    )
