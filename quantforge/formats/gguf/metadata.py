"""General metadata keys of a GGUF file: model name, license, base model, provenance, split parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.errors import InputError
from quantforge.files.opener import FILES
from quantforge.formats.gguf.container import MetadataValue, ValueType, string_value, u32_value
from quantforge.recipe import Recipe
from quantforge_files.roles import CARD

QUANTIZATION_VERSION = 2  # of ggml's blocks
_FIELD = re.compile(
    r"^(license|license_name|license_link|base_model):[ \t]*([^\n]*)$", re.MULTILINE
)
_ITEM = re.compile(r"^base_model:[ \t]*\n[ \t]*-[ \t]*([^\n]+)$", re.MULTILINE)
# llama.cpp looks for the tokens of that model when the name says so, and fails if one is missing.
_NAMED_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
_PHI3_TOKENS = frozenset({"</s>", "<unk>", "<s>", "<|endoftext|>"})


def general_keys(
    name: str, arch: str, file_type: int, weights: int, card: Path | None, tokens: Sequence[str]
) -> dict[str, MetadataValue]:
    """Return the ``general.*`` keys. ``weights`` is the number of weights, ``tokens`` the vocabulary."""
    keys = {"general.architecture": string_value(arch), "general.type": string_value("model")}
    if not _NAMED_PHI3.search(name) or set(tokens) >= _PHI3_TOKENS:
        keys["general.name"] = string_value(name)
    keys["general.size_label"] = string_value(size_label(weights))
    keys |= _card_keys(card)
    keys["general.file_type"] = u32_value(file_type)
    keys["general.quantization_version"] = u32_value(QUANTIZATION_VERSION)
    return keys


def phi3_space_stripping(name: str, tokens: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: whether llama.cpp strips spaces after an added token, as it does in models named Phi-3."""
    is_phi3 = bool(_NAMED_PHI3.search(name)) and set(tokens) >= _PHI3_TOKENS
    unstripped = _PHI3_TOKENS - {"</s>"}
    return lambda string_value: is_phi3 and string_value not in unstripped


def provenance_keys(
    recipe: Recipe, dataset: str, entries: int, chunks: int
) -> dict[str, MetadataValue]:
    """Return the keys that record how the file was made.

    Args:
        recipe: by which the weights were quantized; an empty one where that is unknown has no key.
        dataset: that importance was observed on; empty where none was.
        entries: tensors of which it was observed.
        chunks: rows of the dataset, 0 where that is unknown.
    """
    keys = {"quantforge.version": string_value(__version__)}
    if recipe != Recipe():
        keys["quantforge.recipe"] = string_value(recipe.to_toml())
    if dataset:
        keys |= {
            "quantize.imatrix.dataset": string_value(dataset),
            "quantize.imatrix.entries_count": u32_value(entries),
        }
    if chunks:
        keys["quantize.imatrix.chunks_count"] = u32_value(chunks)
    return keys


def size_label(weights: int) -> str:
    """Return the number of weights as a label: ``8.0B``, ``135M``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if weights >= size:
            figure = f"{weights / size:.1f}" if weights < 10 * size else f"{weights / size:.0f}"
            return f"{figure}{unit}"
    return str(weights)


def _card_keys(card: Path | None) -> dict[str, MetadataValue]:
    """Return license and base model from the front matter of the model card, if it has them."""
    if card is None:
        return {}
    try:
        content = FILES.text(card, CARD, card.parent)
    except InputError:
        return {}  # a card is for people; an unreadable one costs its keys only
    if not content.startswith("---"):
        return {}
    matter = content.split("\n---", 1)[0]
    fields = {match[1]: match[2].strip().strip("'\"") for match in _FIELD.finditer(matter)}
    item = _ITEM.search(matter)
    base = item[1].strip().strip("'\"") if item else fields.pop("base_model", "")
    keys = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
    card_keys = {
        f"general.{keys[key]}": string_value(value)
        for key, value in fields.items()
        if value and key in keys
    }
    return card_keys | _base_model_keys(base)


def _base_model_keys(base: str) -> dict[str, MetadataValue]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        return {}
    organization, _, name = base.partition("/")
    return {
        "general.base_model.count": u32_value(1),
        "general.base_model.0.name": string_value(name),
        "general.base_model.0.organization": string_value(organization),
        "general.base_model.0.repo_url": string_value(f"https://huggingface.co/{base}"),
    }


def split_keys(number: int, count: int, tensors: int) -> dict[str, MetadataValue]:
    """Return the keys that describe one part of a split file."""
    return {
        "split.no": MetadataValue(ValueType.U16, number),
        "split.count": MetadataValue(ValueType.U16, count),
        "split.tensors.count": MetadataValue(ValueType.I32, tensors),
    }


def merge_keys(*key_sets: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Merge metadata in order; the parts must not share keys."""
    merged: dict[str, MetadataValue] = {}
    for key_set in key_sets:
        assert not merged.keys() & key_set.keys()
        merged |= key_set
    return merged
