"""Figures of caches as tables of text: what each costs in quality, by position, and how far back a key is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantforge.evaluation.columns import ABSENT, Column
from quantforge.results.significant import significant, with_error

Row = Mapping[str, Any]
FIRST_RANK = 2  # of columns by position or distance: the farthest stays longest


def cache_tables(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[Column]]]:
    """Return the tables with their titles; none without caches.

    Args:
        rows: of the models.
        names: theirs.
    """
    found = [*_found(rows, names)]
    if not found:
        return []
    label = Column("cache", tuple(name for name, _ in found))
    caches = [cache for _, cache in found]
    tables = [
        ("Caches, each against one of 16 bits", [label, *_summary(caches)]),
        (
            "KL by position: tokens attended to, up to",
            [label, *_by(caches, "by_position", "last", _divergence)],
        ),
        (
            "Nats that a planted key gains, by how far back it is",
            [label, *_by(caches, "by_distance", "distance", _gain)],
        ),
    ]
    return [(title, columns) for title, columns in tables if len(columns) > 1]


def cache_notes(trial: Mapping[str, Any] | None) -> list[str]:
    """Return the line on how caches were tried."""
    if trial is None:
        return []
    text = f"{trial['windows']} window{'s' * (trial['windows'] != 1)} of {trial['length']:,} tokens"
    said = f"caches: {text}, float32 from keys and values in 16 bits; requests: of {trial['length']:,} tokens"
    said += f" in the memory that {trial['requests']} take with a cache of 16 bits, by pages"
    if trial["keys"]:
        said += (
            f"; keys: {trial['key_tokens']} random tokens of the text behind a cue of {trial['cue_tokens']}, planted"
            f" once, then the cue again ({trial['keys']} prompts); gain: of a token's log-probability against another"
            " key's having been planted; where it is near 0 with 16 bits, the model does not look so far back"
        )
    return [said]


def _found(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield every cache of every model with its label: its name alone where there is one model."""
    for name, row in zip(names, rows, strict=True):
        for cache in row["caches"] or ():
            yield (cache["kind"] if len(rows) == 1 else f"{name} {cache['kind']}"), cache


def _summary(caches: Sequence[Row]) -> Iterator[Column]:
    def column(header: str, rank: int, write: Callable[[Row], str]) -> Column:
        return Column(header, tuple(write(cache) for cache in caches), rank)

    yield column("bytes/token", 2, lambda cache: f"{cache['token_bytes']:,}")
    yield column("requests", 2, lambda cache: f"{cache['requests']:,}")
    yield column("KL", 1, lambda cache: _error(cache, "kl_mean", "kl_se"))
    yield column("key gain", 2, _gain)
    yield column("change of it", 3, lambda cache: _error(cache, "key_change", "key_change_se"))
    yield column("keys %", 4, _keys)


def _by(
    caches: Sequence[Row], key: str, name: str, write: Callable[[Row], str]
) -> Iterator[Column]:
    """Yield one column for every position, or distance."""
    places = list(dict.fromkeys(one[name] for cache in caches for one in cache[key]))
    for number, place in enumerate(places):
        cells = tuple(
            next((write(one) for one in cache[key] if one[name] == place), ABSENT)
            for cache in caches
        )
        yield Column(f"{place:,}", cells, FIRST_RANK + len(places) - number)


def _divergence(figures: Row) -> str:
    return significant(figures["kl_mean"])


def _gain(figures: Row) -> str:
    return ABSENT if figures["key_gain"] is None else significant(figures["key_gain"])


def _keys(figures: Row) -> str:
    share = figures["keys_found"]
    return ABSENT if share is None else significant(100 * share)


def _error(figures: Row, mean: str, error: str) -> str:
    return ABSENT if figures[mean] is None else with_error(figures[mean], figures[error])
