"""``quantforge``: the verbs and the error boundary.

Typed errors become a message, a hint and their exit code; a signal exits with 128 plus its number after the run
has stopped at a safe point; anything else is a bug of ours, whose traceback is saved to a file.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import traceback
from types import FrameType
from typing import NoReturn

import typer

from quantforge.cli import doctor, evaluate, export, formats, inspect, plan, quantize, recipes
from quantforge.cli.console import Console
from quantforge.errors import QuantForgeError

app = typer.Typer(
    name="quantforge",
    help="Quantize, convert and evaluate large language models offline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("quantize", epilog=quantize.EXAMPLE)(quantize.quantize)
app.command("export", epilog=export.EXAMPLE)(export.export)
app.command("eval", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
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
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    console = Console(as_json="--json" in sys.argv)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except QuantForgeError as error:
        if debug:
            traceback.print_exc()
        console.error(error)
        sys.exit(error.exit_code)
    except Stopped as stopped:
        console.note("stopped; the same command again goes on from here")
        sys.exit(128 + stopped.number)
    except Exception:  # the boundary: everything else is a bug of ours
        if debug:
            raise
        with tempfile.NamedTemporaryFile(
            "w", prefix="quantforge-", suffix=".traceback", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{sys.argv}\n\n{traceback.format_exc()}")
        console.note(
            f"bug: {sys.exc_info()[1]!r}\nThis is ours to mend. The traceback is in {file.name}"
        )
        sys.exit(1)
