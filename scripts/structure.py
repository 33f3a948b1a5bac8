"""Print figures about the project's structure; fail on imports that go up the order of folders or in a cycle.

    python scripts/structure.py [--json] [--tests]
    python scripts/structure.py --write     # rewrite the table of files at the head of every folder

The order, from top to bottom, is `ORDER`: a module imports from its own folder and from folders below it, for types
too (``if TYPE_CHECKING``), and never in a cycle. Only `quantforge` itself is exempt: it re-exports `quantforge.api`.
All other figures are printed for information and have no limit. Except for the documentation they cover the packages,
not their tests. Code lines are lines that are not blank, a comment or a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "quantforge": ROOT / "quantforge",
    "quantforge_files": ROOT / "quantforge_files",
    "quantforge_kernels": ROOT / "kernels" / "quantforge_kernels",
    "quantforge_calibration": ROOT / "calibration" / "quantforge_calibration",
}
LEAVES = ("quantforge_calibration", "quantforge_kernels", "quantforge_files")
# From top to bottom. The folder of `quantforge` itself is the empty name, which anybody may import (the version).
ORDER = (
    "__main__", "cli", "api", "serving", "verification", "evaluation", "execution", "runtime", "planning",
    "artifacts", "engines", "formats", "quantizers", "model", "recipe", "settings", "progress", "files", "packers",
    "numerics", "architectures", "plans", "notation", "scheme", "grids", "events", "cache_kinds", "arguments",
    "errors", *LEAVES, "",
)  # fmt: skip
TABLE, WIDEST = "In this folder:", 114
ENFORCED = ("imports against the order of folders", "import cycles")
# Pages that are history.
NOT_DOCUMENTATION = ("CHANGELOG.md",)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def modules() -> dict[str, Path]:
    """Return every module of the four packages by its full name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def parsed(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imports(name: str) -> tuple[str, ...]:
    """Return names of modules that a module imports: at its top, inside of functions, and for types."""
    return imported(parsed(name))


@cache
def imported(tree: ast.Module) -> tuple[str, ...]:
    """Return names of modules that a syntax tree imports anywhere."""
    found: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in modules() else node.module)
    return tuple(found)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree except expressions; no statement is within one."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from nodes(node)


@cache
def definitions(tree: ast.Module) -> tuple[Definition, ...]:
    """Return every function and class of a module; none is within an expression, and most of a tree is."""
    found: list[Definition] = []
    left: list[ast.AST] = [tree]
    for node in left:
        if isinstance(node, Definition):
            found.append(node)
        left += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr)]
    return tuple(found)


def folder(name: str) -> str:
    """Return the folder, or the file at the top of ``quantforge``, to which a module belongs; a leaf is one."""
    package, _, inner = name.partition(".")
    return package if package in LEAVES else inner.partition(".")[0]


def edges() -> dict[str, set[str]]:
    """Return which modules of ours each module imports, anywhere; `quantforge` itself counts as importing none."""
    found = {
        name: {other for other in imports(name) if other in modules()} - {name}
        for name in modules()
    }
    return found | {"quantforge": set()}


def upwards() -> list[tuple[str, str]]:
    """Return imports against the order. Of the leaves, only the one that opens files is for the others."""
    rank = {name: number for number, name in enumerate(ORDER)}
    return [
        (name, other)
        for name, others in edges().items()
        for other in sorted(others)
        if rank[folder(other)] < rank[folder(name)]
        or (folder(name) in LEAVES and folder(other) not in {folder(name), LEAVES[-1]})
    ]


def circles() -> list[list[str]]:
    """Return groups of modules that import each other (strongly connected, after Tarjan)."""
    known, found = edges(), []
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(known[name]):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in known:
        if name not in index:
            visit(name)
    return found


@cache
def lines(name: str) -> int:
    """Count lines of a module that are neither blank, nor only comment, nor docstring."""
    text, tree = modules()[name].read_text(encoding="utf-8"), parsed(name)
    counted: set[int] = set()
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            counted |= set(range(token.start[0], token.end[0] + 1))
    for node in (tree, *definitions(tree)):
        if ast.get_docstring(node):
            first = node.body[0]
            counted -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(counted)


def summary(path: Path, widest: int) -> str:
    """Return the first sentence of a module's docstring, cut at a pause where it is longer than ``widest``.

    Nothing is cut within brackets or after "et al.".
    """
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    text = " ".join(first.split())
    ends = [found.start() for found in re.finditer(r"(?<=[\w`)])(?<!\bet al)\.(?:\s|$)", text)]
    sentence = text[: next((end for end in ends if outside_brackets(text[:end])), len(text))]
    while len(sentence) > widest:
        pauses = (sentence[:end] for end, char in enumerate(sentence) if char in ":,;(")
        shorter = max(filter(outside_brackets, pauses), key=len, default="")
        sentence = (shorter or sentence[:widest].rpartition(" ")[0]).rstrip()
    return sentence


