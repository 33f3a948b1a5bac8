"""Options of speculation, for every verb that decodes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantforge.runtime.speculation.options import typed_draft


def _speculation(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="Speculation", **more)


Draft = Annotated[
    str | None,
    _speculation(
        "--draft",
        metavar="WHAT",
        callback=typed_draft,
        help="Draft tokens to check together: ngram, lookahead, int2, int3, int4, mtp, a MODEL or heads.",
    ),
]
StepDraft = Annotated[
    str | None,
    _speculation(
        "--draft",
        metavar="WHAT",
        callback=typed_draft,
        help="Draft tokens to check together: ngram, int2, int3, int4 or a MODEL.",
    ),
]
DraftTokens = Annotated[
    int, _speculation("--draft-tokens", metavar="N", help="Drafted tokens in a row, at most.")
]
DraftTree = Annotated[
    str,
    _speculation(
        "--draft-tree",
        metavar="KxK...",
        help="Drafted tokens after each token, place by place, as 3x2x1, checked in one pass.",
    ),
]
