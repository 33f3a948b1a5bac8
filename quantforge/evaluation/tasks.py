"""Tasks of lm-evaluation-harness: found, checked before any work, and run on a model.

The library, which is the optional extra ``eval``, makes the requests and computes the scores;
`quantforge.evaluation.task_model` has them answered. A task is one of the library's names, whose data it loads from the
hub, or a YAML file in its format, which may name local data and then needs no network. Templates are rendered in
jinja's sandbox, and no code of a file is run, unless that is allowed.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, QuantForgeError, UsageError
from quantforge.evaluation.task_files import GUIDE, read_task, refuse_code

YAML = (".yaml", ".yml")
TASK_ERROR = "_stderr"
MOST_TASKS = 1000  # of one pattern; the library has 14,000
_GET_DATA = (
    "run it once where there is a network, which fills the cache (under HF_HOME, to be copied here), "
    "or give a YAML file of your own with local data_files"
)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks for a model.

    Attributes:
        names: of tasks, patterns of names, or YAML files.
        limit: documents of each task; 0 is all.
        code: whether task files may run code.
        offline: never ask the hub for data.
    """

    names: tuple[str, ...]
    limit: int = 0
    code: bool = False
    offline: bool = False

    def files(self) -> dict[Path, tuple[str, bool]]:
        """Read the names that are files.

        Returns:
            For each file what `read_task` returns.

        Raises:
            QuantForgeError: a file is missing, or as `read_task`.
        """
        found: dict[Path, tuple[str, bool]] = {}
        for path in (Path(name) for name in self.names if name.endswith(YAML)):
            if not path.is_file():
                raise InputError(
                    f"--tasks: no file {path}", "give a name or the path of a YAML file"
                )
            found[path] = read_task(path, allow_code=self.code)
        return found


class ModelError(BaseException):
    """Carrier of an exception of the model through the library, to tell it from an exception of a task."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def check_files(tasks: Tasks) -> None:
    """Refuse what can be refused without importing the library.

    Raises:
        InputError: the library is not installed, or two files have one name.
        UsageError: no task.
        QuantForgeError: as `Tasks.files`.
    """
    if not tasks.names:
        raise UsageError("--tasks: no task", "give names, or YAML files, separated by commas")
    names = [name for name, _ in tasks.files().values()]
    if len({*names}) < len(names):
        raise InputError(f"--tasks: two files have one name: {', '.join(names)}", "rename a task")
    if find_spec("lm_eval") is None:
        raise InputError(
            "--tasks needs lm-eval, which is not installed", "pip install 'quantforge[eval]'"
        )


def check(tasks: Tasks) -> None:
    """Refuse, before any work, what cannot be run.

    Raises:
        InputError: the library has no task of a name, or cannot load its data.
        QuantForgeError: as `check_files`.
    """
    check_files(tasks)
    with _library(tasks):
        manager, names = _found(tasks)
        for task in manager.load(names)["tasks"].values():
            task.build_all_requests(limit=1, rank=0, world_size=1)


def run(model: Any, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Run tasks.

    Args:
        model: an ``LM`` of the library, such as `quantforge.evaluation.task_model.TaskModel`.
        tasks: which.

    Returns:
        ``{task: {metric: value}}``, and ``METRIC_stderr`` where the library estimates an error.

    Raises:
        InputError: the library does not know a task, or cannot load its data.
    """
    from lm_eval import simple_evaluate

    with _library(tasks):
        manager, names = _found(tasks)
        found = simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            limit=tasks.limit or None,
            log_samples=False,
            bootstrap_iters=0,
            confirm_run_unsafe_code=tasks.code,
        )
    return {name: _figures(values) for name, values in found["results"].items()}


@lru_cache(1)
def _found(tasks: Tasks) -> tuple[Any, list[str]]:
    """Return the library's index of tasks with ours added, and the names of those that are asked for.

    Its own tasks are indexed, which takes ten seconds, only if a name or a group may mean one of them.

    Raises:
        InputError: there is no task of a name, or a pattern means too many.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    files = tasks.files()
    patterns = [name for name in tasks.names if not name.endswith(YAML)]
    manager = TaskManager(
        include_defaults=bool(patterns) or any(group for _, group in files.values())
    )
    index = manager.task_index
    for path, (name, group) in files.items():
        index[name] = Entry(name, Kind.GROUP if group else Kind.TASK, path.resolve())
    found = {name: None for name, _ in files.values()}
    for pattern in patterns:
        names = fnmatch.filter(index, pattern)
        if not names:
            close = get_close_matches(pattern, index, 1)
            hint = f"did you mean {close[0]!r}?" if close else "list the names: lm-eval ls tasks"
            raise InputError(f"--tasks: lm-eval has no task {pattern!r}", hint)
        if len(names) > MOST_TASKS:
            raise InputError(f"--tasks: {pattern!r} means more than {MOST_TASKS} tasks", GUIDE)
        found |= dict.fromkeys(names)
    return manager, [*found]


@contextmanager
def _library(tasks: Tasks) -> Iterator[None]:
    """Run the library silently and without unwanted code, and raise its exceptions as errors of the tasks.

    Raises:
        InputError: naming the tasks.
    """
    try:
        with _settings(tasks), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    except ModelError as error:
        raise error.error from None
    except QuantForgeError:
        raise
    except Exception as error:  # the library and a task's templates raise what they like
        message = " ".join(str(error).split())[:300]
        where = f"--tasks {','.join(tasks.names)}"
        if _is_offline(error):
            raise InputError(
                f"{where}: its data are not in the local cache, and the hub is not asked or not reached ({message})",
                _GET_DATA,
            ) from error
        raise InputError(f"{where}: {type(error).__name__}: {message}", GUIDE) from error


def _is_offline(error: BaseException | None) -> bool:
    """Return whether an error comes from a network that cannot, or may not, be used."""
    while error is not None and not isinstance(error, ConnectionError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _settings(tasks: Tasks) -> Iterator[None]:
    """Replace what the library does of its own accord: run git and other programs, log, render without a sandbox."""
    import datasets.config
    from huggingface_hub import constants
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import evaluator, utils
    from lm_eval.api import task

    known_metric = task.get_metric

    def checked_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        import lm_eval.api.metrics  # noqa: F401 - fills the registry
        from lm_eval.api.registry import metric_registry

        if hf_evaluate_metric or name not in metric_registry:
            raise refuse_code(name, "the library does not have this metric: a script of the hub")
        return known_metric(name)

    sandbox = ImmutableSandboxedEnvironment(
        undefined=utils.env.undefined, keep_trailing_newline=True
    )
    sandbox.filters.update(utils.env.filters)
    new: list[tuple[Any, str, Any]] = [
        (evaluator, "get_git_commit_hash", lambda: None),
        (evaluator, "add_env_info", lambda _storage: None),
    ]
    if not tasks.code:
        new += [(task, "get_metric", checked_metric), (utils, "env", sandbox)]
    if tasks.offline:
        new += [(datasets.config, "HF_HUB_OFFLINE", True), (constants, "HF_HUB_OFFLINE", True)]
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        for owner, name, value in new:
            setattr(owner, name, value)
        yield
    finally:
        log.setLevel(level)
        for owner, name, value in old:
            setattr(owner, name, value)


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
