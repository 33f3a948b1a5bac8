"""Checks of a recipe for draft heads alone, which no engine serves without their model."""

from __future__ import annotations

from quantforge.architectures.draft_kinds import EAGLE3
from quantforge.errors import RefusedError, UsageError
from quantforge.formats import DEFAULT, PLAIN


def check_alone(draft: str, key: str, engine: str | None) -> None:
    """Refuse a format or an engine that knows no draft heads.

    Args:
        draft: their kind; "" for a model, of which nothing is refused.
        key: the format.
        engine: that the result is made for.

    Raises:
        RefusedError: nothing reads them in the format.
        UsageError: an engine is named.
    """
    if not draft:
        return
    if engine is not None:
        served = '; vllm serve MODEL --speculative-config \'{"method": "eagle3", "model": "OUT"}\''
        raise UsageError(
            f"--for {engine}: {draft} heads alone are not served, but beside their model",
            f"leave --for out{served if (engine, draft) == ('vllm', EAGLE3) else ''}",
        )
    if key not in {DEFAULT, PLAIN}:
        raise RefusedError(
            f"--format {key}: nothing reads {draft} heads in this format",
            f"--format {DEFAULT}, or leave --format out",
        )
