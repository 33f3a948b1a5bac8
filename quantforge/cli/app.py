"""``quantforge``: the verbs and the error boundary.

Typed errors become a message, a hint and their exit code; a signal exits with 128 plus its number after the run
has stopped at a safe point; anything else is a bug of ours, whose traceback is saved to a file.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from quantforge.cli import (
    allocate,
    bench,
    demo,
    diff,
    doctor,
    evaluate,
    export,
    formats,
    generate,
    inspect,
    plan,
    quantize,
    recipes,
    release,
    reproduce,
    serve,
    sweep,
    verify,
)
from quantforge.cli.console import Console
from quantforge.cli.error_types import as_ours, saved
from quantforge.cli.ranks import check_ranks, said_already
from quantforge.cli.stopping import Stopped, stop
from quantforge.cli.usage_errors import for_verb
from quantforge.cli.verb import Verb, Verbs
from quantforge.errors import UsageError
from quantforge.numerics.shared_processors import processors_are_shared, wait_briefly
from quantforge_files import system
from quantforge_kernels.cpu import features

DECODING = {"eval", "generate"}  # their small products are over before a thread has slept
# They keep what an interrupted run has finished.
RESUMED = {"allocate", "quantize", "release", "sweep"}

app = typer.Typer(
    name="quantforge",
    cls=Verbs,
    help="Quantize, convert and evaluate large language models offline.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
for _verb, _example, _about in (
    (plan.plan, plan.EXAMPLE, "Show what `quantize` would do; writes nothing."),
    (quantize.quantize, quantize.EXAMPLE, "Quantize a model."),
    (allocate.allocate, allocate.EXAMPLE, "Choose a scheme for each layer, within a size."),
    (export.export, export.EXAMPLE, "Move a model into another format."),
    (release.release, release.EXAMPLE, "Make many variants of a model, to be published."),
    (sweep.sweep, sweep.EXAMPLE, "Compare all combinations of some choices."),
    (evaluate.evaluate, evaluate.EXAMPLE, "Compare models: divergence, perplexity, size, speed."),
    (bench.bench, bench.EXAMPLE, "Measure models or a server under a stream of requests."),
    (generate.generate, generate.EXAMPLE, "Let models continue a text, answer or chat."),
    (serve.serve, serve.EXAMPLE, "Serve a model to clients of OpenAI's API."),
    (verify.verify, verify.EXAMPLE, "Check a finished model, ours or anyone's."),
    (reproduce.reproduce, reproduce.EXAMPLE, "Make a result again and compare every file."),
    (diff.diff, diff.EXAMPLE, "Compare what two models store."),
    (inspect.inspect, inspect.EXAMPLE, "Show what is in a model, from headers alone."),
    (formats.formats, "", "List formats, and what converts into what."),
    (recipes.recipes, "", "List the built-in recipes, or print one."),
    (demo.demo, demo.EXAMPLE, "Copy out the small model that comes with the package."),
    (doctor.doctor, "", "Check whether this machine is fit."),
):
    _name = {"evaluate": "eval"}.get(_verb.__name__, _verb.__name__)
    app.command(_name, cls=Verb, epilog=_example or None, short_help=_about)(_verb)


def _verbs(incomplete: str) -> list[str]:
    return [name for name in _group().commands if name.startswith(incomplete)]


@app.command("help", cls=Verb, short_help="Show the options of a verb.")
def show_help(
    verb: Annotated[str, typer.Argument(metavar="[VERB]", autocompletion=_verbs)] = "",
) -> None:
    """Show what a verb does and takes, or the verbs."""
    _print_help(verb)


def _print_help(verb: str) -> None:
    group = _group()
    context = typer.Context(group, info_name="quantforge", help_option_names=["-h", "--help"])
    if not verb:
        Console().text(group.get_help(context))
        return
    if verb not in group.commands:
        raise UsageError(f"no verb '{verb}'", for_verb(verb, group.commands))
    asked = typer.Context(
        group.commands[verb], info_name=verb, parent=context, help_option_names=["-h", "--help"]
    )
    Console().text(group.commands[verb].get_help(asked))


def _asked_for_help(arguments: list[str]) -> str | None:
    """Return the verb whose help is asked for, "" for that of all, None where none is; nothing is converted yet."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verb = next((word for word in words if not word.startswith("-")), "")
    if {"-h", "--help"} & {*words}:
        return verb if verb != "help" else ""
    return "".join(words[1:]) if verb == "help" and len(words) <= 2 else None


@cache
def _group() -> Any:
    return typer.main.get_command(app)


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


WIDE = "10000"  # characters of a line that a shell reads


def main() -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] or ["--help"]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    console = Console(as_json="--json" in arguments, machine="--json-progress" in arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that is not UTF-8 gets escapes
    try:
        for number in system.STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as background jobs of a shell do
                signal.signal(number, stop)
        code = _run(arguments)
        sys.stdout.flush()
    except Stopped as stopped:
        _end(console, arguments, stopped)
    except (BrokenPipeError, SystemExit) as end:  # typer turns the one into the other
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:  # the boundary: typed errors, and bugs of ours
        if debug:
            traceback.print_exc()
        _fail(console, arguments, error)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(console: Console, arguments: list[str], error: Exception) -> NoReturn:
    """Say what an error is, and exit with its code."""
    if isinstance(error.__cause__, Stopped):  # compiled code raises a SystemError from it
        _end(console, arguments, error.__cause__)
    typed = as_ours(error, arguments, _group())
    if typed is None:
        console.note(f"bug: {error!r}\nThis is ours to mend. The traceback is in {saved()}")
    elif not said_already(str(typed)):
        console.error(typed)
    for note in getattr(error, "__notes__", ()):
        console.note(note)
    sys.exit(1 if typed is None else typed.exit_code)


def _end(console: Console, arguments: list[str], stopped: Stopped) -> NoReturn:
    """Say what the same command does after a signal, and exit."""
    how = "goes on behind what it had finished" if RESUMED & {*arguments[:1]} else "begins anew"
    kept = getattr(stopped, "__notes__", [f"the same command again {how}"])
    console.note(f"stopped; {'; '.join(kept)}")
    sys.exit(128 + stopped.number)


def _run(arguments: list[str]) -> Any:
    """Do what is typed, and return the exit code."""
    _check_text(arguments)
    _check_environment()
    check_ranks(arguments)
    decodes = arguments[0] in DECODING and "--no-speed" not in arguments
    if not decodes or processors_are_shared():
        wait_briefly()
    completing = "_QUANTFORGE_COMPLETE" in os.environ  # set by the scripts of shells
    if completing:
        os.environ["COLUMNS"] = WIDE  # or the parser breaks what it says of an option into lines
    asked = None if completing else _asked_for_help(arguments)
    if asked is not None:
        _print_help(asked)
        return 0
    return _group()(arguments, prog_name="quantforge", standalone_mode=False)


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
        raise UsageError(str(error), f"export {features.SWITCH}=off, or unset it") from error
