"""Verdict on an evaluation: which models nothing beats, who wins by what, and the same in words.

The rows of an evaluation are figures. What they mean is decided here once, for the text of the command line, the
report, the JSON document and a program alike. A model is on the Pareto front of size against divergence if no other is
at most as large (within half a percent) and at most as far from the reference, and better in one of the two. In words,
models differ in divergence only where the difference is larger than twice its standard error, and in speed only where
it is larger than the spread of the steps of both, and than one part in twenty. Speeds that were measured while other
programs took processor time from the threads (`FULL_SHARE`) are marked, and compared with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.artifacts.number_text import significant, size
from quantforge.numerics.shared_processors import FULL_SHARE

Row = Mapping[str, Any]
SAME_BYTES = 0.005  # of the size: what headers and side tensors may differ by
COMPARABLE = 1.25  # times the size: a larger model is no rival
SURE = 2.0  # standard errors
SAME_PACE = 0.05  # of a speed: below this, two runs on one machine cannot be distinguished
UNSTEADY = 1.0  # interquartile range of the steps of a run over their median, from which on a speed is no figure
MARK = "~"  # before such a speed


@dataclass(frozen=True, slots=True)
class Winner:
    """The best descendant by one aspect.

    Attributes:
        aspect: ``size``, ``quality`` (KL divergence) or ``speed`` (tokens per second of one sequence).
        row: its index in the rows of the evaluation.
        model: its name.
        figure: its figure in words, e.g. ``weights 3.72 MB, 2.25 times smaller than demo``.
    """

    aspect: str
    row: int
    model: str
    figure: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Conclusions of an evaluation.

    Attributes:
        names: of all models, the shortest that tell them apart; the reference first.
        front: rows on the Pareto front of size against KL divergence, from small to large.
        winners: by aspect; an aspect that was not measured is left out.
        sentences: the same in words, what matters most first.
    """

    names: tuple[str, ...]
    front: tuple[int, ...]
    winners: tuple[Winner, ...]
    sentences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return asdict(self)


def judge(rows: Sequence[Row]) -> Verdict:
    """Return the verdict on the rows of an evaluation, the reference first."""
    names = short_names([str(row["path"]) for row in rows])
    front = pareto_front(rows)
    winners = tuple(_winners(rows, names))
    sentences = [
        *_beaten(rows, names, front),
        *_in_words(winners, rows),
        *_not_compared(rows, names),
    ]
    return Verdict(tuple(names), front, winners, tuple(sentences))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last part of each path, or as many parts as tell them apart; never where all of them lie."""
    parts = [Path(path).absolute().parts[1:] for path in paths]
    different = len(set(parts))
    for count in range(1, max(map(len, parts), default=0) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == different:
            return short
    return list(paths)


def pareto_front(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the indices of the descendants that none beats in size and KL divergence, from small to large."""
    found = _descendants(rows)
    points: dict[int, tuple[int, float]] = {
        index: (rows[index]["weight_bytes"], rows[index]["kl_mean"]) for index in found
    }

    def beats(other: int, index: int) -> bool:
        (size_there, kl_there), (size_here, kl_here) = points[other], points[index]
        if size_there > size_here * (1 + SAME_BYTES):
            return False
        return kl_there < kl_here or (
            kl_there == kl_here and size_there < size_here * (1 - SAME_BYTES)
        )

    front = [index for index in found if not any(beats(other, index) for other in found)]
    return tuple(sorted(front, key=points.__getitem__))


def _descendants(rows: Sequence[Row]) -> list[int]:
    return [index for index, row in enumerate(rows) if row["kl_mean"] is not None]


def _winners(rows: Sequence[Row], names: Sequence[str]) -> list[Winner]:
    """Return the winner by each aspect that was measured; of equals the one with less divergence."""
    found = _descendants(rows)
    if not found:
        return []
    reference = rows[0]

    def against(key: str, index: int, more: str, less: str) -> str:
        """Say how many times more or less a figure is than that of the reference."""
        ratio = rows[index][key] / reference[key] if reference[key] else math.nan
        if not 0 < ratio < math.inf or abs(ratio - 1) < SAME_BYTES:
            return ""
        times, word = (ratio, more) if ratio > 1 else (1 / ratio, less)
        return f", {significant(times)} times {word} than {names[0]}"

    def best(key: Callable[[Row], float]) -> int:
        return min(found, key=lambda index: (key(rows[index]), rows[index]["kl_mean"]))

    def equals(
        first: int,
        same: Callable[[Row, Row], bool],
        others: Sequence[int],
        words: str = "not told apart",
    ) -> str:
        """Say which models have the figure of the first."""
        equal = [names[at] for at in others if at != first and same(rows[first], rows[at])]
        return f"; {words}: {', '.join(equal)}" if equal else ""

    small = best(lambda row: row["weight_bytes"])
    text = _weights(rows[small]) + against("weight_bytes", small, "larger", "smaller")
    winners = [
        Winner("size", small, names[small], text + equals(small, _same_bytes, found, "as small"))
    ]
    near = best(lambda row: row["kl_mean"])
    text = f"KL {significant(rows[near]['kl_mean'])}, {_weights(rows[near])}"
    winners.append(Winner("quality", near, names[near], text + equals(near, _same_kl, found)))
    key = "decode_tokens_per_second"
    paced = [index for index in found if rows[index][key] and not displaced(rows[index])]
    known = reference[key] and not displaced(reference)
    if paced:
        fast = max(paced, key=lambda index: rows[index][key])
        text = f"{pace(rows[fast])} tokens/s"
        if known and not _same_pace(rows[fast], reference):
            text += against(key, fast, "faster", "slower")
            equal = equals(fast, _same_pace, paced)
        else:
            equal = equals(fast, _same_pace, [*([0] if known else []), *paced])
        winners.append(Winner("speed", fast, names[fast], text + equal))
    return winners


