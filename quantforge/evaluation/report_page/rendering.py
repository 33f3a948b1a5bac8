"""Rendering of a page: its template, with the style and the script that every page holds itself."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

STYLE, SCRIPT = "page.css", "sort.js"


def rendered(template: str, **values: Any) -> str:
    """Return a page; whatever is foreign (names, texts, recipes) is escaped, what is drawn is ours.

    Args:
        template: its file; it extends ``frame.html.jinja``.
        values: what it names.
    """
    environment = Environment(
        loader=PackageLoader("quantforge.evaluation", "report_page"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    source = environment.loader
    assert source is not None
    style, script = (source.get_source(environment, name)[0] for name in (STYLE, SCRIPT))
    return environment.get_template(template).render(
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )
