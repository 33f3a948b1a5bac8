"""Tokenizer behavior that GGUF has no key for: one sentence per difference, with what llama.cpp does instead.

`vocabulary` refuses a tokenizer if llama.cpp would tokenize ordinary text differently. The functions here yield the
remaining differences, which concern some texts, some tokens, or the tokens added around a text; they become events.
Not listed, because they make no difference: truncation and padding (transformers sets both for each call), templates
of text pairs and token types, offsets, and ``clean_up_tokenization_spaces`` (transformers ignores it for BPE).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantforge.formats.gguf.metadata import phi3_space_stripping
from quantforge.formats.gguf.tokenizer import (
    BYTE_CHARACTERS,
    SENTENCEPIECE_SPACE,
    added_tokens,
    flatten_steps,
    post_processor_ends,
    read_merges,
    special_token_texts,
)

_MAX_SHOWN = 3
# EOS ids that llama.cpp assumes if no key states one, by kind of tokenizer
_ASSUMED_EOS = {"gpt2": 11, "llama": 2}
# Tokens with these texts always end a text in llama.cpp, whatever the keys say.
_ALWAYS_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
        "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    }
)  # fmt: skip
_NOT_IN_TEXT = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that never occur in UTF-8


def normalizer_differences(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the normalizer steps of a byte-level BPE tokenizer; llama.cpp has none of them."""
    for node in flatten_steps(tokenizer.get("normalizer"), "normalizers"):
        same_note = (
            ": the same tokens for text that already is" if node.get("type") == "NFC" else ""
        )
        yield f"normalizer {node.get('type')}: llama.cpp does not normalize text{same_note}"