def outside_brackets(text: str) -> bool:
    """Return whether no bracket is open at the end of a text."""
    return text.count("(") <= text.count(")")


def described(init: Path) -> str:
    """Return the text of a folder's ``__init__.py`` with the table of its files."""
    here = {path.stem: path for path in sorted(init.parent.glob("*.py")) if path != init}
    here |= {f"{path.parent.name}/": path for path in sorted(init.parent.glob("*/__init__.py"))}
    width = max((len(name) for name in here), default=0)
    table = "".join(
        f"    {name:{width}}  {summary(path, WIDEST - width)}\n" for name, path in here.items()
    )
    text = init.read_text()
    first = ast.parse(text).body[0]
    assert isinstance(first, ast.Expr)
    lines = text.splitlines(keepends=True)
    head, rest = "".join(lines[: first.end_lineno]), "".join(lines[first.end_lineno :])
    told = head.strip().strip('"').partition(TABLE)[0].rstrip()
    return f'"""{told}\n\n{TABLE}\n\n{table}"""\n{rest}' if table else text


def folders() -> list[Path]:
    """Return the ``__init__.py`` of every folder with a table."""
    found = [path for name, path in modules().items() if path.name == "__init__.py"]
    return [path for path in found if path != PACKAGES["quantforge"] / "__init__.py"]


def import_lines(name: str) -> int:
    """Count code lines of a module that belong to imports, wherever they are."""
    found: set[int] = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(found)


def importers() -> dict[str, set[str]]:
    """Return which files use each file (packages' own `__init__.py` apart).

    A module that is only listed in a table at the top of another, such as a family in the list of families, is not used
    by it; a module whose name is an argument of a call, such as `import_module`, is.
    """
    found: dict[str, set[str]] = {
        name: set() for name, path in modules().items() if path.name != "__init__.py"
    }
    for name, others in edges().items():
        listed = table_entries(parsed(name))
        for other in others | named_in_calls(parsed(name)):
            if other in found and other.rpartition(".")[2] not in listed:
                found[other].add(name)
    return found


def table_entries(tree: ast.Module) -> set[str]:
    """Return names that a module uses only as entries of tuples, lists and dictionaries at its top."""
    entries, uses = Counter[str](), Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses[node.id] += 1
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
            for node in ast.walk(statement.value):
                values = node.values if isinstance(node, ast.Dict) else getattr(node, "elts", ())
                for value in values:
                    root = value
                    while isinstance(root, ast.Attribute):
                        root = root.value
                    if isinstance(root, ast.Name):
                        entries[root.id] += 1
    return {name for name, count in entries.items() if count == uses[name]}


def named_in_calls(tree: ast.Module) -> set[str]:
    """Return modules of ours whose full names are arguments of calls."""
    arguments = [
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return {text for text in arguments if text in modules()}


def documentation_words() -> int:
    """Count words of the pages that people write, the changelog apart."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sum(
        len(page.read_text(encoding="utf-8").split())
        for page in pages
        if page.name not in NOT_DOCUMENTATION
    )


def test_cases() -> int:
    """Count the cases that `scripts/test` runs; it takes half a minute."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"^tests/.*: (\d+)$", shown, re.M)))


def figures(*, tests: bool = False) -> dict[str, float]:
    """Return all figures by name; the number of test cases only if asked for."""
    total = sum(len(path.read_text().splitlines()) for path in modules().values())
    found: dict[str, float] = {
        ENFORCED[0]: len(upwards()),
        ENFORCED[1]: len(circles()),
        "code lines": sum(map(lines, modules())),
        "files": len(modules()),
        "files that exactly one other file imports": sum(
            len(users) == 1 for users in importers().values()
        ),
        "percent of all lines that are imports": round(
            100 * sum(map(import_lines, modules())) / total, 1
        ),
        "words of documentation": documentation_words(),
    }
    return found | ({"test cases": test_cases()} if tests else {})


def main() -> int:
    """Print the figures; return 1 if an import goes up the order or in a cycle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tests", action="store_true", help="count the test cases, too")
    options = parser.parse_args()
    if options.write:
        for path in folders():
            path.write_text(described(path))
    found = figures(tests=options.tests)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{value:9,}  {name}{' (must be 0)' if name in ENFORCED else ''}")
    upward = [f"{name} imports {other}" for name, other in upwards()]
    broken = dict(zip(ENFORCED, (upward, [" ".join(group) for group in circles()]), strict=True))
    for name, items in broken.items():
        if items:
            print(f"{len(items)} {name}:", *items, sep="\n  ", file=sys.stderr)
    return int(any(broken.values()))


if __name__ == "__main__":
    sys.exit(main())
