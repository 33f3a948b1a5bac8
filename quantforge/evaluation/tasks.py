"""Tasks of lm-evaluation-harness: resolve names, check for code before any work, and run them on a model.

The library (the optional extra ``eval``) builds the requests and computes the scores;
`quantforge.evaluation.task_model` answers the requests. A task is either a name known to the library, whose data is
loaded from the hub, or a YAML file in the library's format, which may refer to local data and then needs no network.

A YAML file can make the library run code: ``!function`` imports a module, ``class`` names one, an unknown metric is a
script of the hub, a data set may be a script or a pickle, and ``unsafe_code`` runs code that a model writes.
`read_task` searches the file and its includes for all of these and refuses them unless code is allowed; metrics are
checked when the library requests them, and templates are rendered in jinja's sandbox. Code in the library's own package
is trusted like that of any dependency.
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

YAML_SUFFIXES = (".yaml", ".yml")
STDERR_SUFFIX = "_stderr"
MAX_TASKS = 1000  # that one pattern may match; the library has 14,000
GUIDE_HINT = "see the library's task guide"
_OFFLINE_HINT = (
    "run it once where there is a network, which fills the cache (under HF_HOME, to be copied here), "
    "or give a YAML file of your own with local data_files"
)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks to run on a model.

    Attributes:
        names: names of tasks, patterns of names, or YAML files.
        limit: maximum number of documents per task; 0 runs all.
        allow_code: whether task files may run code.
        offline: never download data from the hub.
    """

    names: tuple[str, ...]
    limit: int = 0
    allow_code: bool = False
    offline: bool = False

    def read_files(self) -> dict[Path, tuple[str, bool]]:
        """Read the names that are YAML files.

        Returns:
            The result of `read_task` for each file.

        Raises:
            QuantForgeError: a file is missing, or as `read_task`.
        """
        files: dict[Path, tuple[str, bool]] = {}
        for path in (Path(name) for name in self.names if name.endswith(YAML_SUFFIXES)):
            if not path.is_file():
                raise InputError(
                    f"--tasks: no file {path}", "give a name or the path of a YAML file"
                )
            files[path] = read_task(path, allow_code=self.allow_code)
        return files


class ModelError(BaseException):
    """Wrapper that carries an exception of the model through the library, to distinguish it from a task's exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def check_files(tasks: Tasks) -> None:
    """Check tasks as far as possible without importing the library.

    Raises:
        InputError: the library is not installed, or two files have the same name.
        UsageError: there are no tasks.
        QuantForgeError: as `Tasks.read_files`.
    """
    if not tasks.names:
        raise UsageError("--tasks: no task", "give names, or YAML files, separated by commas")
    names = [name for name, _ in tasks.read_files().values()]
    if len({*names}) < len(names):
        raise InputError(f"--tasks: two files have one name: {', '.join(names)}", "rename a task")
    if find_spec("lm_eval") is None:
        raise InputError(
            "--tasks needs lm-eval, which is not installed", "pip install 'quantforge[eval]'"
        )


def check(tasks: Tasks) -> None:
    """Check before any work that all tasks can be run.

    Raises:
        InputError: the library does not know a task, or cannot load its data.
        QuantForgeError: as `check_files`.
    """
    check_files(tasks)
    with _run_library(tasks):
        manager, names = _resolve_tasks(tasks)
        for task in manager.load(names)["tasks"].values():
            task.build_all_requests(limit=1, rank=0, world_size=1)


def run(model: Any, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Run tasks on a model.

    Args:
        model: an ``LM`` of the library, such as `quantforge.evaluation.task_model.TaskModel`.
        tasks: the tasks.

    Returns:
        ``{task: {metric: value}}``, with ``METRIC_stderr`` if the library estimates a standard error.

    Raises:
        InputError: the library does not know a task, or cannot load its data.
    """
    from lm_eval import simple_evaluate

    with _run_library(tasks):
        manager, names = _resolve_tasks(tasks)
        results = simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            limit=tasks.limit or None,
            log_samples=False,
            bootstrap_iters=0,
            confirm_run_unsafe_code=tasks.allow_code,
        )
    return {name: _metric_values(values) for name, values in results["results"].items()}