def space_differences(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield where llama.cpp adds a leading space and the SentencePiece BPE tokenizer does not."""
    normalizer_steps = flatten_steps(tokenizer.get("normalizer"), "normalizers")
    if any(node.get("type") == "Prepend" for node in normalizer_steps):
        return  # the text then begins with a space already, and Metaspace adds none
    for node in flatten_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        scheme = prepend_scheme(node)
        if scheme == "first":
            yield (
                'pre_tokenizer Metaspace, prepend_scheme "first": llama.cpp puts a space after each special token too, '
                "and before text that begins with one"
            )
        elif scheme == "always":
            yield (
                'pre_tokenizer Metaspace, prepend_scheme "always": llama.cpp puts a space before text that begins with '
                "one, too"
            )


def spelled_with_spaces(item: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    """Return whether an added token is written with real spaces instead of `SENTENCEPIECE_SPACE`.

    Other tokens keep `SENTENCEPIECE_SPACE`, and are matched in text literally: special ones, and those that are neither
    in the vocabulary nor normalized.
    """
    is_in_vocab = item.get("normalized") or item["content"] in tokenizer["model"]["vocab"]
    return bool(is_in_vocab) and not item.get("special") and SENTENCEPIECE_SPACE in item["content"]


def prepend_scheme(node: Mapping[str, Any]) -> str | None:
    """Return the ``prepend_scheme`` of a ``Metaspace`` step, or its default; None for any other step."""
    if node.get("type") != "Metaspace":
        return None
    default = "always" if node.get("add_prefix_space", True) else "never"
    return str(node.get("prepend_scheme", default))


def model_differences(tokenizer: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield how BPE itself (the ``model`` object) differs in llama.cpp; ``kind`` is `Vocabulary.model`."""
    model = tokenizer["model"]
    if model.get("dropout"):
        yield f"model.dropout = {model['dropout']!a:.40}: llama.cpp leaves no merge out at random"
    if kind == "gpt2":
        unknown, vocab = model.get("unk_token"), model["vocab"]
        missing = [
            byte
            for character, byte in BYTE_CHARACTERS.items()
            if character not in vocab and byte not in _NOT_IN_TEXT
        ]
        if missing and unknown is not None:
            yield (
                f"model.unk_token = {unknown!a:.40}, for {len(missing)} byte(s) that are no pieces: llama.cpp leaves "
                "them out of a text"
            )
        return
    if model.get("ignore_merges"):
        yield "model.ignore_merges: llama.cpp merges a text that is a piece like any other"
    last: dict[str, int] = {}
    apart = []
    for rank, (left, right) in enumerate(read_merges(model)):
        piece = left + right
        if last.get(piece, rank - 1) != rank - 1:
            apart.append(piece)
        last[piece] = rank
    if apart:
        yield (
            f"merges of {len(set(apart))} piece(s) are ranked apart, {apart[0]!a} first: llama.cpp knows one rank for "
            "each piece"
        )


def added_token_differences(
    tokenizer: Mapping[str, Any], kind: str, name: str, tokens: Sequence[str]
) -> Iterator[str]:
    """Yield the flags of added tokens that llama.cpp does not follow, and two added tokens that can overlap.

    Args:
        tokenizer: ``tokenizer.json``.
        kind: `Vocabulary.model`.
        name: of the model; llama.cpp recognizes Phi-3 by it, and drops spaces after its added tokens.
        tokens: texts of all tokens in the GGUF file, by id.
    """
    tokens_added = added_tokens(tokenizer)
    stripping = phi3_space_stripping(name, tokens)
    texts_by_difference: dict[str, list[str]] = {}
    for item in tokens_added:
        text = item["content"]
        if item.get("single_word"):
            difference = "single_word: llama.cpp takes them within words, too"
            texts_by_difference.setdefault(difference, []).append(text)
        if item.get("lstrip"):
            texts_by_difference.setdefault("lstrip: llama.cpp keeps spaces before them", []).append(
                text
            )
        if bool(item.get("rstrip")) != stripping(text):
            verb = "keeps" if item.get("rstrip") else "drops"
            flag = "rstrip" if item.get("rstrip") else "no rstrip"
            texts_by_difference.setdefault(
                f"{flag}: llama.cpp {verb} spaces after them", []
            ).append(text)
        if item.get("normalized") and _changed(item, tokenizer):
            difference = (
                "normalized, which changes them: llama.cpp looks for them as they are spelled"
            )
            texts_by_difference.setdefault(difference, []).append(text)
        elif kind == "llama" and spelled_with_spaces(item, tokenizer):
            difference = f"hold {SENTENCEPIECE_SPACE}: llama.cpp looks for spaces instead, before it merges any pieces"
            texts_by_difference.setdefault(difference, []).append(text)
    overlapping = _overlapping([item["content"] for item in tokens_added])
    if overlapping:
        first, second = overlapping
        yield (
            f"added tokens {first!a} and {second!a} can overlap: llama.cpp takes the longer one, wherever it begins"
        )
    for difference, texts in texts_by_difference.items():
        shown_texts = ", ".join(f"{text!a:.40}" for text in texts[:_MAX_SHOWN])
        yield f"{len(texts)} added token(s) ({shown_texts}) {difference}"


def _changed(item: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the normalizer changes the text of an added token, which llama.cpp then does not recognize."""
    text = item["content"]
    for node in flatten_steps(tokenizer.get("normalizer"), "normalizers"):
        kind = node.get("type")
        if kind == "Prepend" or (kind == "NFC" and unicodedata.normalize("NFC", text) != text):
            return True
        if kind == "Replace" and (SENTENCEPIECE_SPACE in text or " " in text):
            return True
    return False


def _overlapping(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return two of the texts where the end of the shorter one is the start of the longer one, None if there are none.

    Two texts that repeat the same single character do not count: it does not matter which is taken first.
    """
    begins: dict[str, str] = {}
    for text in texts:
        for end in range(1, len(text)):
            if len(text) > len(begins.get(text[:end], "")):
                begins[text[:end]] = text
    for text in texts:
        for start in range(1, len(text)):
            other = begins.get(text[start:], "")
            if len(other) > len(text) and len(set(text + other)) > 1:
                return text, other
    return None


def post_processor_differences(
    tokenizer: Mapping[str, Any],
    special: Mapping[str, int],
    flags: Mapping[str, bool],
    ids: Mapping[str, int],
) -> Iterator[str]:
    """Yield the steps of the post-processor that add other tokens around a text than llama.cpp's one BOS and one EOS.

    Args:
        tokenizer: ``tokenizer.json``.
        special: ids by role.
        flags: ``add_bos_token`` and ``add_eos_token``, as written to the file.
        ids: of all tokens by text.
    """
    nodes = flatten_steps(tokenizer.get("post_processor"), "processors")
    templates = [node for node in nodes if node.get("type") == "TemplateProcessing"]
    for node in nodes:
        if node.get("type") not in ("TemplateProcessing", "ByteLevel"):
            yield f"post_processor {node.get('type')}: llama.cpp has none"
    if len(templates) > 1:
        yield f"post_processor: {len(templates)} templates: llama.cpp has one"
        return
    for node in templates:
        single_template = node.get("single")
        items = [
            item
            for item in (single_template if isinstance(single_template, list) else [])
            if isinstance(item, Mapping)
        ]
        positions = [index for index, item in enumerate(items) if "Sequence" in item]  # of the text
        declared = node.get("special_tokens")
        special_tokens = declared if isinstance(declared, Mapping) else {}
        if len(positions) != 1:
            yield f"post_processor: a template with the text {len(positions)} times: llama.cpp takes it once"
            continue
        added_items = items[: positions[0]], items[positions[0] + 1 :]
        for role, place_word, template_items in zip(
            ("bos", "eos"), ("before", "after"), added_items, strict=True
        ):
            names = [
                str(item["SpecialToken"].get("id"))
                for item in template_items
                if isinstance(item.get("SpecialToken"), Mapping)
            ]
            numbers = [
                number
                for name in names
                for number in (
                    special_tokens[name]["ids"]
                    if isinstance(special_tokens.get(name), Mapping)
                    and isinstance(special_tokens[name].get("ids"), list)
                    else [ids.get(name, -1)]
                )
            ]
            written_ids = [special[role]] if flags.get(f"add_{role}_token") else []
            if numbers != written_ids:
                shown, replacement = (
                    ", ".join(map(repr, names)),
                    "nothing" if not written_ids else "one token",
                )
                yield f"post_processor puts {shown or 'nothing'} {place_word} a text: llama.cpp puts {replacement}"


def decoder_differences(tokenizer: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield the decoder if it turns tokens into other text than llama.cpp does."""
    nodes = flatten_steps(tokenizer.get("decoder"), "decoders")
    kinds = [str(node.get("type")) for node in nodes]
    if kind == "gpt2":
        is_supported = kinds == ["ByteLevel"]
    else:
        spaces = any(_reads_spaces(node) for node in nodes)
        is_supported = (
            spaces
            and "ByteFallback" in kinds
            and set(kinds)
            <= {
                "Replace",
                "ByteFallback",
                "Fuse",
                "Strip",
                "Metaspace",
            }
        )
    if not is_supported:
        shown_kinds = ", ".join(kinds) or "none"
        first = "" if kind == "gpt2" else f"{SENTENCEPIECE_SPACE} as a space, and "
        yield f"decoder {shown_kinds}: llama.cpp reads {first}pieces of bytes as bytes"


def _reads_spaces(node: Mapping[str, Any]) -> bool:
    replaces_space = (node.get("pattern"), node.get("content")) == (
        {"String": SENTENCEPIECE_SPACE},
        " ",
    )
    return node.get("type") == "Metaspace" or (node.get("type") == "Replace" and replaces_space)


def settings_differences(
    settings: Mapping[str, Any], tokenizer: Mapping[str, Any], flags: Mapping[str, bool]
) -> Iterator[str]:
    """Yield the settings of ``tokenizer_config.json`` that transformers follows and llama.cpp does not.

    Args:
        settings: ``tokenizer_config.json``.
        tokenizer: ``tokenizer.json``.
        flags: ``add_bos_token`` and ``add_eos_token``, as written to the file.
    """
    ends = dict(zip(("bos", "eos"), post_processor_ends(tokenizer), strict=True))
    for role, verb in (("bos", "begins"), ("eos", "ends")):
        flag, written_flag = (
            settings.get(f"add_{role}_token"),
            flags.get(f"add_{role}_token", False),
        )
        if isinstance(flag, bool) and (flag != written_flag or (flag and ends[role] is None)):
            yield (
                f"add_{role}_token = {str(flag).lower()}: tokenizer.json says otherwise, and classes of transformers "
                f"go by one or the other; llama.cpp puts {'a' if written_flag else 'no'} token that {verb} a text"
            )
    known_texts = {item["content"] for item in added_tokens(tokenizer)} | tokenizer["model"][
        "vocab"
    ].keys()
    unknown = [text for text in special_token_texts(settings) if text not in known_texts]
    if unknown:
        texts = ", ".join(f"{text!a:.40}" for text in unknown[:_MAX_SHOWN])
        yield (
            f"{len(unknown)} special token(s) ({texts}) that tokenizer.json lacks: transformers gives them ids after "
            "the vocabulary; llama.cpp reads them as text"
        )
    if settings.get("split_special_tokens") is True:
        yield "split_special_tokens: llama.cpp takes special tokens in a text for what they are"
    if settings.get("add_prefix_space") is True:
        yield (
            "add_prefix_space: some classes of transformers put a space before a text by it; llama.cpp goes by "
            "tokenizer.json"
        )


def end_token_differences(
    special: Mapping[str, int], ends: Sequence[int], tokens: Sequence[str], kind: str
) -> Iterator[str]:
    """Yield the tokens that end a text only in llama.cpp, or only in transformers.

    Args:
        special: ids by role, as written to the file.
        ends: ids of ``eos_token_id`` in ``generation_config.json``.
        tokens: texts of all tokens, by id.
        kind: `Vocabulary.model`.
    """
    default = _ASSUMED_EOS[kind]
    if "eos" not in special and default < len(tokens):
        yield f"no token that ends a text: llama.cpp takes {tokens[default]!a} (id {default}) for one"
    stored_ends = {special.get(role) for role in ("eos", "eot", "eom")}
    lost_ids = [
        number
        for number in ends
        if number not in stored_ends and tokens[number] not in _ALWAYS_ENDS
    ]
    if lost_ids:
        shown_texts = ", ".join(f"{tokens[number]!a}" for number in lost_ids[:_MAX_SHOWN])
        yield f"eos_token_id: {shown_texts}: there are keys for three tokens that end a text"
