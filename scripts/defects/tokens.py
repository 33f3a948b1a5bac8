"""Defects in ``tokenizer.json``: vocabulary, merges, flags of added tokens, steps, truncation, padding."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from scripts.defects.files import Copy
from scripts.defects.values import mutated


def tokenizer(copy: Copy, chance: random.Random) -> str | None:
    """Change ``tokenizer.json``: vocabulary, merges, flags of added tokens, steps, truncation, padding."""
    document = copy.json("tokenizer.json")
    if document is None:
        return None
    change: Callable[[dict[str, Any], random.Random], str | None] = chance.choice(_TOKENIZER)
    before = json.dumps(document)
    text = change(document, chance)
    if text is None or json.dumps(document) == before:
        return None
    copy.write_json("tokenizer.json", document)
    return f"tokenizer.json: {text}"


def _exchange_tokens(document: dict[str, Any], chance: random.Random) -> str | None:
    vocabulary = document["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        return None
    first, second = chance.sample(sorted(vocabulary), 2)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return f"ids of {first!r} and {second!r} exchanged"


def _rename_token(document: dict[str, Any], chance: random.Random) -> str | None:
    vocabulary = document["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        return None
    token = chance.choice(sorted(vocabulary))
    vocabulary[f"{token}~"] = vocabulary.pop(token)
    return f"{token!r} renamed"


def _merges(document: dict[str, Any], chance: random.Random) -> str | None:
    merges = document["model"].get("merges") or []
    if len(merges) < 3:
        return None
    first, second = chance.sample(range(len(merges)), 2)
    kind = chance.choice(("exchange", "remove", "add", "cut"))
    if kind == "exchange":
        merges[first], merges[second] = merges[second], merges[first]
    elif kind == "remove":
        del merges[first]
    elif kind == "add":
        merges.append(merges[first])
    else:
        del merges[len(merges) // 2 :]
    return f"merges: {kind} {first}"


def _flags(document: dict[str, Any], chance: random.Random) -> str | None:
    added = document.get("added_tokens")
    if not added:
        return None
    token = chance.choice(added)
    flag = chance.choice(("special", "lstrip", "rstrip", "single_word", "normalized"))
    token[flag] = not token[flag]
    return f"added token {token['content']!r}: {flag} = {token[flag]}"


def _more_tokens(document: dict[str, Any], chance: random.Random) -> str | None:
    added = document.setdefault("added_tokens", [])
    if added and chance.random() < 0.4:
        token = added.pop(chance.randrange(len(added)))
        return f"added token {token['content']!r} removed"
    content = chance.choice(("the", " of", "<evil>", "ing"))
    known = document["model"]["vocab"]
    number = known.get(content, len(known)) if isinstance(known, dict) else 5
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": number, "content": content, **flags, "special": chance.random() < 0.5})
    return f"added token {content!r}"


def _truncation(document: dict[str, Any], chance: random.Random) -> str:
    length = chance.choice((4, 64, 512))
    document["truncation"] = {
        "direction": "Right",
        "max_length": length,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    return f"truncation to {length}"


def _padding(document: dict[str, Any], chance: random.Random) -> str:
    document["padding"] = {"strategy": {"Fixed": chance.choice((8, 64))}, "direction": "Left",
                           "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    return "padding"


def _model(document: dict[str, Any], chance: random.Random) -> str:
    model = document["model"]
    key = chance.choice(("dropout", "byte_fallback", "fuse_unk", "ignore_merges", "unk_token",
                         "continuing_subword_prefix", "end_of_word_suffix"))  # fmt: skip
    values = {
        "dropout": 0.1,
        "unk_token": "the",
        "continuing_subword_prefix": "##",
        "end_of_word_suffix": "</w>",
    }
    model[key] = values.get(key, not model.get(key))
    return f"model.{key} = {model[key]!r}"


def _steps(document: dict[str, Any], chance: random.Random) -> str:
    part = chance.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    new: dict[str, list[Any]] = {
        "normalizer": [{"type": "Lowercase"}, {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "e"},
                                                                "content": "3"}, None],
        "pre_tokenizer": [{"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                   "use_regex": True}, {"type": "Digits", "individual_digits": True}],
        "post_processor": [{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}},
                            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                            "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}}}, None],
        "decoder": [{"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "e",
                     "prepend_scheme": "always", "split": True}, None],
    }  # fmt: skip
    old = document.get(part)
    if old and chance.random() < 0.4:
        text = mutated(old, chance, {})
        return f"{part}: {text}"
    document[part] = chance.choice([value for value in new[part] if value != old])
    return f"{part} = {json.dumps(document[part])[:60]}"


_TOKENIZER = (
    _exchange_tokens,
    _rename_token,
    _merges,
    _flags,
    _more_tokens,
    _truncation,
    _padding,
    _model,
    _steps,
)
