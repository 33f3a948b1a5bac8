"""The one error of this package, a source of text that cannot be used, and the opener of files that raises it."""

from __future__ import annotations

from quantforge_files.opener import Opener


class SourceError(Exception):
    """Text, a tokenizer or a chat template is missing, malformed, or too little.

    ``message`` says what is wrong and where, ``hint`` what to type instead.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


FILES = Opener(lambda detail, hint, subject, _file: SourceError(f"{subject}: {detail}", hint))
