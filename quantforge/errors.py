"""Errors of QuantForge: each says what went wrong, where, which rule was violated, and what to type.

Every refusal that a user can meet is a `QuantForgeError`. Its class defines the exit code of the command line (the
table is in ``docs/cli.md``), its message says what and where, its hint says what to do. Any other exception is a bug in
QuantForge and exits with 1.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


MAX_COMPLETIONS = 3  # of what was typed, to be named in a hint


class Fault(StrEnum):
    """Kind of fault of a stored value, named like the check of `verify` that reports it."""

    UNREADABLE = "unreadable"
    NOT_FINITE = "not-finite"
    SCALE = "scale"
    ZERO = "zero-points"


class QuantForgeError(Exception):
    """Base class of all errors that users can meet.

    Attributes:
        exit_code: exit code of the command line.
        code: stable name of the class in ``--json`` output.
        message: what went wrong, and where: the subject, if there is one, and the detail.
        subject: the file, directory or option with which the message begins; "" for none.
        detail: the message without its subject.
        hint: what to do about it, "" if unknown.
        file: the file at fault, or None.
        tensor: the tensor at fault, or None.
        fault: the kind of fault of a stored value.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        subject: str = "",
        file: str | None = None,
        tensor: str | None = None,
        fault: Fault = Fault.UNREADABLE,
    ) -> None:
        self.message = f"{subject}: {message}" if subject else message
        super().__init__(self.message)
        self.subject = subject
        self.detail = message
        self.hint = hint
        self.file = file
        self.tensor = tensor
        self.fault = fault

    @classmethod
    def at(cls, path: Path, what: str, hint: str = "") -> Self:
        """Return an error about a file or directory, whose path begins the message."""
        return cls(what, hint, subject=str(path), file=str(path))

    def detail_about(self, subject: object) -> str:
        """Return the message, without its subject if that is ``subject``."""
        return self.detail if self.subject == str(subject) else self.message


class UsageError(QuantForgeError):
    """Options or arguments contradict each other (exit 2)."""

    exit_code = 2
    code = "usage"


class UnknownNameError(UsageError):
    """A method, format, engine, type, scheme or value does not exist (exit 2)."""


class InputError(QuantForgeError):
    """A model, recipe or text is invalid or missing (exit 3)."""

    exit_code = 3
    code = "input"


class RecipeError(InputError):
    """A field of a recipe has an invalid value (exit 3); ``what`` is the message without the prefix "recipe: "."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"recipe: {what}", hint)
        self.what = what


class NotReadError(InputError):
    """A valid file is of a kind that is not supported (exit 3), which is no defect of the file."""


class NotRunnableError(InputError):
    """transformers cannot run a model (exit 3): the configuration is wrong, or the model needs more than tokens."""


class DeniedError(InputError):
    """The user may not write to a path (exit 3); work done so far is kept, unlike after other input errors."""


class RefusedError(QuantForgeError):
    """The combination cannot be expressed, or `--strict` forbids it (exit 4)."""

    exit_code = 4
    code = "refused"


class IntegrityError(QuantForgeError):
    """The content of a file differs from what a manifest or journal records (exit 5)."""

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
    """Another run uses the output, or this run was stopped cleanly and can be repeated (exit 75)."""

    exit_code = 75
    code = "busy"


def nearest_hint(
    word: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> str:
    """Return a hint that suggests what to type instead of an unknown word.

    Args:
        word: what was typed.
        known: the known words.
        elsewhere: hints by words of other tools (lower case, without punctuation, several per key, separated by
            spaces).

    Returns:
        ``did you mean 'x'?`` for a word that differs only in punctuation or case; else the hint for a word of another
        tool;
        else the closest words, or the known ones.
    """
    words, normalized = sorted(known), _letters_and_digits(word)
    close_matches: Sequence[str] = [
        name for name in words if _letters_and_digits(name) == normalized
    ][:1]
    other_tool_hint = next(
        (hint for names, hint in (elsewhere or {}).items() if normalized in names.split()), ""
    )
    if other_tool_hint and not close_matches:
        return other_tool_hint
    close_matches = close_matches or _closest(word, words)
    if close_matches:
        quoted = [f"'{name}'" for name in close_matches]
        return f"did you mean {' or '.join(quoted)}?"
    known_text = ", ".join(words[:12]) + (" ..." if len(words) > 12 else "")
    return f"known: {known_text}"


def _closest(word: str, choices: Sequence[str]) -> Sequence[str]:
    """Return the few words that begin with ``word``, else the most similar ones (with equal digits if any)."""
    by_lower_case = {candidate.lower(): candidate for candidate in choices}
    longer = [candidate for key, candidate in by_lower_case.items() if key.startswith(word.lower())]
    if len(word) > 1 and 0 < len(longer) <= MAX_COMPLETIONS:
        return longer
    matches = [
        by_lower_case[key]
        for key in get_close_matches(word.lower(), by_lower_case, n=4, cutoff=0.5)
    ]
    same_prefix = [
        candidate
        for candidate in matches
        if re.findall(r"\d+", candidate) == re.findall(r"\d+", word)
    ]
    return [
        candidate
        for candidate in same_prefix or matches
        if _similarity(candidate, word) == _similarity((same_prefix or matches)[0], word)
    ]


def _similarity(candidate: str, word: str) -> float:
    return SequenceMatcher(None, candidate.lower(), word.lower()).ratio()


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def join_with_or(values: Iterable[object]) -> str:
    """Return alternatives as text: ``2, 3 or 4``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def off_option(option: str) -> str:
    """Return the option that switches a feature off, whether the user or a level of effort has set it."""
    return f"{option} 0"
