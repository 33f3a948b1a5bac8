"""Verdict on an evaluation: the Pareto front, the best models by size, quality and speed, and conclusions in sentences.

The verdict is computed once from the rows of an evaluation, for the command line, the report, the JSON document and the
Python API alike. A model is on the Pareto front of size and divergence if no other model is at most as large (within
half a percent) and at most as far from the reference, and better in one of the two. The sentences call a difference in
divergence significant only if it exceeds twice its standard error, and a difference in speed only if it exceeds both
the spread of the decoding steps and 5 %. Speeds measured while other programs used the processor (`FULL_SHARE`) are
marked and not compared.
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
SIZE_TOLERANCE = 0.005  # relative; headers and small tensors may differ by this much
MAX_RIVAL_SIZE = 1.25  # times the size of a model; larger models are not compared with it
SIGNIFICANT_ERRORS = 2.0  # standard errors that make a difference significant
SPEED_TOLERANCE = 0.05  # relative; smaller differences are within the noise between runs
# Interquartile range of the step times of a reliable speed over their median
MAX_STEADY_SPREAD = 1.0
UNRELIABLE_MARK = "~"  # precedes an unreliable speed


@dataclass(frozen=True, slots=True)
class Winner:
    """The best of the compared models in one aspect.

    Attributes:
        aspect: ``size``, ``quality`` (KL divergence) or ``speed`` (tokens per second of one sequence).
        row: index of its row in the evaluation.
        model: name of the model.
        figure: its value in words, e.g. ``weights 3.72 MB, 2.25 times smaller than demo``.
    """

    aspect: str
    row: int
    model: str
    figure: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Conclusions of an evaluation.

    Attributes:
        names: shortest distinguishable names of all models, the reference first.
        pareto_front: indices of the rows on the Pareto front of size and KL divergence, by increasing size.
        winners: the best model in each aspect that was measured.
        sentences: the conclusions in words, the most important first.
    """

    names: tuple[str, ...]
    pareto_front: tuple[int, ...]
    winners: tuple[Winner, ...]
    sentences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return asdict(self)


def judge(rows: Sequence[Row]) -> Verdict:
    """Compute the verdict from the rows of an evaluation, the reference first."""
    names = short_names([str(row["path"]) for row in rows])
    front = pareto_front(rows)
    winners = tuple(_winners(rows, names))
    sentences = [
        *_rival_sentences(rows, names, front),
        *_winner_sentences(winners, rows),
        *_excluded_speed_sentences(rows, names),
    ]
    return Verdict(tuple(names), front, winners, tuple(sentences))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or as many components as are needed to make the names differ."""
    path_parts = [Path(path).absolute().parts[1:] for path in paths]
    different = len(set(path_parts))
    for count in range(1, max(map(len, path_parts), default=0) + 1):
        shortened = ["/".join(part[-count:]) for part in path_parts]
        if len(set(shortened)) == different:
            return shortened
    return list(paths)


def pareto_front(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return the indices of the models on the Pareto front of size and KL divergence, by increasing size."""
    compared_rows = _compared_models(rows)
    points: dict[int, tuple[int, float]] = {
        index: (rows[index]["weight_bytes"], rows[index]["kl_mean"]) for index in compared_rows
    }

    def beats(other: int, index: int) -> bool:
        """Return whether a model dominates another one: not larger, and closer to the reference (or smaller)."""
        (other_size, other_kl), (own_size, own_kl) = points[other], points[index]
        if other_size > own_size * (1 + SIZE_TOLERANCE):
            return False
        return other_kl < own_kl or (
            other_kl == own_kl and other_size < own_size * (1 - SIZE_TOLERANCE)
        )

    front = [
        index for index in compared_rows if not any(beats(other, index) for other in compared_rows)
    ]
    return tuple(sorted(front, key=points.__getitem__))


