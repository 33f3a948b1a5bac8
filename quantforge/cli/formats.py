"""``quantforge formats``: what can be read and written, and what an export from each to each keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from string import ascii_uppercase

from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.evaluation.columns import GAP
from quantforge.formats import FORMATS, PLAIN, Compatibility, Verdict, load_format
from quantforge.formats.convert import layer_scheme_in_format
from quantforge.notation import parse_layer
from quantforge.scheme import LayerScheme

SHAPE, DTYPE = (512, 512), "BF16"  # of the matrix whose conversions are shown


class Word(StrEnum):
    """A verdict, as the table shows it."""

    EXACT = "exact"
    INEXACT = "inexact"
    IMPOSSIBLE = "no"
    DEPENDS_ON_VALUES = "values"
    SAME = "="


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion."""

    source: str
    scheme: LayerScheme
    target: str
    fit: Compatibility

    @property
    def word(self) -> Word:
        """Return the verdict as the table shows it; ``=`` where the files stay what they are."""
        return Word.SAME if self.source == self.target else Word[self.fit.verdict.name]


SIGNS = {
    Word.SAME: "=",
    Word.EXACT: "+",
    Word.DEPENDS_ON_VALUES: "?",
    Word.INEXACT: "~",
    Word.IMPOSSIBLE: ".",
}
ABOUT = {
    Word.SAME: "the format itself",
    Word.EXACT: "every value is kept",
    Word.DEPENDS_ON_VALUES: "depends on scales and zero points, which the export reads first",
    Word.INEXACT: "needs --allow-inexact",
    Word.IMPOSSIBLE: "is refused",
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
        about = (module.__doc__ or "").strip().splitlines()[0]
        try:
            four = module.default_scheme(4)
        except RefusedError:
            four = "-"
        rows.append((key, four, about))
    found = list(cells())
    if as_json:
        table = [
            {"format": key, "bits_4": four, "about": about.replace("``", "")}
            for key, four, about in rows
        ]
        conversions = [
            {
                "from": cell.source,
                "scheme": str(cell.scheme),
                "to": cell.target,
                "verdict": cell.word,
                "reason": cell.fit.reason,
            }
            for cell in found
        ]
        document = {"schema": "quantforge.formats/1", "formats": table, "conversions": conversions}
        console.document(document)
        return
    _show(console, rows, found)


def _show(console: Console, rows: list[tuple[str, str, str]], found: list[Cell]) -> None:
    """Print what there is, and the matrix: with a letter for each format and signs, where words have no room."""
    letters = dict(zip(FORMATS, ascii_uppercase, strict=False))
    console.table(("", "format", "--bits 4"), [(letters[key], key, four) for key, four, _ in rows])
    console.text()
    for *_, about in rows:
        console.wrapped(about.replace("``", "`"))
    lines: dict[tuple[str, str], list[Word]] = {}
    for cell in found:
        lines.setdefault((cell.source, str(cell.scheme)), []).append(cell.word)
    words = [(*key, *line) for key, line in lines.items()]
    headers = ("from", "scheme", *FORMATS)
    needed = sum(max(map(len, column)) + GAP for column in zip(headers, *words, strict=True))
    console.text()
    if needed <= console.width:
        console.table(headers, words)
        return
    signs = [
        (letters[key], scheme, *(SIGNS[word] for word in line))
        for (key, scheme), line in lines.items()
    ]
    console.table(
        ("", "scheme of the source", *letters.values()), signs, "What an export to each keeps"
    )
    console.wrapped(", ".join(f"{sign} {ABOUT[word]}" for word, sign in SIGNS.items()))


def _fit(scheme: LayerScheme, target: str) -> Compatibility:
    """Return the verdict on a layer in the format ``target``."""
    if target == PLAIN:
        return Compatibility(
            Verdict.DEPENDS_ON_VALUES, "every decoded weight has to be a number of the model's type"
        )
    return layer_scheme_in_format(scheme, SHAPE, load_format(target), DTYPE)[0]


def cells() -> Iterator[Cell]:
    """Yield all pairs of formats, for every kind of numbers that the first one holds."""
    for source in FORMATS:
        form = load_format(source)
        for text in form.INFO.example_schemes:
            layer = parse_layer(text)
            weight = layer.weight.with_scale(form.default_scale_type(DTYPE))
            layer = LayerScheme(weight, layer.input)
            for target in FORMATS:
                yield Cell(source, layer, target, _fit(layer, target))
