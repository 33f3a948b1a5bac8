"""What a tokenizer does that a GGUF file has no key for, each in a sentence that says what llama.cpp does instead.

A tokenizer whose ordinary text would get other tokens is refused where its vocabulary is made (`vocabulary`). What is
left concerns some texts, some tokens, or what is put around a text: those are the differences listed here, which become
events. Neutral, and not listed: truncation and padding (transformers sets both for each call), templates of pairs and
types of tokens, offsets, and ``clean_up_tokenization_spaces`` (transformers ignores it for BPE).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantforge.formats.gguf.metadata import strips_after
from quantforge.formats.gguf.pretokenizer import BYTE_CHARACTERS
from quantforge.formats.gguf.sentencepiece import SPACE
from quantforge.formats.gguf.special import flat, template_ends
from quantforge.formats.gguf.tokenizer_json import added_tokens, merged_pairs, special_contents

_SHOWN = 3
_END = {
    "gpt2": 11,
    "llama": 2,
}  # ids that llama.cpp takes for the end of a text where no key names one
# Tokens with these texts end a text in llama.cpp, whatever the keys say.
_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
        "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    }
)  # fmt: skip
_NOT_IN_TEXT = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that no UTF-8 has


def of_normalizer(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not done to text of byte-level BPE."""
    for node in flat(tokenizer.get("normalizer"), "normalizers"):
        same = ": the same tokens for text that already is" if node.get("type") == "NFC" else ""
        yield f"normalizer {node.get('type')}: llama.cpp does not normalize text{same}"


