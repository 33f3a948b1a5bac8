"""Task files of lm-evaluation-harness: read as data, and refused if they would run code.

The library takes more than data out of a YAML file: ``!function`` imports a module, ``class`` names one, a metric that
it does not know is a script of the hub, a data set may be a script or a pickle, and ``unsafe_code`` runs what a model
writes. `read_task` looks for all of it, in the file and in what that includes; metrics are checked when the library
asks for them (`quantforge.evaluation.tasks`). Code in the library's own package is trusted like that of any library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, RefusedError
from quantforge_files.roles import TASK

GUIDE = "see the library's task guide"


def read_task(path: Path, *, allow_code: bool = False) -> tuple[str, bool]:
    """Read a task file and what it includes.

    Returns:
        The name of its task or group, and whether it is a group.

    Raises:
        RefusedError: it would run code, and ``allow_code`` is false.
        InputError: it is not YAML, has no name, or an included file is missing.
    """
    data = _load(path, allow_code)
    if not allow_code:
        _check(path, data, set())
    named = data if isinstance(data, dict) else {}
    name = named.get("group") or named.get("task")
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"--tasks: {path} has no name", "add a line: task: NAME")
    return name, "group" in named


def refuse_code(where: object, what: str) -> RefusedError:
    """Return the error for a task that would run code."""
    hint = "if you trust its author: --allow-code; else use only data and templates in the task"
    return RefusedError(f"--tasks {where}: {what}", hint, file=str(where))


def _load(path: Path, allow_code: bool) -> Any:
    """Parse a file; the parser is the one in Python, which refuses deep nesting where the one in C overflows."""
    import yaml

    def other_tag(_loader: Loader, node: yaml.Node) -> None:
        if not allow_code:
            line = node.start_mark.line + 1
            raise refuse_code(path, f"line {line}: {node.tag} makes the library run Python")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor(None, other_tag)
    try:
        return yaml.load(FILES.read(path, TASK, None), Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--tasks {path}: not YAML: {message}", GUIDE) from error


def _check(path: Path, data: Any, seen: set[Path]) -> None:
    seen.add(path.resolve())
    for key, value in _pairs(data):
        if reason := _runs_code(key, value):
            raise refuse_code(path, f"{key}: {value} {reason}")
        if key == "include" and isinstance(value, str):
            included = path.parent / value
            if included.resolve() not in seen:
                _check(included, _load(included, allow_code=False), seen)


def _pairs(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, or with each item of a list, at any depth; shared parts only once."""
    seen: set[int] = set()
    waiting = [data]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            for key, value in part.items():
                yield from ((key, item) for item in (value if isinstance(value, list) else [value]))


def _runs_code(key: str, value: Any) -> str:
    """Say why a key would run code; "" if it would not."""
    if key in {"trust_remote_code", "unsafe_code", "hf_evaluate"} and value:
        return "runs code"
    if key == "class":
        return "is a task in Python"
    if key == "dataset_path" and isinstance(value, str):
        if value == "pandas":
            return "is a pickle"
        if value.endswith(".py") or ("/" in value and any(Path(value).glob("*.py"))):
            return "is a script"
    return ""
