"""``quantforge``: the verbs and the error boundary.

A verb is imported when it is called, or its help is asked for. Typed errors become a message, a hint and their exit
code; a signal exits with 128 plus its number after the run has stopped at a safe point; anything else is a bug of ours,
whose traceback is saved to a file.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from quantforge.cli import usage_errors
from quantforge.cli.console import Console
from quantforge.cli.processes import check_ranks, said_already
from quantforge.cli.verb_command import Verb, sort_words
from quantforge.errors import InputError, QuantForgeError, ResourceError, UsageError
from quantforge.files.disk import create
from quantforge.numerics.shared_processors import processors_are_shared, wait_briefly
from quantforge_files import system
from quantforge_kernels.cpu import instruction_sets

# Verbs in the order of ``--help``, with what it says of them. Each is the function of its name, in the module of its
# name in this folder.
VERBS: Mapping[str, str] = {
    "plan": "Show what `quantize` would do; writes nothing.",
    "quantize": "Quantize a model.",
    "allocate": "Choose a scheme for each layer, within a size.",
    "export": "Move a model into another format.",
    "release": "Make many variants of a model, to be published.",
    "sweep": "Compare all combinations of some choices.",
    "eval": "Compare models: divergence, perplexity, size, speed.",
    "bench": "Measure models or a server under a stream of requests.",
    "generate": "Let models continue a text, answer or chat.",
    "serve": "Serve a model to clients of OpenAI's API.",
    "verify": "Check a finished model, ours or anyone's.",
    "reproduce": "Make a result again and compare every file.",
    "diff": "Compare what two models store.",
    "inspect": "Show what is in a model, from headers alone.",
    "formats": "List formats, and what converts into what.",
    "recipes": "List the built-in recipes, or print one.",
    "demo": "Copy out the small model that comes with the package.",
    "doctor": "Check whether this machine is fit.",
    "help": "Show the options of a verb.",
}
NAMES = {"eval": "evaluate"}  # of functions and modules that are not those of their verbs
DECODING = {"eval", "generate"}  # their small products are over before a thread has slept
# They keep what an interrupted run has finished.
RESUMED = {"allocate", "quantize", "release", "sweep"}


class _Commands(Mapping[str, Any]):
    """The commands of all verbs, each imported when it is looked up."""

    def __getitem__(self, verb: str) -> Any:
        return _command(verb)

    def __contains__(self, verb: object) -> bool:
        return verb in VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@cache
def _command(verb: str) -> Any:
    """Import a verb; return its command. Raises KeyError for a verb that does not exist."""
    about, name = VERBS[verb], NAMES.get(verb, verb)
    function, example = show_help, None
    if verb != "help":
        module = import_module(f"quantforge.cli.{name}")
        function, example = getattr(module, name), getattr(module, "EXAMPLE", None)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(verb, cls=Verb, epilog=example, short_help=about)(function)
    return typer.main.get_command(alone)


class Verbs(TyperGroup):
    """``quantforge`` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments."""
        return (
            sort_words(self, ctx, args) if ctx.resilient_parsing else super().parse_args(ctx, args)
        )

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return [*VERBS]

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb, None where there is no such verb."""
        return _command(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write a line for each verb."""
        with formatter.section("Commands"):
            formatter.write_dl([*VERBS.items()])


app = typer.Typer(
    name="quantforge",
    cls=Verbs,
    help="Quantize, convert and evaluate large language models offline.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


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


@cache
def _group() -> Any:
    return typer.main.get_command(app)


def _verbs(incomplete: str) -> list[str]:
    return [name for name in VERBS if name.startswith(incomplete)]


def show_help(
    verb: Annotated[str, typer.Argument(metavar="[VERB]", autocompletion=_verbs)] = "",
) -> None:
    """Show what a verb does and takes, or the verbs."""
    group = _group()
    context = typer.Context(group, info_name="quantforge", help_option_names=["-h", "--help"])
    if not verb:
        Console().text(group.get_help(context))
        return
    if verb not in VERBS:
        raise UsageError(f"no verb '{verb}'", usage_errors.for_verb(verb, VERBS))
    command = _command(verb)
    asked = typer.Context(
        command, info_name=verb, parent=context, help_option_names=["-h", "--help"]
    )
    Console().text(command.get_help(asked))


def _asked_for_help(arguments: list[str]) -> str | None:
    """Return the verb whose help is asked for, "" for that of all, None where none is; nothing is converted yet."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verb = next((word for word in words if not word.startswith("-")), "")
    if {"-h", "--help"} & {*words}:
        return verb if verb != "help" else ""
    return "".join(words[1:]) if verb == "help" and len(words) <= 2 else None


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
        show_help(asked)
        return 0
    if arguments[0] in VERBS and not completing:
        # Nothing has begun yet: an interruption while these are imported ends the process at once, see `__main__`.
        _command(arguments[0])
        import_module("quantforge.api")
    for number in system.STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as background jobs of a shell do
            signal.signal(number, stop)
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
        instruction_sets.programs_enabled()
    except ValueError as error:
        raise UsageError(
            str(error), f"export {instruction_sets.SWITCH_VARIABLE}=off, or unset it"
        ) from error


# ---- errors


def _fail(console: Console, arguments: list[str], error: Exception) -> NoReturn:
    """Say what an error is, and exit with its code."""
    if isinstance(error.__cause__, Stopped):  # compiled code raises a SystemError from it
        _end(console, arguments, error.__cause__)
    typed = _as_ours(error, arguments)
    if typed is None:
        console.note(f"bug: {error!r}\nThis is a bug in QuantForge. The traceback is in {_saved()}")
    elif not said_already(str(typed)):
        console.error(typed)
    for note in getattr(error, "__notes__", ()):
        console.note(note)
    sys.exit(1 if typed is None else typed.exit_code)


def _as_ours(error: Exception, arguments: list[str]) -> QuantForgeError | None:
    """Return an error of ours, of the parser, the system or a library as one of ours; None for a bug."""
    if isinstance(error, QuantForgeError):
        return error
    if isinstance(error, usage_errors.CLICK):
        return usage_errors.in_our_words(error, arguments, _group())
    if isinstance(error, OSError) and error.errno:  # foreseen by no reader: a name too long
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE}
        kind = ResourceError if full else InputError
        return kind(f"{where}{error.strerror}", "check the path, its permissions and the disk")
    # torch reports a failed allocation as a RuntimeError, on a GPU as a class of its own
    if (
        isinstance(error, MemoryError)
        or "DefaultCPUAllocator" in str(error)
        or type(error).__name__ == "OutOfMemoryError"
    ):
        return ResourceError(
            "out of memory",
            "see what `quantforge plan` predicts; --activations disk and fewer --samples need less",
        )
    return None