def _compared_models(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the models that were compared with the reference."""
    return [index for index, row in enumerate(rows) if row["kl_mean"] is not None]


def _winners(rows: Sequence[Row], names: Sequence[str]) -> list[Winner]:
    """Return the best model in each measured aspect; ties are resolved by the smaller divergence."""
    compared_rows = _compared_models(rows)
    if not compared_rows:
        return []
    reference = rows[0]

    def ratio_text(key: str, index: int, larger_word: str, smaller_word: str) -> str:
        """Describe the ratio of a figure to that of the reference; "" if they are equal."""
        ratio = rows[index][key] / reference[key] if reference[key] else math.nan
        if not 0 < ratio < math.inf or abs(ratio - 1) < SIZE_TOLERANCE:
            return ""
        factor, adjective = (ratio, larger_word) if ratio > 1 else (1 / ratio, smaller_word)
        return f", {significant(factor)} times {adjective} than {names[0]}"

    def best_row(key: Callable[[Row], float]) -> int:
        """Return the index of the row with the smallest key."""
        return min(compared_rows, key=lambda index: (key(rows[index]), rows[index]["kl_mean"]))

    def ties_text(
        first: int,
        is_same: Callable[[Row, Row], bool],
        others: Sequence[int],
        label: str = "not told apart",
    ) -> str:
        """List the models whose figure is the same as that of the first; "" if there are none."""
        ties = [
            names[index] for index in others if index != first and is_same(rows[first], rows[index])
        ]
        return f"; {label}: {', '.join(ties)}" if ties else ""

    smallest = best_row(lambda row: row["weight_bytes"])
    text = _format_weights(rows[smallest]) + ratio_text(
        "weight_bytes", smallest, "larger", "smaller"
    )
    winners = [
        Winner(
            "size",
            smallest,
            names[smallest],
            text + ties_text(smallest, _same_bytes, compared_rows, "as small"),
        )
    ]
    closest = best_row(lambda row: row["kl_mean"])
    text = f"KL {significant(rows[closest]['kl_mean'])}, {_format_weights(rows[closest])}"
    winners.append(
        Winner(
            "quality", closest, names[closest], text + ties_text(closest, _same_kl, compared_rows)
        )
    )
    key = "decode_tokens_per_second"
    timed = [
        index for index in compared_rows if rows[index][key] and not was_slowed_down(rows[index])
    ]
    reference_timed = reference[key] and not was_slowed_down(reference)
    if timed:
        fastest = max(timed, key=lambda index: rows[index][key])
        text = f"{format_speed(rows[fastest])} tokens/s"
        if reference_timed and not _same_speed(rows[fastest], reference):
            text += ratio_text(key, fastest, "faster", "slower")
            ties = ties_text(fastest, _same_speed, timed)
        else:
            ties = ties_text(fastest, _same_speed, [*([0] if reference_timed else []), *timed])
        winners.append(Winner("speed", fastest, names[fastest], text + ties))
    return winners


def is_unsteady(row: Row) -> bool:
    """Return whether the step times of a speed measurement vary too much for a reliable result."""
    return (row.get("tpot_spread") or 0.0) > MAX_STEADY_SPREAD


def was_slowed_down(row: Row) -> bool:
    """Return whether other programs took processor time from the threads during the speed measurement."""
    processor_share = row.get("processor_share")
    return processor_share is not None and processor_share < FULL_SHARE


def format_speed(row: Row) -> str:
    """Format the tokens per second of a row, with a mark if the measurement is unreliable."""
    mark = UNRELIABLE_MARK if is_unsteady(row) or was_slowed_down(row) else ""
    return f"{mark}{significant(row['decode_tokens_per_second'])}"


def _format_weights(row: Row) -> str:
    """Describe the size of the weights of a row."""
    return f"weights {size(row['weight_bytes'])}"


def _same_bytes(row: Row, other: Row) -> bool:
    """Return whether two models have the same size within the tolerance."""
    return bool(
        abs(row["weight_bytes"] - other["weight_bytes"]) <= SIZE_TOLERANCE * row["weight_bytes"]
    )


def _same_kl(row: Row, other: Row) -> bool:
    """Return whether the difference of two divergences is not significant."""
    errors = [model_row["kl_se"] or 0.0 for model_row in (row, other)]
    difference: float = abs(row["kl_mean"] - other["kl_mean"])
    return difference == 0 or difference < SIGNIFICANT_ERRORS * math.hypot(*errors)


def _same_speed(row: Row, other: Row) -> bool:
    """Return whether two speeds differ by less than the tolerance or the spread of the step times."""
    slower, faster = sorted(model_row["decode_tokens_per_second"] for model_row in (row, other))
    spreads = [model_row.get("tpot_spread") or 0.0 for model_row in (row, other)]
    return bool(faster / slower - 1 <= max(SPEED_TOLERANCE, math.hypot(*spreads)))


def _rival_sentences(rows: Sequence[Row], names: Sequence[str], front: Sequence[int]) -> list[str]:
    """Return a sentence for each model on the front that is better than a rival of about its size or larger."""
    sentences = []
    for index in front:
        size_here, kl = rows[index]["weight_bytes"], rows[index]["kl_mean"]
        rivals = [
            other
            for other in _compared_models(rows)
            if size_here * (1 - SIZE_TOLERANCE)
            <= rows[other]["weight_bytes"]
            <= size_here * MAX_RIVAL_SIZE
            and rows[other]["kl_mean"] > kl
        ]
        if not rivals:
            continue
        rival = min(rivals, key=lambda other: rows[other]["kl_mean"])
        saving = 1 - size_here / rows[rival]["weight_bytes"]
        size_text = "the same bytes" if saving <= SIZE_TOLERANCE else f"{saving:.0%} fewer bytes"
        rival_kl = rows[rival]["kl_mean"]
        model_text = f"{names[index]}: KL {significant(kl)}"
        if _same_kl(rows[index], rows[rival]):
            text = f"{model_text}, not told apart from {names[rival]} ({significant(rival_kl)}) in {size_text}"
        elif kl <= 0:
            conjunction = "as" if saving <= SIZE_TOLERANCE else "than"
            text = f"{model_text} in {size_text} {conjunction} {names[rival]}, which has KL {significant(rival_kl)}"
        else:
            text = f"{model_text}, {significant(rival_kl / kl)} times less than {names[rival]} in {size_text}"
        sentences.append(text)
    return sentences


def _winner_sentences(winners: Sequence[Winner], rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each winner; it says so if the reference itself is smaller or faster."""
    adjectives = {"size": "smallest", "quality": "closest", "speed": "fastest"}
    return [
        f"{adjectives[winner.aspect]}{_after_reference(winner, rows)}: {winner.model} ({winner.figure})"
        for winner in winners
    ]


def _excluded_speed_sentences(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return a sentence that names the speeds excluded because other programs were running, if any."""
    excluded = [(name, row) for name, row in zip(names, rows, strict=True) if was_slowed_down(row)]
    if not excluded:
        return []
    smallest_share = min(row["processor_share"] for _, row in excluded)
    subject = (
        "speeds"
        if len(excluded) == len(rows)
        else f"speeds of {', '.join(name for name, _ in excluded)}"
    )
    return [
        f"{subject} are not compared: other programs were running, and the threads got {smallest_share:.0%} of the"
        " processor time that they asked for"
    ]


def _after_reference(winner: Winner, rows: Sequence[Row]) -> str:
    """Return " after the reference" if the reference itself is better than the winner, else ""."""
    reference, best = rows[0], rows[winner.row]
    if winner.aspect == "size":
        is_reference_better = reference["weight_bytes"] < best["weight_bytes"]
        is_reference_better = is_reference_better and not _same_bytes(reference, best)
    else:
        key = "decode_tokens_per_second"
        is_reference_better = (
            winner.aspect == "speed"
            and (reference[key] or 0) > best[key]
            and not was_slowed_down(reference)
        )
        is_reference_better = is_reference_better and not _same_speed(best, reference)
    return " after the reference" if is_reference_better else ""
