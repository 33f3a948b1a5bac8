"""The one table of what may differ from the source beside the weights, why, and what must hold of the new value.

A difference that no row of its file allows is a finding. Whoever adds a method that changes a configuration on purpose
(other norms, rotations, fewer experts) adds a row here, whose ``holds`` looks at what the tensors say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from quantforge.verify.beside.facts import Pair
from quantforge.verify.beside.trees import ABSENT, Change, at, same

Holds = Callable[[Change, Pair], bool]
FLOATS = ("float16", "bfloat16", "float32")
_VERSION = re.compile(r"\d{1,4}(\.\d{1,5}){1,3}(\.?(dev|rc|a|b|post)\d*)?")


@dataclass(frozen=True, slots=True)
class Reason:
    """One row: a pattern of places (``*.dtype`` is also ``dtype``), why they may differ, and on what condition."""

    place: str
    why: str
    holds: Holds

    def allows(self, change: Change, pair: Pair) -> bool:
        """Whether the row is about a change, and its condition holds."""
        return fnmatchcase(f".{change.key}", f".{self.place}") and self.holds(change, pair)


def unexplained(found: Iterable[Change], rows: Sequence[Reason], pair: Pair) -> list[Change]:
    """The changes that no row allows."""
    return [change for change in found if not any(row.allows(change, pair) for row in rows)]


def _is(*values: Any) -> Holds:
    """The new value is one of a few, and the source has none, or a null."""

    def holds(change: Change, _: Pair) -> bool:
        return change.other in (ABSENT, None) and any(same(change.own, value) for value in values)

    return holds


def _text(change: Change, _: Pair) -> bool:
    return change.own is ABSENT or isinstance(change.own, str)


def _version(change: Change, _: Pair) -> bool:
    return change.own is ABSENT or (
        isinstance(change.own, str) and bool(_VERSION.fullmatch(change.own))
    )


def _dtype(change: Change, pair: Pair) -> bool:
    """A type that kept tensors have, that the source states, or what kernels of these methods compute in."""
    place = at(pair.own.plain, change.path[:-1])
    stated = any(place.get(key) is not None for key in ("dtype", "torch_dtype"))
    return stated and _stated(pair.own.plain) <= _types(pair)


def _stated(config: Any) -> set[str]:
    """Every type that a configuration states, at any depth."""
    found: set[str] = set()
    for key, value in config.items():
        if key in {"dtype", "torch_dtype"} and value is not None:
            found.add(str(value).removeprefix("torch."))
        elif isinstance(value, dict):
            found |= _stated(value)
    return found


def _types(pair: Pair) -> set[str]:
    from quantforge.checkpoint.safetensors import TORCH_NAMES

    known = {
        TORCH_NAMES[name] for name in pair.own.dtypes | pair.other.dtypes if name in TORCH_NAMES
    }
    if pair.form in {"gptq", "gptq_v2", "awq"}:
        known.add("float16")
    return (known | _stated(pair.other.plain)) & set(FLOATS)


def _untied(change: Change, pair: Pair) -> bool:
    """A head that was quantized by itself is no longer the embedding: it lies in the file."""
    head = any(re.match(r"(.*\.)?lm_head\.", name) for name in pair.own.tensors)
    return change.own is False and change.other in (True, ABSENT) and head


def _padding(change: Change, pair: Pair) -> bool:
    """A padding token where the source has none: one of its own special tokens."""
    if change.other not in (ABSENT, None) or type(change.own) is not int:
        return False
    special = [pair.other.plain.get(f"{role}_token_id") for role in ("bos", "eos", "unk")]
    ids = [item for found in special for item in (found if isinstance(found, list) else [found])]
    return change.own in ids


def _classes(change: Change, pair: Pair) -> bool:
    """The class that the family has, where the source names none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = NAMES.get(str(pair.other.plain.get("model_type")), ())
    names = [known] if isinstance(known, str) else list(known)
    return change.other in (ABSENT, None) and change.own in [[name] for name in names]


CONFIGURATION: tuple[Reason, ...] = (
    Reason("*dtype", "the type that the rest is computed in", _dtype),
    Reason("*torch_dtype", "the older spelling of dtype", _dtype),
    Reason("*transformers_version", "whoever saves writes its own version", _version),
    Reason("*_name_or_path", "where it was loaded from; set anew by every loader", _text),
    Reason("_commit_hash", "where it was loaded from", _text),
    Reason(
        "_attn_implementation_autoset", "a note of transformers 4.46 to itself", _is(True, False)
    ),
    Reason("*tie_word_embeddings", "the head was quantized by itself", _untied),
    Reason("*pad_token_id", "a tokenizer without padding was given one of its tokens", _padding),
    Reason("architectures", "the class of the family", _classes),
)
