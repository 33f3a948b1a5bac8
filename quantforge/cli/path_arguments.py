"""Show paths and option names in output as the user typed them.

A run resolves paths, so that symbolic links are seen. In output the working directory is removed, other paths are
replaced with the argument that led to them, and the home directory becomes ``~``. Paths that an argument contains in
full are not changed. So output never shows a directory that the user has not typed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_MAX_LENGTH = 4096  # maximum length of an argument that may be a path


def restore_typed_paths(text: str) -> str:
    """Return a text in which paths are replaced with what the user typed."""
    if "/" not in text:
        return text
    for pattern, typed_path in _path_patterns(
        tuple(sys.argv[1:]), _working_directory(), os.environ.get("HOME", "")
    ):
        text = pattern.sub(typed_path.replace("\\", r"\\"), text)
    return text


def restore_option_name(message: str) -> str:
    """Replace ``[table.]name = `` at the start of a message with the option ``--name``, if the user typed that."""
    match = re.match(r"(?:[a-z]\w*\.)?([a-z]\w*) = ", message)
    flag = f"--{match[1].replace('_', '-')}" if match else ""
    if match is None or not any(argument.partition("=")[0] == flag for argument in sys.argv[1:]):
        return message
    return f"{flag} {message[match.end() :]}"


def restore_typed_path(text: str) -> str:
    """Apply `restore_typed_paths` if the whole text is a path; else return it unchanged."""
    return restore_typed_paths(text) if text.startswith("/") and "\n" not in text else text


def escape_line_breaks(text: str) -> str:
    """Escape line breaks that belong to typed file names in a text."""
    if "\n" in text:
        for name in _names_with_line_breaks(tuple(sys.argv[1:])):
            text = text.replace(name, name.replace("\n", "\\n"))
    return text


def display_path(out: Path) -> str:
    """Return a path as it is typed in a shell; relative paths start with ``./`` or ``..``."""
    return str(out) if out.is_absolute() or out.parts[:1] == ("..",) else f"./{out}"


def relative_to_cwd(path: Path) -> Path:
    """Return a path relative to the working directory if it is inside of that, else unchanged."""
    working_directory = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(working_directory) if working_directory in path.parents else path


def adapter_arguments(adapter: Path | str | None) -> str:
    """Return `` --adapter DIR`` to append to a command; "" without an adapter."""
    return "" if adapter is None else f" --adapter {shlex.quote(str(adapter))}"


@lru_cache(maxsize=4)
def _names_with_line_breaks(arguments: tuple[str, ...]) -> Sequence[str]:
    """Return path components with line breaks, from arguments that are existing paths."""
    candidates = [
        candidate
        for argument in arguments
        for candidate in (argument, argument.partition("=")[2])
        if "\n" in candidate
    ]
    paths = [
        candidate
        for candidate in candidates
        if len(candidate) < _MAX_LENGTH and os.path.lexists(candidate)
    ]
    return [name for candidate in paths for name in candidate.split("/") if "\n" in name]


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""


@lru_cache(maxsize=4)
def _path_patterns(
    arguments: tuple[str, ...], working_directory: str, home: str
) -> Sequence[tuple[re.Pattern[str], str]]:
    """Return patterns of absolute paths with their replacements, innermost paths first."""
    typed_paths = [
        item for argument in arguments for item in (argument, argument.partition("=")[2])
    ]
    typed_paths = [item for item in typed_paths if 0 < len(item) < _MAX_LENGTH and "\0" not in item]
    typed_words: dict[str, str] = {}
    for item in (item for item in typed_paths if item[0] not in "-/"):
        parent = str(Path(item).parent)
        for normalize in (os.path.normpath, os.path.realpath):
            path = Path(normalize(Path(working_directory, parent)))
            typed_words.setdefault(str(path), parent)
            # The last component is not resolved: a symbolic link stays one.
            typed_words[os.path.normpath(path / Path(item).name)] = item.rstrip("/")
    typed_words[working_directory] = "."
    typed_words.setdefault(home.rstrip("/"), "~")
    absolute_words = [item for item in typed_paths if item[0] == "/"]
    typed_in_full = {
        path for path in typed_words for item in absolute_words if f"{item}/".startswith(f"{path}/")
    }
    ordered = sorted(typed_words.keys() - typed_in_full - {"", "/"}, key=len, reverse=True)
    return [pair for path in ordered for pair in _patterns_of_path(path, typed_words[path])]


def _patterns_of_path(path: str, typed_path: str) -> list[tuple[re.Pattern[str], str]]:
    start, end = rf"(?<![\w./~+-]){re.escape(path)}", r"(?![\w+~-])(?!\.\w)"
    inner_patterns = [(re.compile(f"{start}/(?=[^\\s/-])"), "")] if typed_path == "." else []
    return [*inner_patterns, (re.compile(start + end), typed_path)]
