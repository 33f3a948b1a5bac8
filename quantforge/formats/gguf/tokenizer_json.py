"""Parts of a ``tokenizer.json`` that a vocabulary is made of: pieces, merges and added tokens, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import InputError


def numbered_pieces(path: Path, vocab: Mapping[str, Any]) -> dict[int, str]:
    """Return pieces by id; refuse an id that two pieces share."""
    pieces: dict[int, str] = {}
    for piece, number in vocab.items():
        if type(number) is not int or not 0 <= number < 1 << 31 or number in pieces:
            raise InputError(
                f"{path}: token {piece!r} has no id of its own",
                "the file is damaged",
                file=str(path),
            )
        pieces[number] = piece
    return pieces


def merged_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges in order; each is a string ``left right`` or a list of two, else raise `InputError`.

    Of a merge that is there twice the last one counts, as for the ``tokenizers`` library; for llama.cpp the first does.
    """
    pairs: dict[tuple[str, str], None] = {}
    merges = model.get("merges")
    for item in merges if isinstance(merges, list) else ():
        parts = item.split(" ", 1) if isinstance(item, str) else item
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) for part in parts)
        ):
            raise InputError(f"tokenizer.json: {item!r} is no merge", "the file is damaged")
        pairs.pop((parts[0], parts[1]), None)
        pairs[parts[0], parts[1]] = None
    return list(pairs)


def added_tokens(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the added tokens, each with a content and the id that it has.

    The ``tokenizers`` library reads no id of an added token: one that is a piece of the vocabulary has its id, and
    others follow, in the order of the file, after the number of pieces. So an id that the file says may be another.
    """
    stated = tokenizer.get("added_tokens")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, list):  # unigram: pieces with their scores
        vocab = {
            item[0]: number
            for number, item in enumerate(vocab)
            if isinstance(item, list) and item and isinstance(item[0], str)
        }
    vocab = vocab if isinstance(vocab, Mapping) else {}
    found: dict[str, Mapping[str, Any]] = {}
    last = -1
    for item in stated if isinstance(stated, list) else ():
        good = (
            isinstance(item, Mapping)
            and type(item.get("id")) is int
            and isinstance(item.get("content"), str)
        )
        if not good or item["id"] < 0:
            raise InputError(
                "tokenizer.json: an added token without id or content", "the file is damaged"
            )
        content = item["content"]
        if content and content not in found:
            known = vocab.get(content)
            number = known if type(known) is int else max(last + 1, len(vocab))
            found[content] = {**item, "id": number}
            last = max(last, number)
    return list(found.values())


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def with_settings(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer.json`` with the added tokens that transformers has after reading ``tokenizer_config.json``.

    ``added_tokens_decoder`` replaces the flags of an added token. Pieces of the vocabulary that it lists, or that are
    named as special tokens, become added tokens: text is split at them before anything else.
    """
    added = {item["content"]: dict(item) for item in added_tokens(tokenizer)}
    vocab = tokenizer["model"]["vocab"]
    listed = settings.get("added_tokens_decoder")
    for item in listed.values() if isinstance(listed, Mapping) else ():
        content = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(content, str) and (content in added or content in vocab):
            flags = {key: item[key] for key in _FLAGS if isinstance(item.get(key), bool)}
            added[content] = {
                "id": vocab.get(content),
                **added.get(content, {"content": content}),
                **flags,
            }
    for content in special_contents(settings):
        if content in vocab and content not in added:
            added[content] = {"id": vocab[content], "content": content, "special": True}
    return {**tokenizer, "added_tokens": list(added.values())}


def special_contents(settings: Mapping[str, Any]) -> list[str]:
    """Return the texts that ``tokenizer_config.json`` names as special tokens, by role or in a list."""
    stated = [settings.get(role) for role in _ROLES]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key)
        stated += (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, list)
            else ()
        )
    texts = (item.get("content") if isinstance(item, Mapping) else item for item in stated)
    return [text for text in texts if isinstance(text, str) and text]


def check_added(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that tokens added by tokenizer_config.json are in tokenizer.json too: only these are written."""
    listed = settings.get("added_tokens_decoder")
    added = {item["content"] for item in added_tokens(tokenizer)}
    known = added | tokenizer["model"]["vocab"].keys()
    for number, item in listed.items() if isinstance(listed, Mapping) else ():
        content = item.get("content") if isinstance(item, Mapping) else None
        if content not in known:
            raise InputError(
                f"tokenizer_config.json: added token {content!r} (id {number}) is not in tokenizer.json",
                "save the tokenizer again with transformers, which writes both files",
            )
