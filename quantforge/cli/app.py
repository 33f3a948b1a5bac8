"""``quantforge``: the verbs and the error boundary.

Typed errors become a message, a hint and their exit code; a signal exits with 128 plus its number after the run
has stopped at a safe point; anything else is a bug of ours, whose traceback is saved to a file.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from quantforge.checkpoint.disk import create
from quantforge.cli import (
    diff,
    doctor,
    evaluate,
    export,
    formats,
    inspect,
    plan,
    quantize,
    recipes,
    reproduce,
    verify,
)
from quantforge.cli.console import Console
from quantforge.errors import InputError, QuantForgeError, ResourceError, UsageError, nearest
from quantforge.model import lean_imports as lean
from quantforge_kernels.cpu import features

_CLICK_USAGE: Any = typer.BadParameter.__bases__[
    0
]  # typer carries its own copy of click, or uses it

app = typer.Typer(
    name="quantforge",
    help="Quantize, convert and evaluate large language models offline.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("quantize", epilog=quantize.EXAMPLE)(quantize.quantize)
app.command("export", epilog=export.EXAMPLE)(export.export)
app.command("eval", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
app.command("reproduce", epilog=reproduce.EXAMPLE)(reproduce.reproduce)
app.command("diff", epilog=diff.EXAMPLE)(diff.diff)
app.command("inspect", epilog=inspect.EXAMPLE)(inspect.inspect)
app.command("formats")(formats.formats)
app.command("recipes")(recipes.recipes)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True
    ),
) -> None:
    """Quantize, convert and evaluate large language models offline."""
    if show:
        from quantforge import __version__

        Console().text(f"quantforge {__version__}")
        raise typer.Exit


class Stopped(BaseException):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise Stopped(number)


def main() -> None:
    """Run the command line and exit with its code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if (
            signal.getsignal(number) is not signal.SIG_IGN
        ):  # a shell's background jobs ignore Ctrl-C
            signal.signal(number, _stop)
    if "torch" not in sys.modules:  # else somebody has called us in a process of theirs
        lean.allow()
    arguments = sys.argv[1:] or ["--help"]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    console = Console(as_json="--json" in arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that is not UTF-8 gets escapes
    try:
        _check_text(arguments)
        _check_environment()
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
    except Stopped as stopped:
        console.note("stopped; the same command again goes on from here")
        sys.exit(128 + stopped.number)
    except (BrokenPipeError, SystemExit) as end:  # typer turns the one into the other
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:  # the boundary: typed errors, and bugs of ours
        if debug:
            traceback.print_exc()
        typed = _typed(error, arguments)
        if typed is None:
            console.note(f"bug: {error!r}\nThis is ours to mend. The traceback is in {_saved()}")
            sys.exit(1)
        console.error(typed)
        sys.exit(typed.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _check_text(arguments: list[str]) -> None:
    """Refuse arguments that are not UTF-8 before any work: no name in a result could be written down.

    Raises:
        UsageError: naming the first one.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the argument {argument!a} is not UTF-8", "rename the file"
            ) from error


def _check_environment() -> None:
    """Refuse a switch of the environment that is neither on nor off.

    Raises:
        UsageError: naming it.
    """
    try:
        features.switched_on()
    except ValueError as error:
        raise UsageError(str(error), "docs/cli.md lists the variables") from error


def _typed(error: Exception, arguments: list[str]) -> QuantForgeError | None:
    """Return the error as one of ours, or None for a bug."""
    if isinstance(error, QuantForgeError):
        return error
    if isinstance(error, _CLICK_USAGE):
        known = [command.name for command in app.registered_commands if command.name]
        verb = arguments[0] if arguments[0] in known else ""
        hint = (
            f"`quantforge {verb} --help` lists what it takes"
            if verb
            else nearest(arguments[0], known)
        )
        return UsageError(error.format_message(), hint)
    if (
        isinstance(error, OSError) and error.errno
    ):  # what no reader has foreseen: a name too long, a bad disk
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE}
        kind = ResourceError if full else InputError
        return kind(f"{where}{error.strerror}", "check the path, its permissions and the disk")
    # torch reports a failed allocation as a RuntimeError, on a GPU as a class of its own
    if (
        isinstance(error, MemoryError)
        or "DefaultCPUAllocator" in str(error)
        or (type(error).__name__ == "OutOfMemoryError")
    ):
        return ResourceError(
            "out of memory",
            "see what `quantforge plan` predicts; --activations disk and fewer --samples need less",
        )
    return None


def _saved() -> str:
    place = Path(tempfile.gettempdir()) / f"quantforge-{os.urandom(8).hex()}.traceback"
    with os.fdopen(create(place, 0o600), "wb") as file:
        file.write(f"{sys.argv}\n\n{traceback.format_exc()}".encode("utf-8", "backslashreplace"))
    return str(place)
