"""Tasks of lm-evaluation-harness on packed weights: found, checked, and run on answers of our runtime.

The library makes the requests and computes the scores; `language_model` has them answered. It is the optional
extra ``eval``. A task is one of the library's names, whose data it loads from the hub, or a YAML file
of its format, which may name local data and then needs no network.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, QuantForgeError, UsageError
from quantforge.evaluation.language_model import OwnError, language_model
from quantforge.evaluation.requests import Answers
from quantforge.evaluation.task_code import YAML, check_file, check_folder, guarded, name_of
from quantforge_files.roles import TASK

TASK_ERROR = "_stderr"
_NAME = r"[\w.()+/*?\[\]!-]+"  # with the signs of a pattern
# A name stands behind one of these keys, or in a list.
_STATED = re.compile(
    r"""(?m)^\s*(?:-\s*)?(?:['"]?(?:task|group|tag)['"]?\s*:\s*|-\s+)['"]?([.()+/-]*\w[\w.()+/-]*)['"]?\s*(?:\#.*)?$"""
)
_NAMES = "lm-eval ls tasks shows the library's names"
MOST_TASKS = 1000  # that a pattern may mean: of all of them, 14,000, nobody wants the figures


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks that a model is to answer.

    Attributes:
        names: of tasks, or YAML files.
        limit: documents of each task; 0 is all.
        code: whether task files may run code.
    """

    names: tuple[str, ...]
    limit: int = 0
    code: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Return those names that are files."""
        return tuple(Path(name) for name in self.names if name.endswith(YAML))


def check(tasks: Tasks) -> None:
    """Refuse, before any work, what cannot be run.

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
            raise InputError(f"--tasks: {name!r} is no name of a task", _NAMES)
    if not tasks.files:
        _refuse_unknown(tasks, _stated())
    manager = _manager(tasks)
    _refuse_unknown(tasks, manager.all_tasks)
    with _errors_of_tasks(tasks):
        for task in manager.load(_names(tasks))["tasks"].values():
            task.build_all_requests(limit=1, rank=0, world_size=1)


def run(answers: Answers, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Run tasks.

    Returns:
        ``{task: {metric: value}}``, and ``METRIC_stderr`` where the library estimates an error.

    Raises:
        InputError: the library does not know a task, or cannot load its data.
    """
    from lm_eval import simple_evaluate

    with _errors_of_tasks(tasks):
        found = simple_evaluate(
            model=language_model(answers),
            tasks=_names(tasks),
            task_manager=_manager(tasks),
            limit=tasks.limit or None,
            log_samples=False,
            bootstrap_iters=0,
            confirm_run_unsafe_code=tasks.code,
        )
    return {name: _figures(values) for name, values in found["results"].items()}


@contextmanager
def _errors_of_tasks(tasks: Tasks) -> Iterator[None]:
    """Run the library, guarded, and raise what it raises as an error of the tasks, unless it comes from our answers.

    Raises:
        InputError: naming the tasks.
    """
    try:
        with _quiet(), nullcontext() if tasks.code else guarded():
            yield
    except OwnError as error:
        raise error.error from None
    except QuantForgeError:
        raise
    except Exception as error:  # the library and a task's templates raise what they like
        said = " ".join(str(error).split())[:300]
        hint = "see the library's task guide" if tasks.files else _NAMES
        where = f"--tasks {','.join(tasks.names)}"
        raise InputError(f"{where}: {type(error).__name__}: {said}", hint) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from writing names and bars to the terminal, and from asking programs what runs here."""
    from lm_eval import evaluator

    log = logging.getLogger("lm_eval")
    level, asking = log.level, (evaluator.get_git_commit_hash, evaluator.add_env_info)
    log.setLevel(logging.CRITICAL + 1)
    evaluator.get_git_commit_hash, evaluator.add_env_info = (lambda: None), (lambda _storage: None)
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        log.setLevel(level)
        evaluator.get_git_commit_hash, evaluator.add_env_info = asking


def _names(tasks: Tasks) -> list[str]:
    """Return names of tasks: those of files, and all that a pattern means."""
    known = _manager(tasks).all_tasks
    return [
        found
        for name in tasks.names
        for found in ([name_of(Path(name))] if name.endswith(YAML) else fnmatch.filter(known, name))
    ]


@lru_cache(1)
def _manager(tasks: Tasks) -> Any:
    """Index the tasks that may be meant: the library's own, 14,000 files, only where one of them may be."""
    from lm_eval.tasks import TaskManager

    folders = sorted({str(file.resolve().parent) for file in tasks.files})
    with _quiet(), nullcontext() if tasks.code else guarded():
        if folders:
            found = TaskManager(include_path=folders, include_defaults=False)
            grouped = any(re.search(r"(?m)^group:", _text(file)) for file in tasks.files)
            if not grouped and not _unknown(tasks, found.all_tasks):
                return found
        return TaskManager(include_path=folders or None)


def _unknown(tasks: Tasks, known: Iterable[str]) -> list[str]:
    asked = (name for name in tasks.names if not name.endswith(YAML))
    return [name for name in asked if not fnmatch.filter(known, name)]


def _refuse_unknown(tasks: Tasks, known: Iterable[str]) -> None:
    for name in _unknown(tasks, known):
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else _NAMES
        raise InputError(f"--tasks: lm-eval has no task {name!r}", hint)
    for name in tasks.names:
        if not name.endswith(YAML) and len(fnmatch.filter(known, name)) > MOST_TASKS:
            raise InputError(f"--tasks: {name!r} means more than {MOST_TASKS} tasks", _NAMES)


def _stated() -> set[str]:
    """Return all that may be a name in the library's files, which takes a fifth of having it read them."""
    return set(_STATED.findall(_library()))


@lru_cache(1)
def _library() -> str:
    """Join the files of the library's own tasks."""
    package = find_spec("lm_eval.tasks")
    roots = [Path(root) for root in (package and package.submodule_search_locations) or ()]
    files = [file for root in roots for file in root.rglob("*") if file.suffix in ("", *YAML)]
    found = (FILES.read(file, TASK, None) for file in files if file.is_file())
    return b"\n".join(found).decode("utf-8", "replace")


def _text(file: Path) -> str:
    return FILES.read(file, TASK, None).decode("utf-8", "replace")


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Return finite numbers only, without the filter's name where there is none."""
    found = {}
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        name = metric if kind in {"", "none"} else f"{metric},{kind}"
        number = isinstance(value, int | float) and math.isfinite(value)
        if number and metric not in {"alias", "sample_len"}:
            found[name] = float(value)
    return found
