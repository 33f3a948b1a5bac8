"""Job summary of a CI: the report of an evaluation as GitHub-flavoured Markdown, with what the gates say.

A job's steps share one file, so that each adds to it (`GITHUB_STEP_SUMMARY` on GitHub).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.disk import append

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation


def write_summary(path: Path | None, found: Evaluation, failed: str = "") -> None:
    """Add table and verdict of an evaluation to a file; nothing where there is none.

    Args:
        path: of the summary.
        found: the evaluation.
        failed: what gates refuse, in words.

    Raises:
        ResourceError: it cannot be written.
    """
    if path is not None:
        from quantforge.evaluation.report import render  # with torch

        verdict = f"**Failed:** {failed}\n\n" if failed else ""
        append(path, f"## Evaluation\n\n{verdict}{render(found, 'markdown')}\n".encode())
