"""Tasks of lm-evaluation-harness on packed weights: an `LM` whose answers come from our runtime.

The library makes the requests and computes the scores; `requests` answers them. It is the optional
extra ``eval``. A task is one of the library's names, whose data it loads from the hub, or a YAML file
of its format, which may name local data and then needs no network.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, UsageError
from quantforge.evaluation.requests import NEW_TOKENS, Answers, Continuation
from quantforge.evaluation.task_code import check_file, guarded
from quantforge.runtime.sampling import Sampling
from quantforge_files.roles import TASK

TASK_ERROR = "_stderr"
_FILE = (".yaml", ".yml")
_NAME = r"[\w.()+/*?\[\]!-]+"  # with the signs of a pattern
_TASK = re.compile(r"(?m)^[\s-]*(?:task|group|tag):\s*['\"]?([\w./-]+)")
_NAMES = "lm-eval ls tasks shows the library's names"


@dataclass(frozen=True, slots=True)
class Tasks:
    """What is asked.

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
        """Those that are files."""
        return tuple(Path(name) for name in self.names if name.endswith(_FILE))


def check(tasks: Tasks) -> None:
    """Refuse, before any work, what cannot be run.

    Raises:
        InputError: the library or a task file is missing, or the library has no task of a name.
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
    if find_spec("lm_eval") is None:
        raise InputError(
            "--tasks needs lm-eval, which is not installed", "pip install 'quantforge[eval]'"
        )
    for name in tasks.names:  # before the library reads all of its files, which takes ten seconds
        if not name.endswith(_FILE) and not re.fullmatch(_NAME, name):
            raise InputError(f"--tasks: {name!r} is no name of a task", _NAMES)
    if not tasks.files:
        _refuse(_unknown(tasks, _words()), _TASK.findall(_library()))
    known = _manager(tasks).all_tasks
    _refuse(_unknown(tasks, known), known)


def run(answers: Answers, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Run tasks.

    Returns:
        ``{task: {metric: value}}``, and ``METRIC_stderr`` where the library estimates an error.

    Raises:
        InputError: the library does not know a task, or cannot load its data.
    """
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    names = [_task_name(Path(name)) if Path(name) in tasks.files else name for name in tasks.names]
    try:
        with nullcontext() if tasks.code else guarded():
            found = simple_evaluate(
                model=language_model(answers),
                tasks=names,
                task_manager=_manager(tasks),
                limit=tasks.limit or None,
                log_samples=False,
                bootstrap_iters=0,
                confirm_run_unsafe_code=tasks.code,
            )
    except (KeyError, ValueError, OSError, TemplateError) as error:
        raise InputError(
            f"--tasks {','.join(tasks.names)}: {type(error).__name__}: {error}",
            _NAMES,
        ) from error
    return {name: _figures(values) for name, values in found["results"].items()}


@lru_cache(1)
def _manager(tasks: Tasks) -> Any:
    """Index the tasks that may be meant: the library's own, 14,000 files, only where one of them may be."""
    from lm_eval.tasks import TaskManager

    folders = sorted({str(file.resolve().parent) for file in tasks.files})
    with nullcontext() if tasks.code else guarded():
        if folders:
            found = TaskManager(include_path=folders, include_defaults=False)
            grouped = any(re.search(r"(?m)^group:", _text(file)) for file in tasks.files)
            if not grouped and not _unknown(tasks, found.all_tasks):
                return found
        return TaskManager(include_path=folders or None)


def _unknown(tasks: Tasks, known: Iterable[str]) -> list[str]:
    asked = (name for name in tasks.names if not name.endswith(_FILE))
    return [name for name in asked if not fnmatch.filter(known, name)]


def _refuse(unknown: Sequence[str], known: Iterable[str]) -> None:
    for name in unknown:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else _NAMES
        raise InputError(f"--tasks: lm-eval has no task {name!r}", hint)


def _words() -> set[str]:
    """Return all that may be a name in the library's files, which takes a fifth of having it read them."""
    return set(re.findall(r"[\w.()+/-]+", _library()))


@lru_cache(1)
def _library() -> str:
    """Join the files of the library's own tasks."""
    package = find_spec("lm_eval.tasks")
    roots = [Path(root) for root in (package and package.submodule_search_locations) or ()]
    files = [file for root in roots for file in root.rglob("*") if file.suffix in ("", *_FILE)]
    found = (FILES.read(file, TASK, None) for file in files if file.is_file())
    return b"\n".join(found).decode("utf-8", "replace")


def _task_name(file: Path) -> str:
    """The name that a task file gives itself."""
    found = re.search(r"^task:\s*['\"]?([\w./-]+)", _text(file), re.MULTILINE)
    if found is None:
        raise InputError(f"--tasks: {file} has no name", "add a line: task: NAME")
    return found[1]


def _text(file: Path) -> str:
    return FILES.read(file, TASK, None).decode("utf-8", "replace")


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only, without the filter's name where there is none."""
    found = {}
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        name = metric if kind in {"", "none"} else f"{metric},{kind}"
        if isinstance(value, int | float) and metric not in {"alias", "sample_len"}:
            found[name] = float(value)
    return found


def continuation_of(arguments: Mapping[str, Any]) -> Continuation:
    """Read the arguments of a request to generate, in the library's names.

    Raises:
        UsageError: one of them is not known here, so that it would change nothing.
    """
    given = dict(arguments)
    until = given.pop("until", [])
    most = int(given.pop("max_gen_toks", None) or given.pop("max_new_tokens", None) or NEW_TOKENS)
    drawn = bool(given.pop("do_sample", given.get("temperature", 0) > 0))
    sampling = Sampling(
        temperature=float(given.pop("temperature", 1.0 if drawn else 0.0)) if drawn else 0.0,
        top_k=int(given.pop("top_k", 0)),
        top_p=float(given.pop("top_p", 1.0)),
        repetition_penalty=float(given.pop("repetition_penalty", 1.0)),
        seed=int(given.pop("seed", 0)),
    )
    given.pop("temperature", None)
    if given:
        raise UsageError(
            f"generation arguments {', '.join(sorted(given))}", "leave them out of the task"
        )
    return Continuation((until,) if isinstance(until, str) else tuple(until), most, sampling)


def language_model(answers: Answers) -> Any:
    """An ``lm_eval.api.model.LM``; the library is imported here only."""
    from lm_eval.api.model import LM

    class QuantForge(LM):  # type: ignore[misc]
        """Passes requests on."""

        def loglikelihood(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[tuple[float, bool]]:
            return answers.continuations([request.args for request in requests])

        def loglikelihood_rolling(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[float]:
            return answers.texts([request.args[0] for request in requests])

        def generate_until(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[str]:
            asked = [(request.args[0], continuation_of(request.args[1])) for request in requests]
            return [answers.go_on(*request) for request in asked]

    return QuantForge()