def unsteady(row: Row) -> bool:
    """Return whether a speed was measured whose steps differ too much among themselves."""
    return (row.get("tpot_spread") or 0.0) > UNSTEADY


def displaced(row: Row) -> bool:
    """Return whether other programs took processor time from the threads while the speed was measured."""
    share = row.get("processor_share")
    return share is not None and share < FULL_SHARE


def pace(row: Row) -> str:
    """Return the tokens per second of a row that has them, marked where they are unsteady or its threads displaced."""
    mark = MARK if unsteady(row) or displaced(row) else ""
    return f"{mark}{significant(row['decode_tokens_per_second'])}"


def _weights(row: Row) -> str:
    return f"weights {size(row['weight_bytes'])}"


def _same_bytes(one: Row, other: Row) -> bool:
    return bool(
        abs(one["weight_bytes"] - other["weight_bytes"]) <= SAME_BYTES * one["weight_bytes"]
    )


def _same_kl(one: Row, other: Row) -> bool:
    """Return whether two divergences differ by less than their errors allow to say."""
    errors = [row["kl_se"] or 0.0 for row in (one, other)]
    difference: float = abs(one["kl_mean"] - other["kl_mean"])
    return difference == 0 or difference < SURE * math.hypot(*errors)


def _same_pace(one: Row, other: Row) -> bool:
    """Return whether two speeds differ by less than the steps of a run do among themselves."""
    slow, fast = sorted(row["decode_tokens_per_second"] for row in (one, other))
    spreads = [row.get("tpot_spread") or 0.0 for row in (one, other)]
    return bool(fast / slow - 1 <= max(SAME_PACE, math.hypot(*spreads)))


def _beaten(rows: Sequence[Row], names: Sequence[str], front: Sequence[int]) -> list[str]:
    """Return a sentence for each model of the front that beats a rival: one of about its size, or larger."""
    found = []
    for index in front:
        own, kl = rows[index]["weight_bytes"], rows[index]["kl_mean"]
        rivals = [
            other
            for other in _descendants(rows)
            if own * (1 - SAME_BYTES) <= rows[other]["weight_bytes"] <= own * COMPARABLE
            and rows[other]["kl_mean"] > kl
        ]
        if not rivals:
            continue
        rival = min(rivals, key=lambda other: rows[other]["kl_mean"])
        share = 1 - own / rows[rival]["weight_bytes"]
        where = "the same bytes" if share <= SAME_BYTES else f"{share:.0%} fewer bytes"
        theirs = rows[rival]["kl_mean"]
        better = f"{names[index]}: KL {significant(kl)}"
        if _same_kl(rows[index], rows[rival]):
            text = (
                f"{better}, not told apart from {names[rival]} ({significant(theirs)}) in {where}"
            )
        elif kl <= 0:
            than = "as" if share <= SAME_BYTES else "than"
            text = f"{better} in {where} {than} {names[rival]}, which has KL {significant(theirs)}"
        else:
            text = f"{better}, {significant(theirs / kl)} times less than {names[rival]} in {where}"
        found.append(text)
    return found


def _in_words(winners: Sequence[Winner], rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each winner; where the reference is smaller or faster, it says that this one comes next."""
    words = {"size": "smallest", "quality": "closest", "speed": "fastest"}
    return [
        f"{words[winner.aspect]}{_after_reference(winner, rows)}: {winner.model} ({winner.figure})"
        for winner in winners
    ]


def _not_compared(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return a sentence on the speeds that other programs have slowed down, if there are any."""
    found = [(name, row) for name, row in zip(names, rows, strict=True) if displaced(row)]
    if not found:
        return []
    least = min(row["processor_share"] for _, row in found)
    which = (
        "speeds" if len(found) == len(rows) else f"speeds of {', '.join(name for name, _ in found)}"
    )
    return [
        f"{which} are not compared: other programs were running, and the threads got {least:.0%} of the processor time"
        " that they asked for"
    ]


def _after_reference(winner: Winner, rows: Sequence[Row]) -> str:
    """Return what follows the word of a winner that the reference itself beats."""
    reference, best = rows[0], rows[winner.row]
    if winner.aspect == "size":
        beaten = reference["weight_bytes"] < best["weight_bytes"]
        beaten = beaten and not _same_bytes(reference, best)
    else:
        key = "decode_tokens_per_second"
        beaten = (
            winner.aspect == "speed"
            and (reference[key] or 0) > best[key]
            and not displaced(reference)
        )
        beaten = beaten and not _same_pace(best, reference)
    return " after the reference" if beaten else ""
