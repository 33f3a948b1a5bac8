"""``quantforge formats``: list the formats, and how exact each conversion between them is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from string import ascii_uppercase

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.evaluation.columns import COLUMN_GAP
from quantforge.formats import FORMATS, PLAIN, Compatibility, Verdict, load_format
from quantforge.formats.convert import layer_scheme_in_format
from quantforge.notation import parse_layer
from quantforge.scheme import LayerScheme

# Shape and dtype of the matrix whose conversions are shown
EXAMPLE_SHAPE, EXAMPLE_DTYPE = (512, 512), "BF16"


class VerdictWord(StrEnum):
    """Verdict on a conversion, as the table shows it."""

    EXACT = "exact"
    INEXACT = "inexact"
    IMPOSSIBLE = "no"
    DEPENDS_ON_VALUES = "values"
    SAME = "="


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of a layer between two formats, with its verdict."""

    source: str
    scheme: LayerScheme
    target: str
    fit: Compatibility

    @property
    def word(self) -> VerdictWord:
        """Return the verdict as the table shows it; ``=`` for the same format."""
        return (
            VerdictWord.SAME if self.source == self.target else VerdictWord[self.fit.verdict.name]
        )


VERDICT_SIGNS = {
    VerdictWord.SAME: "=",
    VerdictWord.EXACT: "+",
    VerdictWord.DEPENDS_ON_VALUES: "?",
    VerdictWord.INEXACT: "~",
    VerdictWord.IMPOSSIBLE: ".",
}
VERDICT_TEXTS = {
    VerdictWord.SAME: "the format itself",
    VerdictWord.EXACT: "every value is kept",
    VerdictWord.DEPENDS_ON_VALUES: "depends on scales and zero points, which the export reads first",
    VerdictWord.INEXACT: "needs --allow-inexact",
    VerdictWord.IMPOSSIBLE: "is refused",
}


def formats(as_json: options.Json = False) -> None:
    """List the formats, what --bits 4 means in each, and which conversions are exact.

    `=` is the format itself; `exact` (+) keeps every value; `values` (?) depends on scales and zero points, which the
    export reads first; `inexact` (~) needs --allow-inexact; `no` (.) is refused.
    """
    from quantforge.errors import RefusedError

    console = Console(as_json=as_json)
    rows = []
    for key in FORMATS:
        module = load_format(key)
        summary = (module.__doc__ or "").strip().splitlines()[0]
        try:
            default_scheme = module.default_scheme(4)
        except RefusedError:
            default_scheme = "-"
        rows.append((key, default_scheme, summary))
    conversions_found = list(list_conversions())
    if as_json:
        table = [
            {"format": key, "bits_4": default_scheme, "about": summary.replace("``", "")}
            for key, default_scheme, summary in rows
        ]
        conversions = [
            {
                "from": cell.source,
                "scheme": str(cell.scheme),
                "to": cell.target,
                "verdict": cell.word,
                "reason": cell.fit.reason,
            }
            for cell in conversions_found
        ]
        document = {"schema": "quantforge.formats/1", "formats": table, "conversions": conversions}
        console.print_document(document)
        return
    _show(console, rows, conversions_found)


def _show(
    console: Console, rows: list[tuple[str, str, str]], conversions: list[Conversion]
) -> None:
    """Print the formats and the table of conversions; with letters and signs if words do not fit."""
    letters = dict(zip(FORMATS, ascii_uppercase, strict=False))
    console.print_table(
        ("", "format", "--bits 4"),
        [(letters[key], key, default_scheme) for key, default_scheme, _ in rows],
    )
    console.print_text()
    for *_, summary in rows:
        console.print_wrapped(summary.replace("``", "`"))
    lines: dict[tuple[str, str], list[VerdictWord]] = {}
    for cell in conversions:
        lines.setdefault((cell.source, str(cell.scheme)), []).append(cell.word)
    table_rows = [(*key, *line) for key, line in lines.items()]
    headers = ("from", "scheme", *FORMATS)
    table_width = sum(
        max(map(len, column)) + COLUMN_GAP for column in zip(headers, *table_rows, strict=True)
    )
    console.print_text()
    if table_width <= console.width:
        console.print_table(headers, table_rows)
        return
    signs = [
        (letters[key], scheme, *(VERDICT_SIGNS[verdict] for verdict in line))
        for (key, scheme), line in lines.items()
    ]
    console.print_table(
        ("", "scheme of the source", *letters.values()), signs, "What an export to each keeps"
    )
    console.print_wrapped(
        ", ".join(f"{sign} {VERDICT_TEXTS[verdict]}" for verdict, sign in VERDICT_SIGNS.items())
    )


def _conversion_verdict(scheme: LayerScheme, target: str) -> Compatibility:
    """Return how exactly a layer can be converted into the format ``target``."""
    if target == PLAIN:
        return Compatibility(
            Verdict.DEPENDS_ON_VALUES, "every decoded weight has to be a number of the model's type"
        )
    return layer_scheme_in_format(scheme, EXAMPLE_SHAPE, load_format(target), EXAMPLE_DTYPE)[0]


def list_conversions() -> Iterator[Conversion]:
    """Yield conversions between all pairs of formats, for every example scheme of the first."""
    for source in FORMATS:
        format_module = load_format(source)
        for scheme_text in format_module.INFO.example_schemes:
            layer_scheme = parse_layer(scheme_text)
            weight = layer_scheme.weight.with_scale(format_module.default_scale_type(EXAMPLE_DTYPE))
            layer_scheme = LayerScheme(weight, layer_scheme.input)
            for target in FORMATS:
                yield Conversion(
                    source, layer_scheme, target, _conversion_verdict(layer_scheme, target)
                )
