"""Options of speculation, for every verb that decodes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantforge.runtime.speculation.options import typed_draft


def _speculation(flag: str, metavar: str, about: str, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=about, rich_help_panel="Speculation", **more)


def _draft(names: str) -> Any:
    about = f"Draft tokens to check together: {names}."
    return _speculation("--draft", "WHAT", about, callback=typed_draft)


Draft = Annotated[str | None, _draft("ngram, lookahead, int2, int3, int4, mtp, a MODEL or heads")]
StepDraft = Annotated[str | None, _draft("ngram, int2, int3, int4 or a MODEL")]
DraftTokens = Annotated[
    int, _speculation("--draft-tokens", "N", "Drafted tokens in a row, at most.")
]
DraftTree = Annotated[
    str,
    _speculation(
        "--draft-tree",
        "KxK...",
        "Drafted tokens after each token, place by place, as 3x2x1, checked in one pass.",
    ),
]
