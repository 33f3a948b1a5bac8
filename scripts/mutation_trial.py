"""Try the mutants of one module: its tests run once as they are, and then again in a fork for every mutant.

The first run notes which tests come through which lines of the module, and how long each of them takes. A mutant then
needs the tests that come through its line alone, the quickest first; one outside of all functions needs every test. In
the fork the changed source is executed, and what it defines takes the place of what the module has: the code and the
defaults of functions, and simple values. A source without any change goes this way first, and has to pass.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

LIMIT = 60  # seconds of the processor for one mutant
SLOWER = 4  # times as long as its tests take without it, by the clock
_SIMPLE = (int, float, str, bytes, bool, type(None))
_HOLDERS = (tuple, list, set, frozenset, dict)


def killed(
    module: str, tests: Sequence[str], mutants: Sequence[tuple[int, str]], whole: str
) -> list[bool]:
    """Say of every mutant (its line, its source) whether a test fails; ``whole`` is the source without a change.

    Raises:
        SystemExit: a test fails without any change.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        place = tempfile.mkdtemp()
        try:
            told = os.dup(2)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            trial = _Trial(module, mutants, whole, (write, told), Path(place) / "tests")
            plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={trial.place}"]
            pytest.main([*plain, *tests], plugins=[trial])
        finally:
            shutil.rmtree(place, ignore_errors=True)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        found = answers.read()
    os.waitpid(child, 0)
    if len(found) != len(mutants):
        raise SystemExit(f"{module}: its tests fail without any change")
    return [answer == ord("+") for answer in found]


class _Trial:
    """A plugin of pytest that runs the tests in its own way."""

    def __init__(
        self, module: str, mutants: Sequence[tuple[int, str]], whole: str, told: tuple[int, int], place: Path
    ) -> None:  # fmt: skip
        self.name, self.mutants, self.whole, self.place = module, mutants, whole, place
        self.answers, self.errors = told
        self.reached: dict[
            int, set[int]
        ] = {}  # by line, and by the first line of a function: numbers of tests
        self.seconds: list[float] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests as they are, then those of every mutant."""
        module = importlib.import_module(self.name)
        items = list(session.items)
        for number, item in enumerate(items):
            start = time.monotonic()
            with _tracing(str(module.__file__), self.reached, number):
                failed = _failed(item, items[number + 1] if number + 1 < len(items) else None)
            self.seconds.append(time.monotonic() - start)
            if failed:
                os.write(self.errors, f"{item.nodeid} fails\n{failed}\n".encode())
                return True
        _forget()
        every = range(len(items))
        if not items or self._fails(module, items, every, self.whole):
            os.write(self.errors, b"in a fork, a test fails\n")
            return True
        functions = _functions_of(self.whole)
        for line, source in self.mutants:
            first = max((start for start, end in functions if start <= line <= end), default=None)
            chosen = every
            if first is not None:
                through = self.reached.get(line) or self.reached.get(first, set())
                chosen = sorted(through, key=self.seconds.__getitem__)  # type: ignore[assignment]
            dead = bool(chosen) and self._fails(module, items, chosen, source)
            os.write(self.answers, b"+" if dead else b"-")
        return True

    def _fails(
        self, module: ModuleType, items: Sequence[pytest.Item], chosen: Sequence[int], source: str
    ) -> bool:
        """Whether one of the chosen tests fails with this source, in a child."""
        before = self._places()
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(int(15 + SLOWER * sum(self.seconds[number] for number in chosen)))
                resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
                _exchange(module, source)
                following = [*(items[number] for number in chosen[1:]), None]
                tests = zip((items[number] for number in chosen), following, strict=True)
                code = int(any(_failed(item, after) for item, after in tests))
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for left in self._places() - before:
            with suppress(OSError):
                left.unlink() if left.is_symlink() else shutil.rmtree(left)
        return status != 0

    def _places(self) -> set[Path]:
        """Return the directories of tests; there are none where no test asks for one."""
        return set(self.place.iterdir()) if self.place.exists() else set()


def _failed(item: pytest.Item, following: pytest.Item | None) -> str:
    """Run a test; what it said when it failed, or nothing."""
    reports = runtestprotocol(item, log=False, nextitem=following)
    return "".join(report.longreprtext or "failed" for report in reports if report.failed)


def _forget() -> None:
    """Clear what functions of ours and of tests have kept for a second call."""
    for found in gc.get_objects():
        own = isinstance(found, functools._lru_cache_wrapper) and found.__module__
        if own and own.startswith(("quantforge", "tests")):
            found.cache_clear()


def _functions_of(source: str) -> list[tuple[int, int]]:
    """First and last line of every function, decorators included."""
    return [
        (min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]


@contextmanager
def _tracing(file: str, reached: dict[int, set[int]], number: int) -> Iterator[None]:
    """Note that a test comes through lines of a file."""

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            reached.setdefault(frame.f_lineno, set()).add(number)
        return line

    def call(frame: FrameType, _event: str, _: object) -> Any:
        if frame.f_code.co_filename != file:
            return None
        reached.setdefault(frame.f_code.co_firstlineno, set()).add(number)
        return line

    before = sys.gettrace()
    sys.settrace(call)
    threading.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


# ---- another source in place of a module's own


def _exchange(module: ModuleType, source: str) -> None:
    """Let a module that is imported do what another source says."""
    file = str(module.__file__)
    fresh = ModuleType(module.__name__)
    fresh.__dict__.update(
        {key: value for key, value in vars(module).items() if key.startswith("__")}
    )
    exec(compile(source, file, "exec"), fresh.__dict__)
    before = dict(vars(module))
    _move(module, vars(module), vars(fresh), file)
    for name, value in before.items():  # what others have imported by its name
        if vars(module)[name] is not value:
            for other in [*sys.modules.values()]:
                if getattr(other, "__dict__", {}).get(name) is value and not name.startswith("__"):
                    setattr(other, name, vars(module)[name])


def _move(owner: Any, old: Mapping[str, Any], new: Mapping[str, Any], file: str) -> None:
    for name, value in dict(new).items():
        was = old.get(name)
        if was is value:
            continue
        if isinstance(value, type) and isinstance(was, type):
            if value.__module__ == was.__module__ == new.get("__name__"):
                _move(was, vars(was), vars(value), file)
            continue
        functions = list(zip(_functions(was), _functions(value), strict=False))
        for target, changed in functions:
            _rewrite(target, changed, file)
        if not functions and _simple(value) and _simple(was) and repr(value) != repr(was):
            setattr(owner, name, value)


def _rewrite(target: FunctionType, changed: FunctionType, file: str) -> None:
    target.__defaults__, target.__kwdefaults__ = changed.__defaults__, changed.__kwdefaults__
    code = changed.__code__
    if code.co_filename == file and code.co_freevars == target.__code__.co_freevars:
        target.__code__ = code


def _functions(value: object) -> list[FunctionType]:
    """The functions that something calls: itself, or what it wraps."""
    if isinstance(value, property):
        return [*_functions(value.fget), *_functions(value.fset)]
    if isinstance(value, staticmethod | classmethod):
        return _functions(value.__func__)
    if isinstance(value, functools.cached_property):
        return _functions(value.func)
    wrapped = getattr(value, "__wrapped__", None)
    rest = [] if wrapped is None else _functions(wrapped)
    return [value, *rest] if isinstance(value, FunctionType) else rest


def _simple(value: object) -> bool:
    if type(value) is dict:
        return all(_simple(item) for pair in value.items() for item in pair)
    return type(value) in _SIMPLE or (
        type(value) in _HOLDERS and all(_simple(item) for item in value)  # type: ignore[attr-defined]
    )
