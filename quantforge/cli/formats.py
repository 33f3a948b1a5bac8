"""``quantforge formats``: what can be read and written, and what an export from each to each keeps."""

from __future__ import annotations

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.formats import FORMATS, format_of


def formats(as_json: options.Json = False) -> None:
    """List the formats, what --bits 4 means in each, and which conversions are exact.

    `=` is the format itself; `exact` keeps every value; `inexact` needs --allow-inexact; `values` depends on scales
    and zero points, which the export reads first; `no` is refused.
    """
    from quantforge.errors import RefusedError
    from quantforge.formats.matrix import cells

    console = Console(as_json=as_json)
    rows = []
    for key in FORMATS:
        module = format_of(key)
        about = (module.__doc__ or "").strip().splitlines()[0]
        try:
            four = module.default_scheme(4)
        except RefusedError:
            four = "-"
        rows.append((key, four, about))
    found = list(cells())
    if as_json:
        table = [{"format": key, "bits_4": four, "about": about} for key, four, about in rows]
        conversions = [
            {
                "from": cell.source, "scheme": str(cell.scheme), "to": cell.target,
                "verdict": cell.word, "reason": cell.fit.reason,
            }
            for cell in found
        ]  # fmt: skip
        document = {"schema": "quantforge.formats/1", "formats": table, "conversions": conversions}
        console.document(document)
        return
    console.table(("format", "--bits 4", "what it is"), rows)
    lines: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        lines.setdefault((cell.source, str(cell.scheme)), []).append(cell.word)
    console.table(("from", "scheme", *FORMATS), [(*key, *words) for key, words in lines.items()])