def of_spaces(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield where sentencepiece's BPE puts other spaces before a text."""
    before = flat(tokenizer.get("normalizer"), "normalizers")
    if any(node.get("type") == "Prepend" for node in before):
        return  # then text begins with a space, and no other is put
    for node in flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
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
    """Return whether an added token of sentencepiece's BPE is written with spaces where it has `SPACE`.

    One that is special, or that is no piece and is not normalized, is looked for as it is spelled.
    """
    known = item.get("normalized") or item["content"] in tokenizer["model"]["vocab"]
    return bool(known) and not item.get("special") and SPACE in item["content"]


def prepend_scheme(node: Mapping[str, Any]) -> str | None:
    """Return where a ``Metaspace`` puts a space before text; None for another step."""
    if node.get("type") != "Metaspace":
        return None
    default = "always" if node.get("add_prefix_space", True) else "never"
    return str(node.get("prepend_scheme", default))


def of_model(tokenizer: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield what the model does otherwise; ``kind`` as of `Vocabulary.model`."""
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
    for rank, (left, right) in enumerate(merged_pairs(model)):
        piece = left + right
        if last.get(piece, rank - 1) != rank - 1:
            apart.append(piece)
        last[piece] = rank
    if apart:
        yield (
            f"merges of {len(set(apart))} piece(s) are ranked apart, {apart[0]!a} first: llama.cpp knows one rank for "
            "each piece"
        )


def of_added(
    tokenizer: Mapping[str, Any], kind: str, name: str, tokens: Sequence[str]
) -> Iterator[str]:
    """Yield what flags of added tokens do.

    Args:
        tokenizer: ``tokenizer.json``.
        kind: as of `Vocabulary.model`.
        name: of the model, in which llama.cpp looks for one family.
        tokens: of the file.
    """
    added = added_tokens(tokenizer)
    stripping = strips_after(name, tokens)
    found: dict[str, list[str]] = {}
    for item in added:
        text = item["content"]
        if item.get("single_word"):
            said = "single_word: llama.cpp takes them within words, too"
            found.setdefault(said, []).append(text)
        if item.get("lstrip"):
            found.setdefault("lstrip: llama.cpp keeps spaces before them", []).append(text)
        if bool(item.get("rstrip")) != stripping(text):
            said = "keeps" if item.get("rstrip") else "drops"
            word = "rstrip" if item.get("rstrip") else "no rstrip"
            found.setdefault(f"{word}: llama.cpp {said} spaces after them", []).append(text)
        if item.get("normalized") and _changed(item, tokenizer):
            said = "normalized, which changes them: llama.cpp looks for them as they are spelled"
            found.setdefault(said, []).append(text)
        elif kind == "llama" and spelled_with_spaces(item, tokenizer):
            said = f"hold {SPACE}: llama.cpp looks for spaces instead, before it merges any pieces"
            found.setdefault(said, []).append(text)
    overlapping = _overlapping([item["content"] for item in added])
    if overlapping:
        first, second = overlapping
        yield (
            f"added tokens {first!a} and {second!a} can overlap: llama.cpp takes the longer one, wherever it begins"
        )
    for said, texts in found.items():
        shown = ", ".join(f"{text!a:.40}" for text in texts[:_SHOWN])
        yield f"{len(texts)} added token(s) ({shown}) {said}"


def _changed(item: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the normalizer changes the text of an added token to what llama.cpp does not look for."""
    text = item["content"]
    for node in flat(tokenizer.get("normalizer"), "normalizers"):
        kind = node.get("type")
        if kind == "Prepend" or (kind == "NFC" and unicodedata.normalize("NFC", text) != text):
            return True
        if kind == "Replace" and (SPACE in text or " " in text):
            return True
    return False


def _overlapping(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return two added tokens of which the shorter one ends as the longer begins; runs of one character are alike."""
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


def of_post_processor(
    tokenizer: Mapping[str, Any], special: Mapping[str, int], flags: Mapping[str, bool], ids: Mapping[str, int]
) -> Iterator[str]:  # fmt: skip
    """Yield what is put around a text beside a token that begins and one that ends it.

    Args:
        tokenizer: ``tokenizer.json``.
        special: ids by role.
        flags: ``add_bos_token`` and ``add_eos_token``, as they are written.
        ids: of all tokens by text.
    """
    nodes = flat(tokenizer.get("post_processor"), "processors")
    templates = [node for node in nodes if node.get("type") == "TemplateProcessing"]
    for node in nodes:
        if node.get("type") not in ("TemplateProcessing", "ByteLevel"):
            yield f"post_processor {node.get('type')}: llama.cpp has none"
    if len(templates) > 1:
        yield f"post_processor: {len(templates)} templates: llama.cpp has one"
        return
    for node in templates:
        single = node.get("single")
        items = [
            item
            for item in (single if isinstance(single, list) else [])
            if isinstance(item, Mapping)
        ]
        texts = [place for place, item in enumerate(items) if "Sequence" in item]
        declared = node.get("special_tokens")
        known = declared if isinstance(declared, Mapping) else {}
        if len(texts) != 1:
            yield f"post_processor: a template with the text {len(texts)} times: llama.cpp takes it once"
            continue
        parts = items[: texts[0]], items[texts[0] + 1 :]
        for role, word, part in zip(("bos", "eos"), ("before", "after"), parts, strict=True):
            names = [
                str(item["SpecialToken"].get("id"))
                for item in part
                if isinstance(item.get("SpecialToken"), Mapping)
            ]
            numbers = [
                number
                for name in names
                for number in (
                    known[name]["ids"]
                    if isinstance(known.get(name), Mapping)
                    and isinstance(known[name].get("ids"), list)
                    else [ids.get(name, -1)]
                )
            ]
            written = [special[role]] if flags.get(f"add_{role}_token") else []
            if numbers != written:
                shown, instead = (
                    ", ".join(map(repr, names)),
                    "nothing" if not written else "one token",
                )
                yield f"post_processor puts {shown or 'nothing'} {word} a text: llama.cpp puts {instead}"


def of_decoder(tokenizer: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield a decoder that makes other text of tokens."""
    nodes = flat(tokenizer.get("decoder"), "decoders")
    kinds = [str(node.get("type")) for node in nodes]
    if kind == "gpt2":
        good = kinds == ["ByteLevel"]
    else:
        spaces = any(_reads_spaces(node) for node in nodes)
        good = (
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
    if not good:
        shown = ", ".join(kinds) or "none"
        first = "" if kind == "gpt2" else f"{SPACE} as a space, and "
        yield f"decoder {shown}: llama.cpp reads {first}pieces of bytes as bytes"


def _reads_spaces(node: Mapping[str, Any]) -> bool:
    replaced = (node.get("pattern"), node.get("content")) == ({"String": SPACE}, " ")
    return node.get("type") == "Metaspace" or (node.get("type") == "Replace" and replaced)


def of_settings(
    settings: Mapping[str, Any], tokenizer: Mapping[str, Any], flags: Mapping[str, bool]
) -> Iterator[str]:
    """Yield what transformers does by ``tokenizer_config.json``, whatever ``tokenizer.json`` says.

    Args:
        settings: ``tokenizer_config.json``.
        tokenizer: ``tokenizer.json``.
        flags: ``add_bos_token`` and ``add_eos_token``, as they are written.
    """
    ends = dict(zip(("bos", "eos"), template_ends(tokenizer), strict=True))
    for role, word in (("bos", "begins"), ("eos", "ends")):
        stated, written = settings.get(f"add_{role}_token"), flags.get(f"add_{role}_token", False)
        if isinstance(stated, bool) and (stated != written or (stated and ends[role] is None)):
            yield (
                f"add_{role}_token = {str(stated).lower()}: tokenizer.json says otherwise, and classes of transformers "
                f"go by one or the other; llama.cpp puts {'a' if written else 'no'} token that {word} a text"
            )
    known = {item["content"] for item in added_tokens(tokenizer)} | tokenizer["model"][
        "vocab"
    ].keys()
    unknown = [text for text in special_contents(settings) if text not in known]
    if unknown:
        shown = ", ".join(f"{text!a:.40}" for text in unknown[:_SHOWN])
        yield (
            f"{len(unknown)} special token(s) ({shown}) that tokenizer.json lacks: transformers gives them ids after "
            "the vocabulary; llama.cpp reads them as text"
        )
    if settings.get("split_special_tokens") is True:
        yield "split_special_tokens: llama.cpp takes special tokens in a text for what they are"
    if settings.get("add_prefix_space") is True:
        yield (
            "add_prefix_space: some classes of transformers put a space before a text by it; llama.cpp goes by "
            "tokenizer.json"
        )


def of_ends(
    special: Mapping[str, int], ends: Sequence[int], tokens: Sequence[str], kind: str
) -> Iterator[str]:
    """Yield tokens that end a text in one of the two alone; ``ends`` are those of ``generation_config.json``."""
    default = _END[kind]
    if "eos" not in special and default < len(tokens):
        yield f"no token that ends a text: llama.cpp takes {tokens[default]!a} (id {default}) for one"
    kept = {special.get(role) for role in ("eos", "eot", "eom")}
    lost = [number for number in ends if number not in kept and tokens[number] not in _ENDS]
    if lost:
        shown = ", ".join(f"{tokens[number]!a}" for number in lost[:_SHOWN])
        yield f"eos_token_id: {shown}: there are keys for three tokens that end a text"
