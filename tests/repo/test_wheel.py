"""The wheel: it holds all of the packages and their data, and asks for everything that they import.

`scripts/wheel_check` installs it elsewhere and tries it, which takes minutes.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

import quantforge

ROOT = Path(__file__).parents[2]
# Where a folder of the checkout lies in the wheel.
FOLDERS = {
    "quantforge": "quantforge",
    "quantforge_files": "quantforge_files",
    "kernels/quantforge_kernels": "quantforge_kernels",
    "calibration/quantforge_calibration": "quantforge_calibration",
    "recipes": "quantforge/recipes",
    "models/demo": "quantforge/models/demo",
}
OURS_ALONE = {"dev", "docs", "fuzz"}  # extras of those who work on the project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of the wheel, built from the checkout."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (path,) = out.glob("*.whl")
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def described(wheel: dict[str, bytes], name: str) -> bytes:
    """Return a file of the wheel's description of itself."""
    (found,) = (data for path, data in wheel.items() if path.endswith(f".dist-info/{name}"))
    return found


def test_the_wheel_holds_the_packages_whole_and_nothing_else(wheel: dict[str, bytes]) -> None:
    there = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}": path.read_bytes()
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name: data for name, data in wheel.items() if ".dist-info/" not in name}
    assert packed.keys() ^ there.keys() == set()
    assert [name for name in packed if packed[name] != there[name]] == []


def test_it_says_what_it_is_and_has_a_command(wheel: dict[str, bytes]) -> None:
    about = message_from_bytes(described(wheel, "METADATA"))
    assert (about["Name"], about["Version"]) == ("quantforge", quantforge.__version__)
    assert about.get_payload() == (ROOT / "README.md").read_text()
    assert described(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    entry = re.search(
        r"^quantforge = ([\w.]+):(\w+)$", described(wheel, "entry_points.txt").decode(), re.M
    )
    assert entry is not None
    assert callable(getattr(importlib.import_module(entry[1]), entry[2]))


def test_it_asks_for_all_that_it_imports(wheel: dict[str, bytes]) -> None:
    asked = set()
    for line in message_from_bytes(described(wheel, "METADATA")).get_all("Requires-Dist", []):
        extra = re.search(r"extra == '([\w-]+)'", line)
        if extra is None or extra[1] not in OURS_ALONE:
            asked.add(re.split(r"[^\w.-]", line)[0].lower().replace("_", "-"))
    known = packages_distributions()
    own = {Path(inside).parts[0] for inside in FOLDERS.values()}
    missing = {
        (name, path)
        for path, data in wheel.items()
        if path.endswith(".py")
        for name in imported(data)
        if name not in sys.stdlib_module_names | own
        and asked.isdisjoint(one.lower().replace("_", "-") for one in known.get(name, [name]))
    }
    assert missing == set()


def imported(source: bytes) -> set[str]:
    """Return the packages that a module imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found
