"""``--install-completion [SHELL]`` and ``--show-completion [SHELL]``: of the shell that is named.

The parser knows both without a value, and would pass a name over in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantforge.cli.console import Console
from quantforge.errors import UsageError, nearest

INSTALL, SHOW = "--install-completion", "--show-completion"
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
PROGRAM, VARIABLE = "quantforge", "_QUANTFORGE_COMPLETE"  # which the scripts set


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether a command line is one of the two with a shell; without one the parser finds that around us."""
    return len(arguments) > 1 and arguments[0] in {INSTALL, SHOW}


def answer(console: Console, arguments: Sequence[str]) -> None:
    """Install or print the script of a shell.

    Raises:
        UsageError: no such shell, or none is recognised.
    """
    from typer.completion import get_completion_script, install  # type: ignore[attr-defined]

    flag, *words = arguments
    shell = words[0]
    if shell not in SHELLS or len(words) > 1:
        raise UsageError(f"{flag} {' '.join(words)}: unknown", nearest(shell, SHELLS))
    if flag == SHOW:
        console.text(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
        return
    _, path = install(shell, PROGRAM, VARIABLE)
    console.text(f"completion of {shell} is in {path}; every new terminal has it")
