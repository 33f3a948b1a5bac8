"""Mutants kept as statements, so that they can be tried after code was moved: used by ``mutation.py --save, --saved``.

A file has a line of JSON for each module of that time: the names of the tests that hold it, and its mutants. A mutant
is the text of a statement (of a compound one, its header), the qualified name of the function around it, which change
of that statement it is, and the changed statement.

Later a statement is looked for in all files of the product: by its text, and where that is in several places, by the
function's qualified name, its name, which of the equal statements of the function it was, and the file's name. If the
text is nowhere, local names may have changed: a statement is accepted that is the same but for the names of variables,
in a function of the same name or in one place only. Everything else counts as gone.

Tests move, too: their functions are looked for by name in all of ``tests``; how many are missing is printed, and more
can be named. Which of them meet a mutant is found out by running them once (`mutation_trial`): those that come through
its line.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutation
from mutation_trial import killed

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "quantforge",
    "quantforge_files",
    "kernels/quantforge_kernels",
    "calibration/quantforge_calibration",
)
_BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class SavedMutant:
    """A change of a statement.

    Attributes:
        function: the qualified name of the function around the statement; empty at the top of a module.
        statement: its text.
        occurrence: which of the statements of the function with this text it is.
        number: which change of the statement.
        change: its text.
        changed: the changed statement.
    """

    function: str
    statement: str
    occurrence: int
    number: int
    change: str
    changed: str


@dataclass
class Statement:
    """A statement of a file that can be changed."""

    path: Path
    node: ast.stmt
    function: str
    text: str
    occurrence: int = 0


def header(node: ast.stmt) -> str:
    """Return the text of a statement, without what is in its blocks and without decorators."""
    changes: dict[str, Any] = {key: [ast.Pass()] for key in _BODIES if getattr(node, key, None)}
    changes |= {key: [] for key in ("orelse", "handlers", "decorator_list") if hasattr(node, key)}
    if isinstance(node, ast.Match):
        changes["cases"] = [_with(case, {"body": [ast.Pass()]}) for case in node.cases]
    if isinstance(node, ast.Try | ast.TryStar):
        changes["finalbody"] = [ast.Pass()]
    return ast.unparse(_with(node, changes))


def _with(node: Any, changes: Mapping[str, Any]) -> Any:
    new = copy.copy(node)
    for key, value in changes.items():
        setattr(new, key, value)
    return new


def shape(text: str) -> str:
    """Return a statement's text with ``v0``, ``v1`` ... in place of the names of variables."""
    tree, numbers = ast.parse(text), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    return ast.unparse(tree)


def statements(tree: ast.AST, path: Path) -> list[Statement]:
    """Return the statements of a file in their order."""
    found, seen = [], defaultdict[tuple[str, str], int](int)
    for node, function in _walk(tree, ""):
        statement = Statement(path, node, function, header(node))
        statement.occurrence = seen[function, statement.text]
        seen[function, statement.text] += 1
        found.append(statement)
    return found


def _walk(node: ast.AST, function: str) -> Iterator[tuple[ast.stmt, str]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.stmt):
            yield child, function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
        yield from _walk(child, inner)


def places(tree: ast.AST) -> dict[int, list[mutation.Place]]:
    """Return the changes of each statement of a tree, by its ``id``."""
    owner: dict[int, int] = {}
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            owner[id(child)] = (
                id(child) if isinstance(child, ast.stmt) else owner.get(id(parent), 0)
            )
    found = defaultdict(list)
    for place in mutation._places(tree):
        found[owner[id(place[0])]].append(place)
    return found


# ---- saving


def save(file: Path, count: int, seed: int, same: Mapping[str, Any]) -> int:
    """Write ``count`` mutants of each module of `mutation.TESTS`, spread evenly over its lines."""
    lines = []
    for module, tests in mutation.TESTS.items():
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        chance = random.Random(f"{module} {seed}")
        mutants = mutation._sample(_all_mutants(path, same.get(module, [])), count, chance)
        document = {
            "module": module,
            "tests": _test_names(tests),
            "mutants": [asdict(one) for one in mutants],
        }
        lines.append(json.dumps(document))
        print(f"{module}: {len(mutants)} mutants, {len(document['tests'])} tests")
    file.write_text("\n".join(lines) + "\n")
    return 0


def _all_mutants(path: Path, same: Sequence[Mapping[str, Any]]) -> list[SavedMutant]:
    """Return the mutants of a file in the order of its lines, but those that are known to compute the same."""
    source = path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    by_statement, found = places(tree), []
    for statement in statements(tree, path):
        placed = by_statement.get(id(statement.node), [])
        for number in range(len(placed)):
            line = getattr(placed[number][0], "lineno", 1)
            change, changed = _apply(statement, number)
            mutant = mutation.Mutant(line, change, "", lines[line - 1])
            if changed != statement.text and not mutation._same(mutant, same):
                found.append((line, SavedMutant(
                    statement.function, statement.text, statement.occurrence, number, change, changed
                )))  # fmt: skip
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


def _apply(statement: Statement, number: int) -> tuple[str, str]:
    """Return the text of a change, and the changed statement; the statement itself stays."""
    alone = _alone(statement.node)
    _, shown, change = places(alone)[id(alone.body[0])][number]
    before = shown()
    change()
    return f"{before} -> {shown()}"[:100], header(alone.body[0])


def _alone(node: ast.stmt) -> ast.Module:
    return ast.Module([copy.deepcopy(node)], [])


