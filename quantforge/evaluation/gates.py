"""Quality gates: limits that every model of an evaluation has to keep, and the job summary that says whether it did."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.disk import append
from quantforge.errors import GateError, UsageError

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation


def check_held(models: Sized, *limits: float | None) -> None:
    """Refuse limits that nothing is held to, before the work.

    Args:
        models: those that are compared with a reference.
        limits: what is asked of them; None where nothing is.

    Raises:
        UsageError: there is a limit, and no model.
    """
    if not models and any(limit is not None for limit in limits):
        raise UsageError(
            "a quality gate holds models to a limit, and only the reference is given",
            "name the models behind it: quantforge eval REFERENCE MODEL...",
        )


def check_gates(
    evaluation: Evaluation, max_ppl_increase: float | None = None, max_kl: float | None = None
) -> None:
    """Hold every model to the limits that are given; call it once the report is written.

    Args:
        evaluation: the result.
        max_ppl_increase: relative to the reference, e.g. 0.02.
        max_kl: mean KL divergence in nats per token.

    Raises:
        GateError: listing every model that is beyond a limit, with its figure.
        UsageError: there is no model beside the reference.
    """
    check_held(evaluation.rows[1:], max_ppl_increase, max_kl)
    limits = (
        ("perplexity_increase", max_ppl_increase, "perplexity increased by {:.2%}, at most {:.2%}"),
        ("kl_mean", max_kl, "KL divergence {:.4g}, at most {:.4g}"),
    )
    failed = [
        f"{row['path']}: {text.format(row[key], limit)}"
        for row in evaluation.rows[1:]
        for key, limit, text in limits
        if limit is not None and row[key] > limit
    ]
    if failed:
        raise GateError(
            f"{len(failed)} quality gate(s) failed: {'; '.join(failed)}",
            "use more bits, smaller groups or another method, or raise the limit",
        )


def write_summary(path: Path | None, evaluation: Evaluation, failed: str = "") -> None:
    """Add table and verdict of an evaluation to the summary of a CI's job, as GitHub-flavoured Markdown.

    A job's steps share one file, so that each adds to it (`GITHUB_STEP_SUMMARY` on GitHub).

    Args:
        path: of the summary; nothing is written where it is None.
        evaluation: whose tables are added.
        failed: what gates refuse, in words.

    Raises:
        ResourceError: it cannot be written.
    """
    if path is not None:
        from quantforge.evaluation.report import render  # with torch

        verdict = f"**Failed:** {failed}\n\n" if failed else ""
        append(path, f"## Evaluation\n\n{verdict}{render(evaluation, 'markdown')}\n".encode())
