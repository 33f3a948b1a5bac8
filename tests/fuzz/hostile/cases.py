"""Draw a case from a seed and a number: which files are damaged and how, and the command with its options.

Of ten cases seven damage a file by its role, two give odd values to options, and one does both.
"""

from __future__ import annotations

import inspect
import random
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from tests.fuzz.hostile.damage import damages
from tests.fuzz.hostile.roles import ROLES

ODD_OPTIONS = (
    "", " ", "-1", "0", "1", "9" * 5000, "1e400", "nan", "\x1b[31mred", "a" * 300, "../x", "/dev/zero", "\udcff\udcfe",
    "--", "=", "=1", "{}", "[", "*", "re:(a+)+$", "re:[", "re:" + "(" * 500, "\u202e", "a=b=c", "text.txt=1e400",
    "int4:g128:sym", "int99", "int4:g0", "int4:g-1", "int4:" + "g1" * 500, "model", "ct", "m.gguf", "/dev/null", ".",
    "/", "fifo", "nowhere/x", "1.5", "true", "2%", "٣", "１２", "\x85", "int4:g٣", "a\nb", "100000", "4294967296",
    "18446744073709551616", "~", "~nobody/x", "$HOME", "%s%n", "text.txt:text:text", "builtin,builtin", "self", ",",
)  # fmt: skip


@dataclass
class Case:
    """A command in a tree of which some files were damaged; ``changes`` describes it for people."""

    number: int
    arguments: list[str]
    changes: list[str] = field(default_factory=list)


def draw(seed: int, number: int, tree: Path) -> Case:
    """Damage ``tree`` (a copy of the sound one) and return the command to run in it."""
    chance = random.Random(f"hostile {seed} {number}")
    name = chance.choice(sorted(ROLES))
    role = ROLES[name]
    command = chance.choice(role.commands)
    out = chance.choice(("out", "out", "out", "o\u00fct put", "out\x1b[1m", "x" * 240, "a/b"))
    case = Case(number, [part.replace("{out}", out) for part in command])
    turn = chance.random()
    if turn < 0.8:
        _damage(case, name, role.path, tree, chance)
    if turn > 0.7:
        _options(case, chance)
    if chance.random() < 0.3:
        case.arguments.append("--json")
    return case


def copy_tree(root: Path, directory: Path) -> Path:
    """Copy the sound tree; files are hard links, which damage replaces and never writes to."""
    tree = directory / "tree"
    shutil.copytree(root, tree, symlinks=True, copy_function=_link)
    return tree


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _damage(case: Case, name: str, pattern: str, tree: Path, chance: random.Random) -> None:
    path = tree / pattern
    if pattern.startswith(".*"):
        files = [item for item in tree.rglob("*") if item.is_file()
                 and fnmatch(item.relative_to(tree).parts[0], pattern)]  # fmt: skip
        path = chance.choice(sorted(files)) if files else tree / "nothing"
    if not path.exists():
        return
    for _ in range(chance.choice((1, 1, 1, 2))):
        damage = chance.choice(damages(path))
        if path.is_file() and not path.is_symlink():
            damage(path, tree, chance)
            case.changes.append(f"{damage.__name__} {name} ({path.relative_to(tree)})")


def _options(case: Case, chance: random.Random) -> None:
    """Give one or two options of the verb an odd value, or an odd value to an argument."""
    options = options_of(case.arguments[0])
    for _ in range(chance.choice((1, 1, 2))):
        value = chance.choice(ODD_OPTIONS)
        if chance.random() < 0.15:
            at = chance.randrange(1, len(case.arguments))
            case.arguments[at] = value
            case.changes.append(f"argument {at}")
            continue
        name, flag = chance.choice(options)
        case.arguments += [name] if flag else [name, value]
        case.changes.append(f"option {name}")


@cache
def options_of(verb: str) -> tuple[tuple[str, bool], ...]:
    """Return every option of a verb, and whether it is a flag."""
    from typer.main import get_command

    from quantforge.cli.app import app

    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    return tuple(
        (parameter.opts[-1], bool(parameter.is_flag))
        for parameter in command.params
        if parameter.param_type_name == "option" and not inspect.isabstract(parameter)
    )
