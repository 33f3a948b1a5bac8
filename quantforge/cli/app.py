"""``quantforge``: entry point of the command line; verbs, errors and signals.

A verb (subcommand) is imported when it is called or its help is requested. Typed errors become a message, a hint and an
exit code. A signal exits with 128 plus its number after the run has stopped at a safe point. Any other exception is a
bug, whose traceback is saved to a file.
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
from quantforge.cli.processes import check_ranks, is_already_reported
from quantforge.cli.verb_command import Verb, parse_unconverted
from quantforge.errors import InputError, QuantForgeError, ResourceError, UsageError
from quantforge.files.disk import create_file
from quantforge.numerics.shared_processors import processors_are_shared, wait_briefly
from quantforge_files import system
from quantforge_kernels.cpu import instruction_sets

# Verbs in the order of ``--help``, with their summary. Each is a function in the module of the same name.
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
FUNCTION_NAMES = {"eval": "evaluate"}  # functions and modules whose name differs from their verb
# Their matrix products are so small that threads should not sleep between them
DECODING_VERBS = {"eval", "generate"}
# Verbs that keep the finished part of an interrupted run.
RESUMABLE_VERBS = {"allocate", "quantize", "release", "sweep"}


class _Commands(Mapping[str, Any]):
    """Lazy mapping from verbs to their commands; each is imported at lookup."""

    def __getitem__(self, verb: str) -> Any:
        return _load_command(verb)

    def __contains__(self, verb: object) -> bool:
        return verb in VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@cache
def _load_command(verb: str) -> Any:
    """Import a verb; return its command. Raises KeyError for a verb that does not exist."""
    summary, name = VERBS[verb], FUNCTION_NAMES.get(verb, verb)
    function, example = show_help, None
    if verb != "help":
        module = import_module(f"quantforge.cli.{name}")
        function, example = getattr(module, name), getattr(module, "EXAMPLE", None)
    single_app = typer.Typer(add_completion=False, rich_markup_mode=None)
    single_app.command(verb, cls=Verb, epilog=example, short_help=summary)(function)
    return typer.main.get_command(single_app)


class VerbGroup(TyperGroup):
    """Command group of ``quantforge``, with verbs that are imported lazily."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; return the rest. Completion parses without type conversion."""
        return (
            parse_unconverted(self, ctx, args)
            if ctx.resilient_parsing
            else super().parse_args(ctx, args)
        )

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return [*VERBS]

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb, or None for an unknown verb."""
        return _load_command(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write a line for each verb."""
        with formatter.section("Commands"):
            formatter.write_dl([*VERBS.items()])


app = typer.Typer(
    name="quantforge",
    cls=VerbGroup,
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

        Console().print_text(f"quantforge {__version__}")
        raise typer.Exit


@cache
def _group() -> Any:
    return typer.main.get_command(app)


def _complete_verb(incomplete: str) -> list[str]:
    return [name for name in VERBS if name.startswith(incomplete)]


def show_help(
    verb: Annotated[str, typer.Argument(metavar="[VERB]", autocompletion=_complete_verb)] = "",
) -> None:
    """Show what a verb does and takes, or the verbs."""
    group = _group()
    context = typer.Context(group, info_name="quantforge", help_option_names=["-h", "--help"])
    if not verb:
        Console().print_text(group.get_help(context))
        return
    if verb not in VERBS:
        raise UsageError(f"no verb '{verb}'", usage_errors.verb_hint(verb, VERBS))
    command = _load_command(verb)
    verb_context = typer.Context(
        command, info_name=verb, parent=context, help_option_names=["-h", "--help"]
    )
    Console().print_text(command.get_help(verb_context))


def _requested_help(arguments: list[str]) -> str | None:
    """Return the verb whose help is requested, "" for the general help, or None if no help is requested."""
    own_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verb = next((argument for argument in own_arguments if not argument.startswith("-")), "")
    if {"-h", "--help"} & {*own_arguments}:
        return verb if verb != "help" else ""
    return "".join(own_arguments[1:]) if verb == "help" and len(own_arguments) <= 2 else None


COMPLETION_WIDTH = "10000"  # width of lines in completion output, so that none is wrapped


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
            )  # escape characters on a terminal that is not UTF-8
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except Stopped as stopped:
        _exit_stopped(console, arguments, stopped)
    except (BrokenPipeError, SystemExit) as end:  # typer turns the one into the other
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # The reader of stdout has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:  # the boundary: typed errors, and bugs of ours
        if debug:
            traceback.print_exc()
        _exit_with_error(console, arguments, error)
    sys.exit(code if isinstance(code, int) else 0)


