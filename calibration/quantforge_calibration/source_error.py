"""The error that this package raises for unusable text, and the file opener that raises it."""

from __future__ import annotations

from quantforge_files.opener import Opener


class SourceError(Exception):
    """Raised if a text, a tokenizer or a chat template is missing, malformed, or too short.

    Attributes:
        message: what is wrong and where.
        hint: what to do instead.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


FILES = Opener(lambda detail, hint, subject, _file: SourceError(f"{subject}: {detail}", hint))