def _test_names(tests: Sequence[str]) -> list[str]:
    """Return the names of the test functions that a row of `mutation.TESTS` lists."""
    names = []
    for test in tests:
        file, _, name = test.partition("::")
        names += [name] if name else _functions_of_tests(ROOT / "tests" / file)
    return names


def _functions_of_tests(path: Path) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


# ---- trying them again


def try_again(
    file: Path,
    modules: Sequence[str],
    more_tests: Sequence[str],
    report: Path | None,
    earlier: Path | None,
) -> int:
    """Try saved mutants; print what became of each, and the shares that are caught and gone.

    Args:
        file: with the saved mutants.
        modules: as they were called when they were saved; all, if there is none.
        more_tests: files or names of tests, as pytest takes them, beside those that were saved.
        report: a file for what is printed.
        earlier: such a file of an older version: how many it caught of the mutants that are present in both.
    """
    index, tests = Index(), _tests_by_name()
    states: dict[str, str] = {}
    lines = []
    for document in map(json.loads, file.read_text().splitlines()):
        module = document["module"]
        if modules and module not in modules:
            continue
        kept = [f"{path}::{name}" for name in document["tests"] for path in tests[name]]
        lines.append(
            f"{module}: {sum(name in tests for name in document['tests'])} of {len(document['tests'])} tests"
        )
        groups = defaultdict(list)
        for mutant in (SavedMutant(**one) for one in document["mutants"]):
            found = index.find(mutant, module.rpartition(".")[2])
            key = f"{module} {mutant.function} {mutant.occurrence} {mutant.number}: {mutant.change}"
            states[key] = "gone"
            if found:
                groups[found.path].append((found, mutant, key))
        for path, group in groups.items():
            dead = _try(path, [pair[:2] for pair in group], [*kept, *more_tests])
            states |= {
                key: "caught" if one else "survived"
                for (*_, key), one in zip(group, dead, strict=True)
            }
        lines += [
            f"{state:8} {key}" for key, state in states.items() if key.startswith(f"{module} ")
        ]
        print("\n".join(lines[-len(document["mutants"]) - 1 :]), flush=True)
    present = [key for key, state in states.items() if state != "gone"]
    caught = sum(states[key] == "caught" for key in present)
    lines.append(f"{len(states)} mutants: {len(states) - len(present)} gone, {len(present)} present, {caught} caught "
                 f"({caught / max(len(present), 1):.1%} of those present)")  # fmt: skip
    if earlier:
        known = {line[9:]: line[:9].strip() for line in earlier.read_text().splitlines()}
        both = [key for key in present if known.get(key, "gone") != "gone"]
        now, then = (sum(one[key] == "caught" for key in both) for one in (states, known))
        lines.append(
            f"of {len(both)} present in both versions {then} were caught before, {now} are now"
        )
    print("\n".join(lines[-1 - bool(earlier) :]))
    if report:
        report.write_text("\n".join(lines) + "\n")
    return 0


def _tests_by_name() -> defaultdict[str, list[Path]]:
    found = defaultdict[str, list[Path]](list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _functions_of_tests(path):
            found[name].append(path)
    return found


def _product_files() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


class Index:
    """All statements of the product, by their text and by their shape."""

    def __init__(self) -> None:
        self.by_text = defaultdict[str, list[Statement]](list)
        self.by_shape = defaultdict[str, list[Statement]](list)
        for path in _product_files():
            for one in statements(ast.parse(path.read_text()), path):
                self.by_text[one.text].append(one)
                self.by_shape[shape(one.text)].append(one)

    def find(self, mutant: SavedMutant, file: str) -> Statement | None:
        """Return where a mutant's statement is, or None; ``file`` is the name of the file in which it was."""
        name = mutant.function.rpartition(".")[2]
        fits: tuple[Callable[[Statement], bool], ...] = (
            lambda one: one.function == mutant.function and one.path.stem == file,
            lambda one: one.function == mutant.function,
            lambda one: bool(name) and one.function.rpartition(".")[2] == name,
        )
        texts = self.by_text.get(mutant.statement, [])
        for candidates in (texts, self.by_shape.get(shape(mutant.statement), [])):
            for fit in fits:
                chosen = [one for one in candidates if fit(one)]
                if len(chosen) > 1:
                    chosen = [one for one in chosen if one.occurrence == mutant.occurrence]
                if len(chosen) == 1:
                    return chosen[0]
            if len(candidates) == 1:
                return candidates[0]
        chosen = [one for one in texts if one.path.stem == file]
        return chosen[0] if len(chosen) == 1 else None


def _try(
    path: Path, group: Sequence[tuple[Statement, SavedMutant]], tests: Sequence[str]
) -> list[bool]:
    """Say of each mutant of a file whether a test fails."""
    source = path.read_text()
    changed = []
    for statement, mutant in group:
        tree = ast.parse(source)
        node = next(
            one.node for one in statements(tree, path)
            if (one.node.lineno, one.text) == (statement.node.lineno, statement.text)
        )  # fmt: skip
        place = places(tree)[id(node)][mutant.number]
        place[2]()
        changed.append((getattr(place[0], "lineno", node.lineno), ast.unparse(tree)))
    return killed(_module_name(path), tests, changed, source) if tests else [False] * len(group)


def _module_name(path: Path) -> str:
    below = path.relative_to(ROOT).with_suffix("")
    parts = below.parts[1:] if below.parts[0] in {"kernels", "calibration"} else below.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
