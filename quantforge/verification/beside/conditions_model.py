"""Conditions on keys of ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

import re
from typing import Any

from quantforge.formats import format_of
from quantforge.verification.beside.facts import Pair
from quantforge.verification.beside.trees import ABSENT, Change, at

FLOATS = ("float16", "bfloat16", "float32")


def dtype(change: Change, pair: Pair) -> bool:
    """Return whether each stated type is a kept tensor's, the source's, or what kernels of the format compute in."""
    place = at(pair.own.plain, change.path[:-1])
    known = any(place.get(key) is not None for key in ("dtype", "torch_dtype"))
    return known and stated(pair.own.plain) <= types(pair)


def stated(config: Any) -> set[str]:
    """Return every type that a configuration states, at any depth."""
    found: set[str] = set()
    for key, value in config.items():
        if key in {"dtype", "torch_dtype"} and value is not None:
            found.add(str(value).removeprefix("torch."))
        elif isinstance(value, dict):
            found |= stated(value)
    return found


def types(pair: Pair) -> set[str]:
    """Return the types in which the rest of the model may be computed."""
    from quantforge.checkpoint.safetensors import TORCH_NAMES

    known = {
        TORCH_NAMES[name] for name in pair.own.dtypes | pair.other.dtypes if name in TORCH_NAMES
    }
    if pair.form and format_of(pair.form).ABOUT.half:
        known.add("float16")
    return (known | stated(pair.other.plain)) & set(FLOATS)


def untied(change: Change, pair: Pair) -> bool:
    """Return whether the head is no longer tied, and lies in the file as a tensor of its own."""
    head = any(re.match(r"(.*\.)?lm_head\.", name) for name in pair.own.tensors)
    return change.own is False and change.other in (True, ABSENT) and head


def padding(change: Change, pair: Pair) -> bool:
    """Return whether the padding token, which the source lacks, is one of the source's own special tokens."""
    if change.other not in (ABSENT, None) or type(change.own) is not int:
        return False
    special = [pair.other.plain.get(f"{role}_token_id") for role in ("bos", "eos", "unk")]
    ids = [item for found in special for item in (found if isinstance(found, list) else [found])]
    return change.own in ids


def classes(change: Change, pair: Pair) -> bool:
    """Return whether the class, which the source does not name, is that of the family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = NAMES.get(str(pair.other.plain.get("model_type")), ())
    names = [known] if isinstance(known, str) else list(known)
    return change.other in (ABSENT, None) and change.own in [[name] for name in names]


def sampling(change: Change, pair: Pair) -> bool:
    """Return whether sampling is switched on for a source with settings of it, or by GPTQModel, which always does."""
    other = pair.other.readable("generation_config.json")
    meant = any(other.get(key) is not None for key in ("temperature", "top_p", "top_k", "min_p"))
    meta = pair.own.quantization.get("meta")
    maker = str(meta.get("quantizer")) if isinstance(meta, dict) else ""
    return change.own is True and change.other is ABSENT and (meant or "gptqmodel:" in maker)


def listed_padding(change: Change, pair: Pair) -> bool:
    """Return `padding` of an id that may be a list of one."""
    first = change.own[0] if isinstance(change.own, list) and len(change.own) == 1 else change.own
    return padding(Change(change.path, first, change.other), pair)