@lru_cache(1)
def _resolve_tasks(tasks: Tasks) -> tuple[Any, list[str]]:
    """Return the library's task manager with the YAML files added, and the names of the requested tasks.

    The library's own tasks are indexed only if a name or a group may refer to one, because this takes ten seconds.

    Raises:
        InputError: an unknown task, or a pattern that matches too many.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    files = tasks.read_files()
    patterns = [name for name in tasks.names if not name.endswith(YAML_SUFFIXES)]
    manager = TaskManager(
        include_defaults=bool(patterns) or any(group for _, group in files.values())
    )
    index = manager.task_index
    for path, (name, group) in files.items():
        index[name] = Entry(name, Kind.GROUP if group else Kind.TASK, path.resolve())
    task_names = {name: None for name, _ in files.values()}
    for pattern in patterns:
        names = fnmatch.filter(index, pattern)
        if not names:
            similar = get_close_matches(pattern, index, 1)
            hint = (
                f"did you mean {similar[0]!r}?" if similar else "list the names: lm-eval ls tasks"
            )
            raise InputError(f"--tasks: lm-eval has no task {pattern!r}", hint)
        if len(names) > MAX_TASKS:
            raise InputError(f"--tasks: {pattern!r} means more than {MAX_TASKS} tasks", GUIDE_HINT)
        task_names |= dict.fromkeys(names)
    return manager, [*task_names]


@contextmanager
def _run_library(tasks: Tasks) -> Iterator[None]:
    """Context manager that silences the library, prevents unwanted code, and raises its exceptions as `InputError`.

    Raises:
        InputError: any exception of the library; the message names the tasks.
    """
    try:
        with _patch_library(tasks), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    except ModelError as error:
        raise error.error from None
    except QuantForgeError:
        raise
    except Exception as error:  # the library and task templates may raise anything
        message = " ".join(str(error).split())[:300]
        where = f"--tasks {','.join(tasks.names)}"
        if _is_offline(error):
            raise InputError(
                f"{where}: its data are not in the local cache, and the hub is not asked or not reached ({message})",
                _OFFLINE_HINT,
            ) from error
        raise InputError(f"{where}: {type(error).__name__}: {message}", GUIDE_HINT) from error


def _is_offline(error: BaseException | None) -> bool:
    """Return whether an error was caused by a network that is not available or not allowed."""
    while error is not None and not isinstance(error, ConnectionError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _patch_library(tasks: Tasks) -> Iterator[None]:
    """Temporarily replace what the library does unasked: running git, logging, and rendering without a sandbox."""
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
    replacements: list[tuple[Any, str, Any]] = [
        (evaluator, "get_git_commit_hash", lambda: None),
        (evaluator, "add_env_info", lambda _storage: None),
    ]
    if not tasks.allow_code:
        replacements += [(task, "get_metric", checked_metric), (utils, "env", sandbox)]
    if tasks.offline:
        replacements += [
            (datasets.config, "HF_HUB_OFFLINE", True),
            (constants, "HF_HUB_OFFLINE", True),
        ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        log.setLevel(level)
        for owner, name, value in originals:
            setattr(owner, name, value)


def _metric_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a task, and drop the name of the filter if there is none."""
    metrics = {}
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        name = metric if filter_name in {"", "none"} else f"{metric},{filter_name}"
        number = isinstance(value, int | float) and math.isfinite(value)
        if number and metric not in {"alias", "sample_len"}:
            metrics[name] = float(value)
    return metrics


def read_task(path: Path, *, allow_code: bool = False) -> tuple[str, bool]:
    """Read and check a task file and its includes.

    Returns:
        The name of the task or group, and whether it is a group.

    Raises:
        RefusedError: it would run code, and ``allow_code`` is false.
        InputError: it is not valid YAML, has no name, or an included file is missing.
    """
    data = _parse_yaml(path, allow_code)
    if not allow_code:
        _check_runs_no_code(path, data, set())
    mapping = data if isinstance(data, dict) else {}
    name = mapping.get("group") or mapping.get("task")
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"--tasks: {path} has no name", "add a line: task: NAME")
    return name, "group" in mapping


def _runs_code_error(where: object, what: str) -> RefusedError:
    """Create the error for a task file that would run code."""
    hint = "if you trust its author: --allow-code; else use only data and templates in the task"
    return RefusedError(f"--tasks {where}: {what}", hint, file=str(where))


def _parse_yaml(path: Path, allow_code: bool) -> Any:
    """Parse a YAML file with the pure Python parser, because the C parser overflows the stack on deep nesting."""
    import yaml

    def refuse_tag(_loader: Loader, node: yaml.Node) -> None:
        if not allow_code:
            line = node.start_mark.line + 1
            raise _runs_code_error(path, f"line {line}: {node.tag} makes the library run Python")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor(None, refuse_tag)
    try:
        return yaml.load(FILES.read(path, TASK, None), Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--tasks {path}: not YAML: {message}", GUIDE_HINT) from error


def _check_runs_no_code(path: Path, data: Any, seen: set[Path]) -> None:
    """Raise `RefusedError` if a parsed task file, or a file that it includes, would run code."""
    seen.add(path.resolve())
    for key, value in _iterate_items(data):
        if reason := _reason_to_refuse(key, value):
            raise _runs_code_error(path, f"{key}: {value} {reason}")
        if key == "include" and isinstance(value, str):
            included = path.parent / value
            if included.resolve() not in seen:
                _check_runs_no_code(included, _parse_yaml(included, allow_code=False), seen)


def _iterate_items(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value (or each item of a list) at any depth, visiting shared nodes only once."""
    seen: set[int] = set()
    stack = [data]
    while stack:
        child = stack.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, list):
            stack += child
        elif isinstance(child, dict):
            stack += child.values()
            for key, value in child.items():
                yield from ((key, item) for item in (value if isinstance(value, list) else [value]))


def _reason_to_refuse(key: str, value: Any) -> str:
    """Return why a key of a task file would run code; "" if it would not."""
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
