"""Run the tests with the lowest declared versions of dependencies, and with some between those and the pinned ones.

    python scripts/version_ranges.py
    python scripts/version_ranges.py --only lowest -- tests/cli tests/interop -k gguf

What follows ``--`` is passed to pytest. Environments are created in the checkout with plain pip, and again when
pyproject.toml or the versions change; each takes some 8 GB, most of it the CUDA build of torch:

    .venv-lowest      the lowest version of every direct dependency, extras included, that pyproject.toml declares
    .venv-between     the versions of `BETWEEN`, everything else as constraints.txt pins it

If the lowest version of a dependency fails, raise it in pyproject.toml to the lowest one that passes. Exits with 1 if
the tests failed in an environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BETWEEN = ("torch==2.11.0",)
FOLLOWING = ("triton",)  # dependencies of these, each release of which needs its own version


def declared() -> list[str]:
    """Return the direct dependencies in pyproject.toml, extras included, as ``name>=version``.

    Raises:
        SystemExit: a range has another form.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    found = sorted({line for line in lines if not line.startswith(f"{project['name']}[")})
    for line in found:
        if not re.fullmatch(r"[\w.-]+>=[\d.]+(;.*)?", line):
            raise SystemExit(f"pyproject.toml: {line}: a range is NAME>=VERSION")
    return found


def wanted(name: str) -> list[str]:
    """Return the exact versions for an environment, as lines of a pip constraints file."""
    if name == "lowest":
        return [line.replace(">=", "==") for line in declared()]
    others = {re.split("==", line)[0] for line in BETWEEN} | {*FOLLOWING}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    return [*BETWEEN, *(line for line in pinned if line.split("==")[0] not in others)]


def environment(name: str) -> Path:
    """Return the directory of an environment, created if it is missing or out of date.

    Raises:
        CalledProcessError: pip cannot install these versions, or not together; its output says which.
    """
    place, versions = ROOT / f".venv-{name}", wanted(name)
    text = "\n".join([*versions, (ROOT / "pyproject.toml").read_text(), sys.version])
    stamp = hashlib.sha256(text.encode()).hexdigest()[:16]
    if (place / "stamp").is_file() and (place / "stamp").read_text() == stamp:
        return place
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (place / "versions.txt").write_text("\n".join(versions) + "\n")
    install = [str(place / "bin/pip"), "install", "--quiet", "--no-compile"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    project = f".[{','.join(extra for extra in extras if extra != 'all')}]"
    constrained = ["--constraint", str(place / "versions.txt"), "--editable", project]
    subprocess.run([*install, *constrained], cwd=ROOT, check=True)
    (place / "stamp").write_text(stamp)
    return place


def tested(place: Path, arguments: list[str]) -> int:
    """Run pytest in an environment, as scripts/test does; return its exit code."""
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        str(place / "bin/python"),
        "-m",
        "pytest",
        "--numprocesses",
        "2",
        "--dist",
        "worksteal",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=kept | quiet | {"PATH": path}, check=False
    ).returncode


def main() -> None:
    """Create the environments and run the tests in each."""
    names = ("lowest", "between")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=names)
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    codes = {}
    for name in [options.only] if options.only else names:
        place = environment(name)
        print(f"== {place.name}", flush=True)
        codes[name] = tested(place, options.pytest)
    for name, code in codes.items():
        print(f".venv-{name}: {'passed' if code == 0 else f'failed, pytest ended with {code}'}")
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
