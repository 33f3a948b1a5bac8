"""Special tokens and chat templates around a vocabulary: ids, tokens put around a text, templates by name.

``tokenizer_config.json`` names the tokens, ``tokenizer.json`` says what is really done, and the two disagree often.
What is done counts: whether a text begins with the beginning-of-sequence token is read from the post-processor.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import read_object
from quantforge.errors import InputError
from quantforge_calibration.chat_templates import DEFAULT, read_templates
from quantforge_calibration.source_error import SourceError
from quantforge_files.roles import SETTINGS

# Pre-tokenizers of byte-level vocabularies for which llama.cpp begins a text with a token unless told otherwise.
_FIRST_TOKEN = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "chameleon", "pixtral"}
)
TEMPLATE_NOTE = "chat template: "  # how each note on a template begins
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


def read_settings(path: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json`` or ``generation_config.json``; {} when there is none.

    Numbers may be of any size: ``model_max_length`` is 10^30 where nobody set it.

    Raises:
        InputError: no JSON object.
    """
    if not path.is_file():
        return {}
    return read_object(path, SETTINGS, path.parent, loose=True)


def flat(node: object, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a node of ``tokenizer.json``: those of a sequence, or the node itself."""
    if not isinstance(node, Mapping):
        return []
    inner = node.get(key)
    return (
        [item for item in inner if isinstance(item, Mapping)] if isinstance(inner, list) else [node]
    )


def special_ids(
    numbers: Mapping[str, int],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    root: Path,
    past: Container[str] = (),
) -> dict[str, int]:
    """Return ids of special tokens by role, of a vocabulary given as ids by piece; those in ``past`` are left out.

    Raises:
        InputError: a special token is not in the vocabulary.
    """
    ids: dict[str, int] = {}
    for role in _SPECIAL:
        stated = settings.get(f"{role}_token")
        content = stated.get("content") if isinstance(stated, Mapping) else stated
        number = config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(content, str) and content in past:
            if (
                role != "eos"
            ):  # a model that cannot write the tokenizer's ends texts by the one of its configuration
                continue
        elif isinstance(content, str):
            if content not in numbers:
                raise InputError(
                    f"tokenizer_config.json: {role}_token {content!r} is not in the vocabulary",
                    "the added tokens are missing from tokenizer.json: save the tokenizer again",
                )
            ids[role] = numbers[content]
            continue
        if type(number) is int and 0 <= number < len(numbers):
            ids[role] = number
    ends = [number for number in ends_of(root) if 0 <= number < len(numbers)]
    if "eos" not in ids and ends:
        ids["eos"] = ends[0]
    others = [number for number in ends if number != ids.get("eos")]
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    return ids


def ends_of(root: Path) -> list[int]:
    """Return the ids that ``generation_config.json`` ends a text at."""
    stated = read_settings(root / "generation_config.json").get("eos_token_id")
    listed = stated if isinstance(stated, list) else [stated]
    return [number for number in listed if type(number) is int]


def begins_by_default(model: str, pre: str) -> bool:
    """Return whether llama.cpp begins a text with the first token where a file says nothing of it.

    Args:
        model: the kind of vocabulary: ``llama`` (pieces, as sentencepiece has them) or ``gpt2`` (bytes).
        pre: the pre-tokenizer of a vocabulary of bytes.
    """
    return model == "llama" or pre in _FIRST_TOKEN


def added_around(
    numbers: Mapping[str, int],
    special: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    model: str,
) -> dict[str, bool]:
    """Return ``add_bos_token`` and ``add_eos_token``: whether the tokenizer puts these around a text."""
    first, last = template_ends(tokenizer)
    if first is None and last is None and model == "llama":
        return {
            f"add_{role}_token": settings.get(f"add_{role}_token") is True
            for role in ("bos", "eos")
        }
    return {
        f"add_{role}_token": role in special and numbers.get(piece or "") == special[role]
        for role, piece in (("bos", first), ("eos", last))
    }


def template_ends(tokenizer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the special tokens that the post-processor puts first and last."""
    first = last = None
    for node in flat(tokenizer.get("post_processor"), "processors"):
        single = node.get("single")
        if node.get("type") != "TemplateProcessing" or not isinstance(single, list):
            continue
        tokens = [item.get("SpecialToken") for item in single if isinstance(item, Mapping) and item]
        if tokens and isinstance(tokens[0], Mapping):
            first = str(tokens[0].get("id"))
        if tokens and isinstance(tokens[-1], Mapping):
            last = str(tokens[-1].get("id"))
    return first, last


def chat_templates(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return chat templates by name in GGUF keys ("" is the default), byte for byte, and notes on them.

    Keys have ASCII letters, digits and ``_`` in names of templates; other characters become ``_``, as in llama.cpp's
    converter. llama.cpp takes an empty template for none.

    Raises:
        InputError: a template cannot be read, or two names have one key.
    """
    try:
        stated = read_templates(root)
    except SourceError as error:
        raise InputError(error.message, error.hint) from error
    found: dict[str, str] = {}
    notes = list(stated.notes)
    for name, text in stated.named.items():
        called = "" if name == DEFAULT else template_key(name)
        if not text:
            notes.append(f"{name} is empty and is not written")
            continue
        if called in found:
            raise InputError(
                f"{root}: the chat template {name!a} has the key of another one, {called}",
                "rename one of them: letters, digits and _ stay",
            )
        if called not in {"", name}:
            notes.append(f"{name!a} is called {called} in the file")
        found[called] = text
    return found, [TEMPLATE_NOTE + note for note in notes]


def template_key(name: str) -> str:
    """Return the last part of the GGUF key for the template of a name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "_"
