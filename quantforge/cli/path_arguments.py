"""Paths and options as a person types them: what is printed names no directory that the person has not named.

Inside of a run places are resolved, so that a link in the way is seen. On the way out the working directory is taken
off, what lies elsewhere is named by the word of the command line that led there, and the home directory is ``~``. A
place of which an argument states the whole path stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_LONGEST = 4096  # characters of an argument that may be a path


def as_typed(text: str) -> str:
    """Return a text with the paths in it as they were typed."""
    if "/" not in text:
        return text
    for pattern, word in _places(tuple(sys.argv[1:]), _here(), os.environ.get("HOME", "")):
        text = pattern.sub(word.replace("\\", r"\\"), text)
    return text


def option_as_typed(message: str) -> str:
    """Return a message that begins with ``[table.]name = value`` with the option in its place, if that was typed."""
    named = re.match(r"(?:[a-z]\w*\.)?([a-z]\w*) = ", message)
    flag = f"--{named[1].replace('_', '-')}" if named else ""
    if named is None or not any(word.partition("=")[0] == flag for word in sys.argv[1:]):
        return message
    return f"{flag} {message[named.end() :]}"


def path_as_typed(text: str) -> str:
    """Return a text as `as_typed` where the whole of it is a path, and unchanged otherwise."""
    return as_typed(text) if text.startswith("/") and "\n" not in text else text


def in_one_line(text: str) -> str:
    """Return a text with the line breaks escaped that are in names of files which were typed."""
    if "\n" in text:
        for name in _broken_names(tuple(sys.argv[1:])):
            text = text.replace(name, name.replace("\n", "\\n"))
    return text


def shown(out: Path) -> str:
    """Return a path as it is typed in a shell, with ``./`` before a relative one that does not lead upwards."""
    return str(out) if out.is_absolute() or out.parts[:1] == ("..",) else f"./{out}"


def from_here(path: Path) -> Path:
    """Return a path as it is typed in the working directory: relative where it lies inside of that."""
    here = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(here) if here in path.parents else path


def typed_adapter(adapter: Path | str | None) -> str:
    """Return the option that names an adapter, as further words of a command; "" for none."""
    return "" if adapter is None else f" --adapter {shlex.quote(str(adapter))}"


@lru_cache(maxsize=4)
def _broken_names(arguments: tuple[str, ...]) -> Sequence[str]:
    """Return the parts with line breaks of the paths among arguments; a text that is typed is none."""
    words = [word for one in arguments for word in (one, one.partition("=")[2]) if "\n" in word]
    there = [word for word in words if len(word) < _LONGEST and os.path.lexists(word)]
    return [part for word in there for part in word.split("/") if "\n" in part]


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # somebody has removed it
        return ""


@lru_cache(maxsize=4)
def _places(
    arguments: tuple[str, ...], here: str, home: str
) -> Sequence[tuple[re.Pattern[str], str]]:
    """Return patterns of absolute places and what stands for them, the innermost places first."""
    words = [word for argument in arguments for word in (argument, argument.partition("=")[2])]
    words = [word for word in words if 0 < len(word) < _LONGEST and "\0" not in word]
    found: dict[str, str] = {}
    for word in (word for word in words if word[0] not in "-/"):
        folder = str(Path(word).parent)
        for resolve in (os.path.normpath, os.path.realpath):
            place = Path(resolve(Path(here, folder)))
            found.setdefault(str(place), folder)
            # Its own last part is not resolved: a link stays one.
            found[os.path.normpath(place / Path(word).name)] = word.rstrip("/")
    found[here] = "."
    found.setdefault(home.rstrip("/"), "~")
    stated = [word for word in words if word[0] == "/"]
    kept = {place for place in found for word in stated if f"{word}/".startswith(f"{place}/")}
    ordered = sorted(found.keys() - kept - {"", "/"}, key=len, reverse=True)
    return [pair for place in ordered for pair in _patterns(place, found[place])]


def _patterns(place: str, word: str) -> list[tuple[re.Pattern[str], str]]:
    begin, end = rf"(?<![\w./~+-]){re.escape(place)}", r"(?![\w+~-])(?!\.\w)"
    inside = [(re.compile(f"{begin}/(?=[^\\s/-])"), "")] if word == "." else []
    return [*inside, (re.compile(begin + end), word)]
