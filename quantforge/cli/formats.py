"""``quantforge formats``: what can be read and written."""

from __future__ import annotations

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.formats import FORMATS, format_of


def formats(as_json: options.Json = False) -> None:
    """List the formats, and what --bits 4 means in each."""
    console = Console(as_json=as_json)
    rows = []
    for key in FORMATS:
        module = format_of(key)
        about = (module.__doc__ or "").strip().splitlines()[0]
        four = "-" if key == "plain" else module.default_scheme(4)
        rows.append((key, four, about))
    if as_json:
        table = [{"format": key, "bits_4": four, "about": about} for key, four, about in rows]
        console.document({"schema": "quantforge.formats/1", "formats": table})
        return
    console.table(("format", "--bits 4", "what it is"), rows)
