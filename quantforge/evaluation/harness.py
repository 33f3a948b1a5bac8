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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, QuantForgeError
from quantforge.evaluation.language_model import OwnError, language_model
from quantforge.evaluation.requests import Answers
from quantforge.evaluation.task_code import YAML, guarded, name_of
from quantforge.evaluation.task_names import (
    Tasks,
    check_names,
    refuse_unknown,
    text_of,
    unknown,
)

TASK_ERROR = "_stderr"
_GET_DATA = (
    "run it once where there is a network, which fills the cache (under HF_HOME, to be copied here), "
    "or give a YAML file of your own with local data_files"
)


def check(tasks: Tasks) -> None:
    """Refuse, before any work, what cannot be run.

    Raises:
        InputError: the library has no task of a name, or cannot load its data.
        QuantForgeError: as `check_names`.
    """
    check_names(tasks)
    manager = _manager(tasks)
    refuse_unknown(tasks, manager.all_tasks)
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
        with (
            _quiet(),
            nullcontext() if tasks.code else guarded(),
            _offline() if tasks.offline else nullcontext(),
        ):
            yield
    except OwnError as error:
        raise error.error from None
    except QuantForgeError:
        raise
    except Exception as error:  # the library and a task's templates raise what they like
        said = " ".join(str(error).split())[:300]
        where = f"--tasks {','.join(tasks.names)}"
        if _unreached(error):
            raise InputError(
                f"{where}: its data are not in the local cache, and the hub is not asked or not reached ({said})",
                _GET_DATA,
            ) from error
        raise InputError(
            f"{where}: {type(error).__name__}: {said}", "see the library's task guide"
        ) from error


def _unreached(error: BaseException | None) -> bool:
    """Return whether an error comes of a network that is not there, or may not be used."""
    while error is not None and not isinstance(error, ConnectionError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the library's data sets from asking the hub: what is not in the local cache is missing at once."""
    import datasets.config as data
    from huggingface_hub import constants as hub

    before = data.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
    data.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        data.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before


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
            grouped = any(re.search(r"(?m)^group:", text_of(file)) for file in tasks.files)
            if not grouped and not unknown(tasks, found.all_tasks):
                return found
        return TaskManager(include_path=folders or None)


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
