"""One family of errors: what went wrong, where, which rule, and what to type.

Every refusal that a user can meet is a `QuantForgeError`. Its class owns the exit code of the command line (the
table is in ``docs/cli.md``), its message says what and where, its hint says what to do. Anything else that
escapes is a bug of ours and exits with 1.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


SAME_BEGINNING = 3  # words, at most, that a hint names because they begin as what was typed


class Fault(StrEnum):
    """Kind of fault of a stored value, named as the check of `verify` that reports it."""

    UNREADABLE = "unreadable"
    NOT_FINITE = "not-finite"
    SCALE = "scale"
    ZERO = "zero-convention"


class QuantForgeError(Exception):
    """Base of all typed errors; ``code`` is the stable name in ``--json`` output."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        file: str | None = None,
        tensor: str | None = None,
        fault: Fault = Fault.UNREADABLE,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.file = file
        self.tensor = tensor
        self.fault = fault

    @classmethod
    def at(cls, path: Path, what: str, hint: str = "") -> Self:
        """Return the error about a file or a directory: the message begins with its path."""
        return cls(f"{path}: {what}", hint, file=str(path))


class UsageError(QuantForgeError):
    """The command line asks for something contradictory (exit 2)."""

    exit_code = 2
    code = "usage"


class UnknownNameError(UsageError):
    """There is no such method, format, engine, type, scheme or value, whatever else is asked for (exit 2)."""


class InputError(QuantForgeError):
    """A model, recipe or text is invalid or missing (exit 3)."""

    exit_code = 3
    code = "input"


class RecipeError(InputError):
    """A field of a recipe holds what it may not (exit 3); ``what`` is the message without "recipe: " in front."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"recipe: {what}", hint)
        self.what = what


class NotReadError(InputError):
    """A sound file is of a kind that is not read (exit 3): nothing is known against it."""


class NotRunnableError(InputError):
    """transformers cannot run a model (exit 3): the configuration is wrong, or the model needs more than tokens."""


class DeniedError(InputError):
    """This user may not write to a place (exit 3); what was done stays, unlike where other input is wrong."""


class RefusedError(QuantForgeError):
    """The combination cannot be expressed, or `--strict` forbids it (exit 4)."""

    exit_code = 4
    code = "refused"


class IntegrityError(QuantForgeError):
    """Bytes are not what a manifest or a journal says (exit 5)."""

    exit_code = 5
    code = "integrity"


class GateError(QuantForgeError):
    """A quality gate failed (exit 6)."""

    exit_code = 6
    code = "gate"


class ResourceError(QuantForgeError):
    """Not enough memory or disk, predicted or hit (exit 7)."""

    exit_code = 7
    code = "resource"


class BusyError(QuantForgeError):
    """Another run holds the output, or this one stopped cleanly: run again (exit 75)."""

    exit_code = 75
    code = "busy"


def nearest(word: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return what to type in place of an unknown word.

    Args:
        word: what was typed.
        known: the words that there are.
        elsewhere: hints by words of other tools, in small letters without signs, several to a key.

    Returns:
        ``did you mean 'x'?`` for the word that only signs and letters of the other case tell apart; else what it
        means elsewhere; else the closest words, or the known ones.
    """
    words, bare = sorted(known), _bare(word)
    close: Sequence[str] = [one for one in words if _bare(one) == bare][:1]
    said = next((hint for names, hint in (elsewhere or {}).items() if bare in names.split()), "")
    if said and not close:
        return said
    close = close or _close(word, words)
    if close:
        quoted = [f"'{one}'" for one in close]
        return f"did you mean {' or '.join(quoted)}?"
    shown = ", ".join(words[:12]) + (" ..." if len(words) > 12 else "")
    return f"known: {shown}"


def _close(word: str, words: Sequence[str]) -> Sequence[str]:
    """Return the words that begin as ``word``, if they are few, or the most like it, with its digits if one has."""
    small = {one.lower(): one for one in words}
    longer = [one for key, one in small.items() if key.startswith(word.lower())]
    if len(word) > 1 and 0 < len(longer) <= SAME_BEGINNING:
        return longer
    found = [small[key] for key in get_close_matches(word.lower(), small, n=4, cutoff=0.5)]
    same = [one for one in found if re.findall(r"\d+", one) == re.findall(r"\d+", word)]
    return [
        one for one in same or found if _likeness(one, word) == _likeness((same or found)[0], word)
    ]


def _likeness(one: str, word: str) -> float:
    return SequenceMatcher(None, one.lower(), word.lower()).ratio()


def _bare(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


def either(values: Iterable[object]) -> str:
    """Return alternatives in words: ``2, 3 or 4``."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def without(option: str) -> str:
    """Return what to type where a run cannot have an option, be it named or set by a level of effort."""
    return f"{option} 0"
