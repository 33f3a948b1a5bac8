"""Task files that would run code: refused before the work, and kept from it while the library reads them.

lm-evaluation-harness takes more than data out of a YAML file: ``!function`` imports a module beside it, a metric that
it does not know is a script of the hub, a data set may be a script or a pickle, ``unsafe_code`` runs what a model
writes, and its templates are rendered by jinja without a sandbox. `check_file` looks for all of it in a file and in
what that includes; `guarded` holds for whatever else the library finds in the same folder. What the library's own
package brings is its own code, like that of any library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, RefusedError
from quantforge_files.roles import TASK

HINT = (
    "if you trust whoever wrote it: --allow-code; else state the task with data and templates alone"
)
_PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "binary", "merge")
_PREFIX = "tag:yaml.org,2002:"
YAML = (".yaml", ".yml")
_DEEPEST = 100  # levels of nesting


def check_file(path: Path) -> None:
    """Refuse a task file that would run code, by itself or by what it includes.

    Raises:
        RefusedError: naming the line.
        InputError: it is no YAML, or an included file is missing.
    """
    _check(path, set())


def check_folder(folder: Path, asked: Iterable[Path]) -> None:
    """Refuse a folder of tasks with a YAML file, at any depth, that must not be read with those that are asked for.

    The library reads all of them, and takes a task from whichever file names it first.

    Raises:
        InputError: naming the file: no regular one, too large, nested deep, or with the name of another.
    """
    from yaml import YAMLError

    names = {name_of(path): path.resolve() for path in asked}
    for path in sorted(folder.rglob("*")):
        if path.suffix not in YAML:
            continue
        try:
            with suppress(YAMLError):  # the library passes over what is no YAML
                _check_depth(path, FILES.read(path, TASK, None))
        except InputError as error:
            hint = (
                f"lm-eval reads every YAML file below {folder}: give the task a folder of its own"
            )
            raise InputError(error.message, hint) from error
        with suppress(InputError):
            name = name_of(path)
            if names.get(name, path.resolve()) != path.resolve():
                break
    else:
        return
    raise InputError(
        f"--tasks: {path} and {names[name]} both give the name {name!r}",
        "give each task a name of its own, or a folder",
    )


def name_of(path: Path) -> str:
    """Return the name that a task file gives to its task or group.

    Raises:
        InputError: it is no YAML, gives none, or two.
    """
    import yaml

    root = _composed(path)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    stated: dict[str, list[Any]] = {"group": [], "task": []}
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            stated.get(key.value, []).append(value)
    names = stated["group"] or stated["task"]
    if len(names) > 1:
        line = names[1].start_mark.line + 1
        raise InputError(f"--tasks {path}, line {line}: a second name", "one line task: NAME")
    if not names or names[0].tag != f"{_PREFIX}str" or not names[0].value.strip():
        raise InputError(f"--tasks: {path} has no name", "add a line: task: NAME")
    return str(names[0].value)


@contextmanager
def guarded() -> Iterator[None]:
    """Let the library import no function but its own, and render templates in a sandbox.

    Raises:
        RefusedError: a task asks for more.
    """
    import lm_eval
    from lm_eval import utils
    from lm_eval.api import task
    from lm_eval.tasks import _yaml_loader as loader

    from quantforge.evaluation.bounded_templates import BoundedEnvironment

    own = Path(lm_eval.__file__).resolve().parent
    functions, metrics, environment = loader._import_func_in_yml, task.get_metric, utils.env

    def function(name: str, folder: Path) -> Any:
        if not Path(folder).resolve().is_relative_to(own):
            raise _refused(folder, f"!function {name} imports Python")
        return functions(name, folder)

    def metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or not _known_metric(name):
            raise _refused(
                Path(name), "a metric that the library does not know is a script of the hub"
            )
        return metrics(name)

    sandbox = BoundedEnvironment()
    sandbox.filters.update(environment.filters)
    loader._import_func_in_yml, task.get_metric, utils.env = function, metric, sandbox
    try:
        yield
    finally:
        loader._import_func_in_yml, task.get_metric, utils.env = functions, metrics, environment


def _known_metric(name: str) -> bool:
    import lm_eval.api.metrics  # noqa: F401 - registers them
    from lm_eval.api.registry import metric_registry

    return name in metric_registry


def _check(path: Path, seen: set[Path]) -> None:
    if path.resolve() in seen:
        return
    seen.add(path.resolve())
    for key, value, line in _pairs(_composed(path), path):
        if found := _code(key, value):
            raise _refused(path, f"line {line}: {found}")
        if key == "include":
            _check(path.parent / value, seen)


def _composed(path: Path) -> Any:
    """Return the nodes of a file, of which nothing was made yet."""
    import yaml

    data = FILES.read(path, TASK, None)
    try:
        _check_depth(path, data)
        return yaml.compose(data, Loader=_loader())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"--tasks {path}: no YAML: {said}", "see the library's task guide"
        ) from error


def _check_depth(path: Path, data: bytes) -> None:
    """Refuse what is nested too deep for a parser that calls itself, from the events of one that does not."""
    import yaml

    depth = 0
    for event in yaml.parse(data, Loader=_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise InputError(
                f"--tasks {path}, line {event.start_mark.line + 1}: nested more than {_DEEPEST} deep",
                "see the library's task guide",
            )


def _loader() -> Any:
    """Return the loader in C, where there is one: tens of times as fast."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _pairs(root: Any, path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield every key with its value (each of a list) and its line, at any depth; nodes that are shared, once."""
    import yaml

    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        line = node.start_mark.line + 1
        if node.tag.removeprefix(_PREFIX) not in _PLAIN_TAGS or not node.tag.startswith(_PREFIX):
            raise _refused(path, f"line {line}: {node.tag} makes the library run Python")
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                waiting += [key, value]
                items = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if isinstance(key, yaml.ScalarNode):
                    for item in items:
                        if isinstance(item, yaml.ScalarNode):
                            yield key.value, item.value, item.start_mark.line + 1


def _code(key: str, value: str) -> str:
    """Say what of a key would run code; "" for nothing."""
    stated = value.strip().lower()
    if key in {"trust_remote_code", "unsafe_code", "hf_evaluate"} and stated not in {
        "false",
        "no",
        "off",
        "null",
        "",
    }:
        return f"{key}: {value}"
    if key == "class":
        return "a task of its own class is Python"
    if key == "dataset_path" and (stated == "pandas" or stated.endswith(".py")):
        return f"{key}: {value} is {'a pickle' if stated == 'pandas' else 'a script'}"
    if (
        key == "dataset_path"
        and "/" in stated
        and Path(value).is_dir()
        and any(Path(value).glob("*.py"))
    ):
        return f"{key}: {value} holds a script"
    return ""


def _refused(where: Path, what: str) -> RefusedError:
    return RefusedError(f"--tasks {where}: {what}", HINT, file=str(where))
