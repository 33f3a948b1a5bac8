"""Tasks of lm-evaluation-harness: found, checked before any work, and run on a model.

The library, which is the optional extra ``eval``, makes the requests and computes the scores;
`quantforge.evaluation.task_model` has them answered. A task is one of the library's names, whose data it loads from the
hub, or a YAML file in its format, which may name local data and then needs no network.

Of a YAML file the library takes more than data: ``!function`` imports a module, ``class`` names one, a metric that it
does not know is a script of the hub, a data set may be a script or a pickle, and ``unsafe_code`` runs what a model
writes. `read_task` looks for all of it, in the file and in what that includes, and refuses it unless code is allowed;
metrics are checked when the library asks for them, and templates are rendered in jinja's sandbox. Code in the library's
own package is trusted like that of any library.
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

from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.files.opener import FILES
from quantforge_files.roles import TASK

YAML = (".yaml", ".yml")
TASK_ERROR = "_stderr"
MOST_TASKS = 1000  # of one pattern; the library has 14,000
GUIDE = "see the library's task guide"
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
    """Return the library's index of tasks with our files added, and the names of those that are asked for.

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
            raise _runs_code_error(
                name, "the library does not have this metric: a script of the hub"
            )
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
        _check_data(path, data, set())
    named = data if isinstance(data, dict) else {}
    name = named.get("group") or named.get("task")
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"--tasks: {path} has no name", "add a line: task: NAME")
    return name, "group" in named


def _runs_code_error(where: object, what: str) -> RefusedError:
    hint = "if you trust its author: --allow-code; else use only data and templates in the task"
    return RefusedError(f"--tasks {where}: {what}", hint, file=str(where))


def _load(path: Path, allow_code: bool) -> Any:
    """Parse a file; the parser is the one in Python, which refuses deep nesting where the one in C overflows."""
    import yaml

    def other_tag(_loader: Loader, node: yaml.Node) -> None:
        if not allow_code:
            line = node.start_mark.line + 1
            raise _runs_code_error(path, f"line {line}: {node.tag} makes the library run Python")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor(None, other_tag)
    try:
        return yaml.load(FILES.read(path, TASK, None), Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--tasks {path}: not YAML: {message}", GUIDE) from error


def _check_data(path: Path, data: Any, seen: set[Path]) -> None:
    seen.add(path.resolve())
    for key, value in _pairs(data):
        if reason := _runs_code(key, value):
            raise _runs_code_error(path, f"{key}: {value} {reason}")
        if key == "include" and isinstance(value, str):
            included = path.parent / value
            if included.resolve() not in seen:
                _check_data(included, _load(included, allow_code=False), seen)


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
