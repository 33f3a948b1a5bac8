"""The keys of a file: what the model is, where it comes from, its parameters, its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.errors import InputError
from quantforge.files.opener import FILES
from quantforge.formats.gguf.container import Value, ValueType, text, u32
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


def general(
    name: str, arch: str, file_type: int, weights: int, card: Path | None, tokens: Sequence[str]
) -> dict[str, Value]:
    """Return the keys ``general.*``; ``weights`` is their number, ``tokens`` the vocabulary."""
    found = {"general.architecture": text(arch), "general.type": text("model")}
    if not _NAMED_PHI3.search(name) or set(tokens) >= _PHI3_TOKENS:
        found["general.name"] = text(name)
    found["general.size_label"] = text(size_label(weights))
    found |= _from_card(card)
    found["general.file_type"] = u32(file_type)
    found["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    return found


def strips_after(name: str, tokens: Sequence[str]) -> Callable[[str], bool]:
    """Return after which added tokens llama.cpp drops spaces: in a model of that name all but three."""
    named = bool(_NAMED_PHI3.search(name)) and set(tokens) >= _PHI3_TOKENS
    kept = _PHI3_TOKENS - {"</s>"}
    return lambda text: named and text not in kept


def provenance(recipe: Recipe, dataset: str, entries: int, chunks: int) -> dict[str, Value]:
    """Return keys that say what made the file.

    Args:
        recipe: by which the weights were quantized; an empty one where that is unknown has no key.
        dataset: that importance was observed on; empty where none was.
        entries: tensors of which it was observed.
        chunks: rows of the dataset, 0 where that is unknown.
    """
    found = {"quantforge.version": text(__version__)}
    if recipe != Recipe():
        found["quantforge.recipe"] = text(recipe.to_toml())
    if dataset:
        found |= {
            "quantize.imatrix.dataset": text(dataset),
            "quantize.imatrix.entries_count": u32(entries),
        }
    if chunks:
        found["quantize.imatrix.chunks_count"] = u32(chunks)
    return found


def size_label(weights: int) -> str:
    """Return the number of weights as a label: ``8.0B``, ``135M``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if weights >= size:
            figure = f"{weights / size:.1f}" if weights < 10 * size else f"{weights / size:.0f}"
            return f"{figure}{unit}"
    return str(weights)


def _from_card(card: Path | None) -> dict[str, Value]:
    """Return licence and base model from the front matter of the model card; none is ever made up."""
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
    found = {
        f"general.{keys[key]}": text(value)
        for key, value in fields.items()
        if value and key in keys
    }
    return found | _base_model(base)


def _base_model(base: str) -> dict[str, Value]:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        return {}
    organization, _, name = base.partition("/")
    return {
        "general.base_model.count": u32(1),
        "general.base_model.0.name": text(name),
        "general.base_model.0.organization": text(organization),
        "general.base_model.0.repo_url": text(f"https://huggingface.co/{base}"),
    }


def split_keys(number: int, count: int, tensors: int) -> dict[str, Value]:
    """Return the keys by which every part of a split file describes itself."""
    return {
        "split.no": Value(ValueType.U16, number),
        "split.count": Value(ValueType.U16, count),
        "split.tensors.count": Value(ValueType.I32, tensors),
    }


def merged(*parts: Mapping[str, Any]) -> dict[str, Value]:
    """Return all keys in order; one that is stated twice is a mistake of ours."""
    found: dict[str, Value] = {}
    for part in parts:
        assert not found.keys() & part.keys()
        found |= part
    return found
