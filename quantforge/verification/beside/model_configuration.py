"""``config.json`` against the source's: every key, both ways, by meaning.

A key that is equal needs no reason. Of the others, a value that transformers itself fills in for the source may be
written out, one that it would fill in again may be left out, and the rotary embedding has several spellings; the rest
needs a row of the table (`reasons`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.verification.beside.defaults import ROPE, filled, same_rope, without
from quantforge.verification.beside.facts import Pair
from quantforge.verification.beside.reasons import CONFIGURATION, unexplained
from quantforge.verification.beside.trees import ABSENT, Change, Path, at, changes, same
from quantforge.verification.findings import Report, Severity

NAME = "config.json"
_SPEED = "use_cache"
# What transformers leaves out when it saves, because every reader takes it for granted.
_LEFT_OUT = {
    "use_cache": True, "tie_word_embeddings": True, "output_attentions": False, "output_hidden_states": False,
    "is_encoder_decoder": False, "chunk_size_feed_forward": 0, "return_dict": True, "is_decoder": False,
    "add_cross_attention": False, "pruned_heads": {}, "torchscript": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
}  # fmt: skip


def check_configuration(report: Report, pair: Pair) -> None:
    """Report every key whose value is not the source's and has no reason to differ."""
    for change, severity, rule in configuration_changes(pair):
        report.add("configuration", NAME, f"{change} ({rule})", severity)


def configuration_changes(pair: Pair) -> list[tuple[Change, Severity, str]]:
    """Return the changes that nothing explains, how bad each is, and by which rule."""
    own, other = pair.own.plain, aligned(pair.own.plain, pair.other.plain)
    found = unexplained(changes(own, other), CONFIGURATION, pair)
    left = _by_meaning(own, other, found) if found else {}
    return [(change, *_weight(change, others_differ=others)) for change, others in left.items()]


def _weight(change: Change, *, others_differ: bool) -> tuple[Severity, str]:
    if others_differ:
        return Severity.WARNING, "the default of transformers; other loaders may have another"
    if change.path[-1] == _SPEED and isinstance(change.own, bool):
        return Severity.WARNING, "decoding is slow without a cache"
    return Severity.ERROR, "equal to the source, or changed for a reason that is known"


def aligned(own: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the source's configuration, or that of its language model where the artifact is only this."""
    inner = other.get("text_config")
    if isinstance(inner, Mapping) and "text_config" not in own:
        return {**{key: other[key] for key in ("dtype", "torch_dtype") if key in other}, **inner}
    return other


def _by_meaning(
    own: Mapping[str, Any], other: Mapping[str, Any], found: list[Change]
) -> dict[Change, bool]:
    """Return the changes that mean something else; True marks those that do so to other loaders only."""
    expected = filled(other)
    gone = [change.path for change in found if change.own is ABSENT or change.own is None]
    restored = filled(without(other, gone)) if gone else {}
    left = {}
    for change in found:
        if set(change.path) & set(ROPE):
            if not _same_rope(own, other, change.path):
                left[change] = False
            elif _dropped(own, other, change):
                left[change] = True
        elif not _written_out(change, expected):
            if (change.own is not ABSENT and change.own is not None) or not _filled_in_again(
                change, expected, restored
            ):
                left[change] = False
            elif not _taken_for_granted(change):
                left[change] = True
    return left


def _dropped(own: Mapping[str, Any], other: Mapping[str, Any], change: Change) -> bool:
    """Return whether a part of the rotary embedding is gone without another spelling of it."""
    if change.other in (None, ABSENT) or change.own not in (None, ABSENT):
        return False
    depth = next(number for number, key in enumerate(change.path) if key in ROPE)
    before = at(other, change.path[:depth])
    return not any(key in ROPE and key not in before for key in at(own, change.path[:depth]))


def _taken_for_granted(change: Change) -> bool:
    if change.other is None or change.other is ABSENT:
        return True
    return same(_LEFT_OUT.get(change.path[-1], ABSENT), change.other)


def _filled_in_again(
    change: Change, expected: Mapping[str, Any], restored: Mapping[str, Any]
) -> bool:
    """Return whether transformers reads the same without the key; a null is no value if the family has no default."""
    again, before = at(restored, change.path), at(expected, change.path)
    if again is ABSENT and before is ABSENT:
        return change.own in (None, ABSENT) and change.other in (None, ABSENT)
    if change.own is None and again is not None:
        return False
    return same(_null(again), _null(before))


def _null(value: Any) -> Any:
    return None if value is ABSENT else value


def _written_out(change: Change, expected: Mapping[str, Any]) -> bool:
    """Return whether the value is what transformers fills in; of a table, whether each of its values is."""
    value = at(expected, change.path)
    if isinstance(change.own, Mapping) and isinstance(value, Mapping):
        return not [item for item in changes(change.own, value) if item.own is not ABSENT]
    return value is not ABSENT and same(change.own, value)


def _same_rope(own: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> bool:
    """Compare the rotary embeddings of the table of the configuration that a place is in."""
    depth = next(number for number, key in enumerate(path) if key in ROPE)
    first, second = at(own, path[:depth]), at(other, path[:depth])
    both = isinstance(first, Mapping) and isinstance(second, Mapping)
    return both and same_rope(first, second)