def _run(arguments: list[str]) -> Any:
    """Run a command line; return its result."""
    _check_utf8(arguments)
    _check_environment()
    check_ranks(arguments)
    decodes = arguments[0] in DECODING_VERBS and "--no-speed" not in arguments
    if not decodes or processors_are_shared():
        wait_briefly()
    is_completion = "_QUANTFORGE_COMPLETE" in os.environ  # set by the scripts of shells
    if is_completion:
        os.environ["COLUMNS"] = COMPLETION_WIDTH  # or the parser wraps help texts
    help_verb = None if is_completion else _requested_help(arguments)
    if help_verb is not None:
        show_help(help_verb)
        return 0
    if arguments[0] in VERBS and not is_completion:
        # An interruption during these imports ends the process at once, see `__main__`.
        _load_command(arguments[0])
        import_module("quantforge.api")
    for number in system.STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as background jobs of a shell do
            signal.signal(number, raise_stopped)
    return _group()(arguments, prog_name="quantforge", standalone_mode=False)


def _check_utf8(arguments: list[str]) -> None:
    """Check that all arguments are UTF-8, so that they can be written into results.

    Raises:
        UsageError: an argument is not UTF-8.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the argument {argument!a} is not UTF-8", "rename the file"
            ) from error


def _check_environment() -> None:
    """Check environment variables that are switches.

    Raises:
        UsageError: a value is neither on nor off.
    """
    try:
        instruction_sets.programs_enabled()
    except ValueError as error:
        raise UsageError(
            str(error), f"export {instruction_sets.SWITCH_VARIABLE}=off, or unset it"
        ) from error


# ---- errors


def _exit_with_error(console: Console, arguments: list[str], error: Exception) -> NoReturn:
    """Print an error and exit with its code."""
    if isinstance(error.__cause__, Stopped):  # compiled code turns it into a SystemError
        _exit_stopped(console, arguments, error.__cause__)
    typed_error = _to_typed_error(error, arguments)
    if typed_error is None:
        console.note(
            f"bug: {error!r}\nThis is a bug in QuantForge. The traceback is in {_save_traceback()}"
        )
    elif not is_already_reported(str(typed_error)):
        console.print_error(typed_error)
    for note in getattr(error, "__notes__", ()):
        console.note(note)
    sys.exit(1 if typed_error is None else typed_error.exit_code)


def _to_typed_error(error: Exception, arguments: list[str]) -> QuantForgeError | None:
    """Convert an error of the parser, the system or a library into a `QuantForgeError`; None for a bug."""
    if isinstance(error, QuantForgeError):
        return error
    if isinstance(error, usage_errors.CLICK_ERROR):
        return usage_errors.convert_parser_error(error, arguments, _group())
    if (
        isinstance(error, OSError) and error.errno
    ):  # not handled elsewhere, such as a name that is too long
        prefix = f"{error.filename}: " if error.filename else ""
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE}
        kind = ResourceError if full else InputError
        return kind(f"{prefix}{error.strerror}", "check the path, its permissions and the disk")
    # torch raises RuntimeError for a failed allocation, and its own class on a GPU
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


def _save_traceback() -> str:
    """Save the traceback of the current exception; return the path of the file."""
    path = Path(tempfile.gettempdir()) / f"quantforge-{os.urandom(8).hex()}.traceback"
    text = f"{shlex.join(sys.argv)}\n\n{traceback.format_exc()}"
    with os.fdopen(create_file(path, 0o600), "wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return str(path)


# ---- signals


class Stopped(BaseException):
    """Raised when a signal asks the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _exit_stopped(console: Console, arguments: list[str], stopped: Stopped) -> NoReturn:
    """After a signal, print what the same command will do next, and exit."""
    next_run = (
        "goes on behind what it had finished"
        if RESUMABLE_VERBS & {*arguments[:1]}
        else "begins anew"
    )
    notes = getattr(stopped, "__notes__", [f"the same command again {next_run}"])
    console.note(f"stopped; {'; '.join(notes)}")
    sys.exit(128 + stopped.number)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise `Stopped`, later if a module is being imported."""
    if _is_importing(frame):  # an import would swallow the exception or abort
        timer = threading.Timer(0.05, _resend_signal, (number,))
        timer.daemon = True
        timer.start()
        return
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise Stopped(number)


def _resend_signal(number: int) -> None:
    """Send a signal to the main thread; only this wakes it if it is waiting."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # it is running
    signal.pthread_kill(main_thread, number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is inside of an import that the command line started."""
    while frame is not None and frame.f_globals is not globals():
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
