"""Names of tasks, and their files: what can be refused of them before lm-evaluation-harness is imported."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, UsageError
from quantforge.evaluation.task_code import YAML, check_file, check_folder
from quantforge_files.roles import TASK

_NAME = r"[\w.()+/*?\[\]!-]+"  # with the signs of a pattern
# A name stands behind one of these keys, or in a list.
_STATED = re.compile(
    r"""(?m)^\s*(?:-\s*)?(?:['"]?(?:task|group|tag)['"]?\s*:\s*|-\s+)['"]?([.()+/-]*\w[\w.()+/-]*)['"]?\s*(?:\#.*)?$"""
)
NAMES = "lm-eval ls tasks shows the library's names"
MOST_TASKS = 1000  # that a pattern may mean: of all of them, 14,000, nobody wants the figures


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks that a model is to answer.

    Attributes:
        names: of tasks, or YAML files.
        limit: documents of each task; 0 is all.
        code: whether task files may run code.
        offline: never ask the hub for data.
    """

    names: tuple[str, ...]
    limit: int = 0
    code: bool = False
    offline: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Return those names that are files."""
        return tuple(Path(name) for name in self.names if name.endswith(YAML))


def check_names(tasks: Tasks) -> None:
    """Refuse, before anything of the library is imported, what cannot be run.

    Raises:
        InputError: the library or a task file is missing, the library has no task of a name, or cannot load its data.
        RefusedError: a task file would run code.
        UsageError: no task.
    """
    if not tasks.names:
        raise UsageError("--tasks: no task", "give names, or YAML files, separated by commas")
    for file in tasks.files:
        if not file.is_file():
            raise InputError(f"--tasks: no file {file}", "give a name or the path of a YAML file")
        FILES.check(file, TASK, None)
        if not tasks.code:
            check_file(file)
    for folder in {file.resolve().parent for file in tasks.files}:
        check_folder(folder, tasks.files)
    if find_spec("lm_eval") is None:
        raise InputError(
            "--tasks needs lm-eval, which is not installed", "pip install 'quantforge[eval]'"
        )
    for name in tasks.names:  # before the library reads all of its files, which takes ten seconds
        if not name.endswith(YAML) and not re.fullmatch(_NAME, name):
            raise InputError(f"--tasks: {name!r} is no name of a task", NAMES)
    beside = {name for file in _files_beside(tasks) for name in _STATED.findall(text_of(file))}
    if unknown(tasks, beside):
        refuse_unknown(tasks, beside | library_names())


def unknown(tasks: Tasks, known: Iterable[str]) -> list[str]:
    """Return the names, and patterns, that are no files and mean none of the known tasks."""
    asked = (name for name in tasks.names if not name.endswith(YAML))
    return [name for name in asked if not fnmatch.filter(known, name)]


def refuse_unknown(tasks: Tasks, known: Iterable[str]) -> None:
    """Refuse names that no task has, and patterns that mean too many.

    Raises:
        InputError: naming the first, with the nearest name that there is.
    """
    for name in unknown(tasks, known):
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else NAMES
        raise InputError(f"--tasks: lm-eval has no task {name!r}", hint)
    for name in tasks.names:
        if not name.endswith(YAML) and len(fnmatch.filter(known, name)) > MOST_TASKS:
            raise InputError(f"--tasks: {name!r} means more than {MOST_TASKS} tasks", NAMES)


def text_of(file: Path) -> str:
    """Return the text of a task file; errors as `Opener.read`."""
    return FILES.read(file, TASK, None).decode("utf-8", "replace")


def _files_beside(tasks: Tasks) -> list[Path]:
    """Return the YAML files that the library reads with those that are asked for."""
    folders = {file.resolve().parent for file in tasks.files}
    found = (file for folder in folders for file in folder.rglob("*"))
    return [file for file in found if file.suffix in YAML and file.is_file()]


@lru_cache(1)
def library_names() -> set[str]:
    """Return all that may be a name in the library's files, which takes a fifth of having it read them."""
    package = find_spec("lm_eval.tasks")
    roots = [Path(root) for root in (package and package.submodule_search_locations) or ()]
    files = [file for root in roots for file in root.rglob("*") if file.suffix in ("", *YAML)]
    found = (FILES.read(file, TASK, None) for file in files if file.is_file())
    return set(_STATED.findall(b"\n".join(found).decode("utf-8", "replace")))
