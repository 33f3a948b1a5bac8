"""Try an installed package as a new user would: the examples of README and of every ``--help``, in an empty directory.

    cd EMPTY && python -I wheel_trial.py

Run by ``scripts/wheel_check`` with the Python of an environment that holds nothing but the wheel and what it asks for.
README is that of the wheel's own metadata. Every command has to end with 0 (`diff` of two formats with 5) and to name
no directory of this environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("quantforge")
HEAVY = {"torch", "transformers", "numba", "pydantic"}
DIFFERS = 5  # exit code of `diff`, of whose two files of the example one is of another format
LACKS = 2  # pydantic, starlette and uvicorn, which an extra brings
WORDS = {"q": "quantize", "quantize --method aw": "awq", "plan --recipe vllm-": "vllm-8bit"}


RELEASE = 'model = "demo"\nsets = ["gguf-ladder"]\n'


class TrialError(Exception):
    """What a new user was promised does not happen."""


def examples() -> list[list[str]]:
    """Return the commands of README, then those of ``--help``, each once, as words."""
    import typer

    from quantforge.cli.app import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    readme = metadata("quantforge").get_payload()
    shown = re.findall(r"^    (quantforge .*)$", str(readme), re.MULTILINE)
    helped = [str(verb.epilog or "").removeprefix("Example: ") for verb in commands.values()]
    words = [shlex.split(line, comments=True) for line in (*shown, *filter(None, helped))]
    return [line for place, line in enumerate(words) if line not in words[:place]]


def run(*arguments: str, expected: int = 0, **environment: str) -> str:
    """Run a command to its end and return what it wrote on stdout.

    Raises:
        TrialError: it ended with another code, or names a directory of this environment.
    """
    begun = time.monotonic()
    ended = subprocess.run(
        [PROGRAM, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    typed = shlex.join(arguments) or environment.get("COMP_WORDS", "")
    print(f"{time.monotonic() - begun:6.1f} s  quantforge {typed}", flush=True)
    said = ended.stdout + ended.stderr
    if ended.returncode != expected:
        raise TrialError(f"{arguments}: exit code {ended.returncode}\n{said}")
    for place in (sys.prefix, str(Path.cwd()), str(Path.home())):
        if place in said:
            raise TrialError(f"{arguments}: names {place}\n{said}")
    return ended.stdout


def check_package() -> None:
    """Look at the package itself: it is the installed one, and importing it imports nothing heavy."""
    import quantforge

    if not Path(quantforge.__file__).is_relative_to(sys.prefix):
        raise TrialError(f"{quantforge.__file__} is not the installed package")
    if found := HEAVY & sys.modules.keys():
        raise TrialError(f"`import quantforge` imports {found}")
    if missing := [name for name in quantforge.__all__ if not hasattr(quantforge, name)]:
        raise TrialError(f"quantforge.{missing[0]} is promised and missing")


def check_help() -> None:
    """Ask for the help of every verb, and complete some words as bash does."""
    from quantforge.cli.app import VERBS

    run("--help")
    for verb in VERBS:
        if "Usage:" not in run("help", verb):
            raise TrialError(f"help {verb} shows nothing")
    for typed, wanted in WORDS.items():
        words = f"quantforge {typed}"
        found = run(
            _QUANTFORGE_COMPLETE="complete_bash",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
        )
        if wanted not in found.split():
            raise TrialError(f"completing {words!r} offers {found!r}")


def check_recipes() -> None:
    """Plan with every built-in recipe."""
    from quantforge.planning.recipe_options import builtin_recipes

    for name in sorted(builtin_recipes()):
        json.loads(run("plan", "demo", "--recipe", name, "--json"))


def main() -> None:
    """Try everything; the first disappointment ends it."""
    begun = time.monotonic()
    check_package()
    check_help()
    Path("release.toml").write_text(
        RELEASE
    )  # that of the example, as the refusal of a missing one says
    for line in examples():
        run(*line[1:], expected={"diff": DIFFERS, "serve": LACKS}.get(line[1], 0))
    check_recipes()
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"the wheel works on Python {version}: {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except TrialError as error:
        sys.exit(f"error: {error}")
