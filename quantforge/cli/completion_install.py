"""``--install-completion [SHELL]`` and ``--show-completion [SHELL]``: of the shell that is named.

The parser knows both without a value, and would pass a name over in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from shutil import which

from quantforge.cli.console import Console
from quantforge.errors import InputError, UsageError, nearest

INSTALL, SHOW = "--install-completion", "--show-completion"
POWERSHELLS = ("powershell", "pwsh")
SHELLS = ("bash", "zsh", "fish", *POWERSHELLS)
PROGRAM, VARIABLE = "quantforge", "_QUANTFORGE_COMPLETE"  # which the scripts set


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether a command line is one of the two with a shell; without one the parser finds that around us."""
    return len(arguments) > 1 and arguments[0] in {INSTALL, SHOW}


def answer(console: Console, arguments: Sequence[str]) -> None:
    """Install or print the script of a shell.

    Raises:
        UsageError: no such shell, or none is recognised.
        InputError: PowerShell, which has to be run, is not there.
    """
    from typer.completion import get_completion_script, install  # type: ignore[attr-defined]

    flag, *words = arguments
    shell = words[0]
    if shell not in SHELLS or len(words) > 1:
        raise UsageError(f"{flag} {' '.join(words)}: unknown", nearest(shell, SHELLS))
    if flag == SHOW:
        console.text(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
        return
    if shell in POWERSHELLS and which(shell) is None:  # its profile is asked for where it lies
        raise InputError(
            f"{flag} {shell}: there is no {shell} on this machine",
            f"bash, zsh or fish, or the script for another machine: quantforge {SHOW} {shell}",
        )
    _, path = install(shell, PROGRAM, VARIABLE)
    console.text(f"completion of {shell} is in {path}; every new terminal has it")
