"""Read and check the tokenizer of a model directory: vocabulary, merges, added tokens, chat templates.

``tokenizer_config.json`` names the special tokens, ``tokenizer.json`` says what is really done, and the two disagree
often. What is done counts: whether a text begins with the beginning-of-sequence token is read from the post-processor.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import InputError
from quantforge.files.opener import read_object
from quantforge.plans import Note, NoteKind
from quantforge_calibration.chat_templates import DEFAULT, read_templates
from quantforge_calibration.source_error import SourceError
from quantforge_files.roles import SETTINGS

SENTENCEPIECE_SPACE = "\u2581"  # how sentencepiece writes a space
_SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")


def read_settings(path: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json`` or ``generation_config.json``; {} when there is none.

    Numbers may be of any size: ``model_max_length`` is 10^30 where nobody set it.

    Raises:
        InputError: no JSON object.
    """
    if not path.is_file():
        return {}
    return read_object(path, SETTINGS, path.parent, loose=True)


def flatten_steps(node: object, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a ``tokenizer.json`` node: those of a Sequence, or the node itself."""
    if not isinstance(node, Mapping):
        return []
    inner = node.get(key)
    return (
        [item for item in inner if isinstance(item, Mapping)] if isinstance(inner, list) else [node]
    )


def _byte_characters() -> dict[str, int]:
    """Return the byte for each character of the byte-level BPE alphabet (GPT-2's)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprinted = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + n): byte for n, byte in enumerate(unprinted)
    }


BYTE_CHARACTERS = _byte_characters()


# Pieces, merges and added tokens


def pieces_by_id(path: Path, vocab: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens by id; raise `InputError` if two tokens share an id."""
    pieces: dict[int, str] = {}
    for piece, number in vocab.items():
        if type(number) is not int or not 0 <= number < 1 << 31 or number in pieces:
            raise InputError(
                f"token {piece!r} has no id of its own",
                "the file is damaged",
                file=str(path),
                subject=str(path),
            )
        pieces[number] = piece
    return pieces


def read_merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the BPE merges in order; raise `InputError` unless each is ``left right`` or a list of two.

    Of a merge that is there twice the last one counts, as for the ``tokenizers`` library; for llama.cpp the first does.
    """
    pairs: dict[tuple[str, str], None] = {}
    merges = model.get("merges")
    for item in merges if isinstance(merges, list) else ():
        pieces = item.split(" ", 1) if isinstance(item, str) else item
        if (
            not isinstance(pieces, list)
            or len(pieces) != 2
            or not all(isinstance(piece, str) for piece in pieces)
        ):
            raise InputError(f"tokenizer.json: {item!r} is no merge", "the file is damaged")
        pairs.pop((pieces[0], pieces[1]), None)
        pairs[pieces[0], pieces[1]] = None
    return list(pairs)


def added_tokens(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the added tokens, with the ids that the ``tokenizers`` library gives them.

    The ``tokenizers`` library reads no id of an added token: one that is a piece of the vocabulary has its id, and
    others follow, in the order of the file, after the number of pieces. So an id that the file says may be another.
    """
    declared = tokenizer.get("added_tokens")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, list):  # unigram: pieces with their scores
        vocab = {
            item[0]: number
            for number, item in enumerate(vocab)
            if isinstance(item, list) and item and isinstance(item[0], str)
        }
    vocab = vocab if isinstance(vocab, Mapping) else {}
    tokens: dict[str, Mapping[str, Any]] = {}
    last = -1
    for item in declared if isinstance(declared, list) else ():
        is_valid = (
            isinstance(item, Mapping)
            and type(item.get("id")) is int
            and isinstance(item.get("content"), str)
        )
        if not is_valid or item["id"] < 0:
            raise InputError(
                "tokenizer.json: an added token without id or content", "the file is damaged"
            )
        content = item["content"]
        if content and content not in tokens:
            vocab_id = vocab.get(content)
            number = vocab_id if type(vocab_id) is int else max(last + 1, len(vocab))
            tokens[content] = {**item, "id": number}
            last = max(last, number)
    return list(tokens.values())


_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def apply_tokenizer_config(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``tokenizer.json`` with the added tokens as transformers changes them by ``tokenizer_config.json``.

    ``added_tokens_decoder`` replaces the flags of an added token. Pieces of the vocabulary that it lists, or that are
    named as special tokens, become added tokens: text is split at them before anything else.
    """
    tokens_by_text = {item["content"]: dict(item) for item in added_tokens(tokenizer)}
    vocab = tokenizer["model"]["vocab"]
    token_settings = settings.get("added_tokens_decoder")
    for item in token_settings.values() if isinstance(token_settings, Mapping) else ():
        content = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(content, str) and (content in tokens_by_text or content in vocab):
            flags = {
                key: item[key] for key in _ADDED_TOKEN_FLAGS if isinstance(item.get(key), bool)
            }
            tokens_by_text[content] = {
                "id": vocab.get(content),
                **tokens_by_text.get(content, {"content": content}),
                **flags,
            }
    for content in special_token_texts(settings):
        if content in vocab and content not in tokens_by_text:
            tokens_by_text[content] = {"id": vocab[content], "content": content, "special": True}
    return {**tokenizer, "added_tokens": list(tokens_by_text.values())}


def special_token_texts(settings: Mapping[str, Any]) -> list[str]:
    """Return the texts of the special tokens in ``tokenizer_config.json``."""
    declared = [settings.get(role) for role in _TOKEN_KEYS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key)
        if isinstance(value, Mapping | list):
            declared += value.values() if isinstance(value, Mapping) else value
    texts = (item.get("content") if isinstance(item, Mapping) else item for item in declared)
    return [text for text in texts if isinstance(text, str) and text]


def check_added_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `InputError` if a token added in ``tokenizer_config.json`` is missing from ``tokenizer.json``."""
    token_settings = settings.get("added_tokens_decoder")
    added_texts = {item["content"] for item in added_tokens(tokenizer)}
    known_texts = added_texts | tokenizer["model"]["vocab"].keys()
    for number, item in token_settings.items() if isinstance(token_settings, Mapping) else ():
        content = item.get("content") if isinstance(item, Mapping) else None
        if content not in known_texts:
            raise InputError(
                f"tokenizer_config.json: added token {content!r} (id {number}) is not in tokenizer.json",
                "save the tokenizer again with transformers, which writes both files",
            )


# Special tokens and chat templates


def special_ids(
    numbers: Mapping[str, int],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    root: Path,
    past: Container[str] = (),
) -> dict[str, int]:
    """Return the ids of special tokens by role. ``numbers`` maps tokens to ids; tokens in ``past`` are left out.

    Raises:
        InputError: a special token is not in the vocabulary.
    """
    ids: dict[str, int] = {}
    for role in _SPECIAL_ROLES:
        setting = settings.get(f"{role}_token")
        content = setting.get("content") if isinstance(setting, Mapping) else setting
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
    ends = [number for number in end_token_ids(root) if 0 <= number < len(numbers)]
    if "eos" not in ids and ends:
        ids["eos"] = ends[0]
    other_ends = [number for number in ends if number != ids.get("eos")]
    ids |= dict(zip(("eot", "eom"), other_ends, strict=False))
    return ids


def end_token_ids(root: Path) -> list[int]:
    """Return the ids of ``eos_token_id`` in ``generation_config.json``."""
    eos_setting = read_settings(root / "generation_config.json").get("eos_token_id")
    eos_ids = eos_setting if isinstance(eos_setting, list) else [eos_setting]
    return [number for number in eos_ids if type(number) is int]


def bos_eos_flags(
    numbers: Mapping[str, int],
    special: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    model: str,
) -> dict[str, bool]:
    """Return ``add_bos_token`` and ``add_eos_token``: whether the tokenizer adds these around a text."""
    first, last = post_processor_ends(tokenizer)
    if first is None and last is None and model == "llama":
        return {
            f"add_{role}_token": settings.get(f"add_{role}_token") is True
            for role in ("bos", "eos")
        }
    return {
        f"add_{role}_token": role in special and numbers.get(piece or "") == special[role]
        for role, piece in (("bos", first), ("eos", last))
    }


def post_processor_ends(tokenizer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the special tokens that the post-processor adds at the beginning and the end, None for none."""
    first = last = None
    for node in flatten_steps(tokenizer.get("post_processor"), "processors"):
        single_template = node.get("single")
        if node.get("type") != "TemplateProcessing" or not isinstance(single_template, list):
            continue
        tokens = [
            item.get("SpecialToken")
            for item in single_template
            if isinstance(item, Mapping) and item
        ]
        if tokens and isinstance(tokens[0], Mapping):
            first = str(tokens[0].get("id"))
        if tokens and isinstance(tokens[-1], Mapping):
            last = str(tokens[-1].get("id"))
    return first, last


def chat_templates(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return the chat templates by their names in GGUF keys ("" is the default), and notes about them.

    Keys have ASCII letters, digits and ``_`` in names of templates; other characters become ``_``, as in llama.cpp's
    converter. llama.cpp takes an empty template for none.

    Raises:
        InputError: a template cannot be read, or two names have one key.
    """
    try:
        read = read_templates(root)
    except SourceError as error:
        raise InputError(error.message, error.hint) from error
    templates: dict[str, str] = {}
    notes = list(read.notes)
    for name, text in read.templates.items():
        called = "" if name == DEFAULT else template_key(name)
        if not text:
            notes.append(f"{name} is empty and is not written")
            continue
        if called in templates:
            raise InputError(
                f"the chat template {name!a} has the key of another one, {called}",
                "rename one of them: letters, digits and _ stay",
                subject=str(root),
            )
        if called not in {"", name}:
            notes.append(f"{name!a} is called {called} in the file")
        templates[called] = text
    return templates, [Note(f"chat template: {note}", NoteKind.TEMPLATE) for note in notes]


def template_key(name: str) -> str:
    """Return the GGUF key suffix for a chat template name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "_"
