"""Tokenizer files made from the keys of a GGUF file: the inverse of `vocabulary`.

Of byte-level BPE the merges are stored and the pre-tokenizer has a name; of sentencepiece's BPE every cut of a piece
into two pieces is a merge, ordered by the score of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantforge.errors import InputError
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.tokenizer import SENTENCEPIECE_SPACE
from quantforge.formats.gguf.vocabulary import (
    BYTE_LEVEL_STEP,
    DIGITS_STEP,
    TEMPLATE_KEY,
    TokenType,
    adds_bos_by_default,
    check_lengths,
    pre_tokenizer_steps,
)
from quantforge_calibration.chat_templates import DEFAULT, template_file_name

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """Return ``tokenizer.json``, ``tokenizer_config.json`` and a file for each chat template.

    Raises:
        InputError: no vocabulary, a kind or a pre-tokenizer that is not known, lists of different lengths, or a chat
            template whose name is no name for a file.
    """
    model = file.value("tokenizer.ggml.model", str)
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.value("tokenizer.ggml.token_type", list, [int(TokenType.NORMAL)] * len(tokens))
    if len(kinds) != len(tokens):
        raise InputError(
            f"{len(kinds)} token types for {len(tokens)} tokens", subject=str(file.files[0])
        )
    vocab = {
        piece: number for number, piece in enumerate(tokens) if kinds[number] != TokenType.UNUSED
    }
    ids = _special_ids(file, len(tokens))
    for number in ids.values():  # an unused token that has a role is used
        vocab.setdefault(tokens[number], number)
    build = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(model)
    if build is None:
        raise InputError(
            f"a vocabulary of kind {model!r} is not read",
            "gpt2 and llama are",
            subject=str(file.files[0]),
        )
    added_entries = [
        _added_token(number, tokens[number], special=kind == TokenType.CONTROL)
        for number, kind in enumerate(kinds)
        if kind in {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}
    ]
    roles = {role: tokens[number] for role, number in ids.items()}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_entries,
        **build(file, vocab, roles),
        "post_processor": _post_processor(file, ids, roles),
    }
    config: dict[str, Any] = {f"{role}_token": piece for role, piece in roles.items()}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    files = {"tokenizer.json": _json_bytes(document), "tokenizer_config.json": _json_bytes(config)}
    return files | template_files(file)


def template_files(file: GgufFile) -> dict[str, bytes]:
    """Return a file for each non-empty chat template; errors as `tokenizer_files`."""
    files = {}
    for key in file.metadata:
        if key == TEMPLATE_KEY or key.startswith(f"{TEMPLATE_KEY}."):
            name = key.removeprefix(TEMPLATE_KEY).removeprefix(".") or DEFAULT
            try:
                file_name = template_file_name(name)
            except ValueError as error:
                raise InputError(
                    f"the chat template {name!a:.60} has no name for a file",
                    "the file is damaged",
                    subject=str(file.files[0]),
                ) from error
            if text := file.value(key, str, ""):
                files[file_name] = text.encode(errors="surrogateescape")
    return files


def _strings(file: GgufFile, key: str) -> list[str]:
    """Return a list of strings; raise `InputError` for tokens that are not UTF-8, which JSON cannot hold."""
    strings: list[Any] = file.value(key, list)
    for item in strings:
        if not isinstance(item, str) or any("\ud800" <= c <= "\udfff" for c in item):
            raise InputError(
                f"{key} holds {item!a}, which is no text",
                "it cannot be restated",
                subject=str(file.files[0]),
            )
    return strings


def _special_ids(file: GgufFile, count: int) -> dict[str, int]:
    numbers = {
        role: file.value(f"tokenizer.ggml.{name}_token_id", int, -1)
        for role, name in _ROLES.items()
    }
    return {role: number for role, number in numbers.items() if 0 <= number < count}


def _byte_level_bpe(
    file: GgufFile, vocab: Mapping[str, int], roles: Mapping[str, str]
) -> dict[str, Any]:
    del roles
    name = file.value("tokenizer.ggml.pre", str, "default")
    pre_tokenizer = pre_tokenizer_steps(name)
    if pre_tokenizer is None:
        raise InputError(
            f"pre-tokenizer {name!r} is not read",
            "copy tokenizer.json from the source",
            subject=str(file.files[0]),
        )
    steps, ignore_merges = pre_tokenizer
    nodes: list[dict[str, Any]] = []
    for step in steps:
        if step == BYTE_LEVEL_STEP:
            nodes.append(_byte_level_step(use_regex=True))
        elif step == DIGITS_STEP:
            nodes.append({"type": "Digits", "individual_digits": True})
        else:
            nodes.append(
                {
                    "type": "Split",
                    "pattern": {"Regex": step},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
    if BYTE_LEVEL_STEP not in steps:
        nodes.append(_byte_level_step(use_regex=False))
    merges = [list(_split_merge(item)) for item in _strings(file, "tokenizer.ggml.merges")]
    return {
        "normalizer": None,
        "pre_tokenizer": nodes[0]
        if len(nodes) == 1
        else {"type": "Sequence", "pretokenizers": nodes},
        "decoder": _byte_level_step(use_regex=True),
        "model": _bpe_model(vocab, merges, ignore_merges=ignore_merges),
    }


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise InputError(f"tokenizer.ggml.merges: {merge!a} is no merge", "the file is damaged")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece_bpe(
    file: GgufFile, vocab: Mapping[str, int], roles: Mapping[str, str]
) -> dict[str, Any]:
    check_lengths(file.files[0], vocab)
    scores = file.value("tokenizer.ggml.scores", list)
    count = len(file.value("tokenizer.ggml.tokens", list))
    if len(scores) != count or any(type(score) not in {int, float} for score in scores):
        raise InputError(
            f"tokenizer.ggml.scores holds {len(scores)} values for {count} tokens",
            "one number for each token; the file is damaged",
            subject=str(file.files[0]),
        )
    ranked = []
    for piece, number in vocab.items():
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        ranked += [
            (-scores[number], number, pair)
            for pair in pairs
            if pair[0] in vocab and pair[1] in vocab
        ]
    merges = [list(pair) for _, _, pair in sorted(ranked)]
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SENTENCEPIECE_SPACE}
    steps = [{"type": "Prepend", "prepend": SENTENCEPIECE_SPACE}, spaces] if prefix else [spaces]
    decoder_steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SENTENCEPIECE_SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoder_steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder_steps},
        "model": _bpe_model(
            vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=roles.get("unk")
        ),
    }


def _bpe_model(
    vocab: Mapping[str, int], merges: list[list[str]], **options: object
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": dict(vocab),
        "merges": merges,
    }


def _added_token(number: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _post_processor(
    file: GgufFile, ids: Mapping[str, int], roles: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return a post-processor that adds BOS and EOS around a text as llama.cpp does, None if it adds neither."""
    pre = file.value("tokenizer.ggml.pre", str, "default")
    first_too = adds_bos_by_default(file.value("tokenizer.ggml.model", str), pre)
    unsaid = {"bos": first_too, "eos": False}
    special_items = {
        role: {"SpecialToken": {"id": roles[role], "type_id": 0}}
        for role in ("bos", "eos")
        if role in roles and file.value(f"tokenizer.ggml.add_{role}_token", bool, unsaid[role])
    }
    if not special_items:
        return None
    first, last = (
        [special_items[role]] if role in special_items else [] for role in ("bos", "eos")
    )
    text = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [*first, text[0], *last],
        "pair": [*first, *text, *last],
        "special_tokens": {
            roles[role]: {"id": roles[role], "ids": [ids[role]], "tokens": [roles[role]]}
            for role in special_items
        },
    }


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