def _saved() -> str:
    """Save the traceback of the present error; return the file."""
    place = Path(tempfile.gettempdir()) / f"quantforge-{os.urandom(8).hex()}.traceback"
    text = f"{shlex.join(sys.argv)}\n\n{traceback.format_exc()}"
    with os.fdopen(create(place, 0o600), "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return str(place)


# ---- signals


class Stopped(BaseException):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(console: Console, arguments: list[str], stopped: Stopped) -> NoReturn:
    """Say what the same command does after a signal, and exit."""
    how = "goes on behind what it had finished" if RESUMED & {*arguments[:1]} else "begins anew"
    kept = getattr(stopped, "__notes__", [f"the same command again {how}"])
    console.note(f"stopped; {'; '.join(kept)}")
    sys.exit(128 + stopped.number)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise `Stopped`, once no module is being imported; handler of a signal."""
    if _imports(frame):  # which would swallow it, or abort: later then
        again = threading.Timer(0.05, _again, (number,))
        again.daemon = True
        again.start()
        return
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise Stopped(number)


def _again(number: int) -> None:
    """Send a signal to the main thread, which may wait for something: a signal of another thread would not wake it."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # it is running
    signal.pthread_kill(main_thread, number)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported since the command line began."""
    while frame is not None and frame.f_globals is not globals():
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
