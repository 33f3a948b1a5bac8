"""A chat on a terminal: lines of a person, answers as they come, and what was said so far."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from quantforge.cli.answers import opening, say, speed_of, tell
from quantforge.cli.console import Console
from quantforge.errors import QuantForgeError

if TYPE_CHECKING:
    from quantforge.runtime.generation_options import AnswerLimits
    from quantforge.runtime.text_model import TextModel

PROMPT = "> "
COMMANDS = "/reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C ends an answer"


def chat(
    console: Console, speaker: TextModel, limits: AnswerLimits, *, system: str | None, raw: bool
) -> None:
    """Answer line after line until the end of input; a model that only completes text keeps no history.

    Raises:
        UsageError: a system prompt for a model without a template.
    """
    remembers = speaker.templated and not raw
    opening(speaker, "", system)
    tell(console, speaker, raw=raw)
    console.note(
        f"{speaker.name}: {COMMANDS}" if remembers else f"{speaker.name}: /exit or Ctrl-D ends"
    )
    first = [] if system is None else [{"role": "system", "content": system}]
    history = list(first)

    def turn() -> bool:
        """Read a line and answer it; return whether the chat goes on."""
        line = _line(console)
        if line is None or line in {"/exit", "/quit"}:
            return False
        if line == "/reset":
            history[:] = first
        elif re.fullmatch("/[a-z]+", line):
            console.note(COMMANDS)
        elif line:
            talk = [*history, {"role": "user", "content": line}]
            found = say(console, speaker.answer(talk if remembers else line, limits, raw=raw))
            console.note(f"[{speed_of(found, limits.max_tokens)}]")
            history[:] = [*talk, {"role": "assistant", "content": found.text}]
        return True

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while _goes_on(console, turn):
            pass
    finally:
        signal.signal(signal.SIGINT, before)


def _goes_on(console: Console, turn: Callable[[], bool]) -> bool:
    """Do a turn of a chat, which neither Ctrl-C nor a refusal ends, wherever in the turn it comes."""
    try:
        return turn()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one in the same moment
        console.piece("\n")
        console.note("Ctrl-D ends")
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except QuantForgeError as error:  # a prompt that is too long, say
        console.error(error)
    return True


def _line(console: Console) -> str | None:
    """Read a line of a person; None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401 (edits the line, and knows the earlier ones)
    try:
        return input(PROMPT).strip()
    except EOFError:
        console.piece("\n")
        return None
