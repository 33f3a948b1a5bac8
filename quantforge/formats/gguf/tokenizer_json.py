"""What a ``tokenizer.json`` says: pieces, merges, added tokens, and the steps before and after BPE, checked.

Byte-level BPE first cuts the text into words, and llama.cpp has those regular expressions compiled in, under names
(``tokenizer.ggml.pre``). Its converter recognises a name by a digest of the ids of one fixed text, which depends on the
whole vocabulary and so rejects every newly trained tokenizer. Here the steps themselves are compared (`recognised`):
the split patterns, whether digits stand alone, and whether a word that is a token of the vocabulary is taken whole
(``ignore_merges``), which llama.cpp ties to the name. What is not recognised is refused, because a wrong name gives
wrong tokens without any error. BPE in the manner of sentencepiece has no such steps, but llama.cpp has to come to the
same merges and spaces (`check_merges`, `space_before`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.special import flat


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
        if isinstance(value, Mapping | list):
            stated += value.values() if isinstance(value, Mapping) else value
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


# The pre-tokenizer of byte-level BPE


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _words(*parts: str) -> str:
    return "|".join((*parts, _TAIL))


LLAMA3 = _words(_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _OTHER)
QWEN2 = _words(_CONTRACTIONS, _LETTERS, r"\p{N}", _OTHER)
QWEN35 = _words(
    _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
)
TEKKEN = _words(_UPPER, _LOWER, r"\p{N}", _SLASH)
GPT4O = _words(f"{_UPPER}{_CONTRACTIONS}?", f"{_LOWER}{_CONTRACTIONS}?", r"\p{N}{1,3}", _SLASH)


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character stands for in vocabularies of byte-level BPE (GPT-2's)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


BYTE_CHARACTERS = _byte_characters()
BYTES, DIGITS = "bytes", "digits"
# Steps, and whether words that are tokens are taken whole: the name in llama.cpp.
KNOWN: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((BYTES,), False): "gpt-2",
    ((DIGITS, BYTES), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
}


def recognised(tokenizer: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer of a byte-level BPE tokenizer.

    Raises:
        RefusedError: the steps are none that llama.cpp is known to do.
    """
    steps = _steps(tokenizer.get("pre_tokenizer"))
    nodes = flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not nodes or nodes[-1].get("type") != "ByteLevel":
        steps = (*steps, "no ByteLevel at the end")
    whole = bool(tokenizer["model"].get("ignore_merges", False))
    name = KNOWN.get((steps, whole))
    if name is None:
        shown = " then ".join(step if len(step) < 60 else step[:60] + "..." for step in steps)
        raise RefusedError(
            f"tokenizer.json: unknown pre-tokenizer: {shown or 'none'}{', ignore_merges' if whole else ''}",
            "name llama.cpp's equivalent with --pre NAME (e.g. llama-bpe, qwen2, gpt-2)",
        )
    return name


def steps_of(name: str) -> tuple[tuple[str, ...], bool] | None:
    """Return the steps for which a name stands; None where it is not known."""
    return next((key for key, other in KNOWN.items() if other == name), None)


def _steps(node: object) -> tuple[str, ...]:
    """Return the steps that cut, as comparable text; a step that is not understood keeps its own JSON name."""
    if not isinstance(node, Mapping):
        return ()
    kind = node.get("type")
    if kind == "Sequence":
        inner = node.get("pretokenizers")
        return tuple(
            step for item in (inner if isinstance(inner, list) else ()) for step in _steps(item)
        )
    if kind == "ByteLevel":
        if node.get("add_prefix_space"):
            return ("a space before the text",)
        return (BYTES,) if node.get("use_regex", True) else ()
    if kind == "Digits" and node.get("individual_digits"):
        return (DIGITS,)
    if kind == "Split":
        pattern = node.get("pattern")
        text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        plain = node.get("behavior") == "Isolated" and not node.get("invert", False)
        if isinstance(text, str) and plain:
            return (text,)
    return (f"a step {kind!r}",)


# BPE as sentencepiece does it


MAX_SQUARES = 200_000_000  # of the lengths of all pieces, which looking at every cut costs; the largest have 20 million
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # how sentencepiece writes a space


def check_merges(
    path: Path, vocab: Mapping[str, int], pairs: list[tuple[str, str]], added: set[str]
) -> None:
    """Check that every cut of a piece into two pieces is a merge: llama.cpp knows no others."""
    check_lengths(path, vocab)
    known = set(pairs)
    for piece in vocab.keys() - added:
        if BYTE.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair[0] in vocab and pair[1] in vocab and pair not in known:
                raise RefusedError(
                    f"{path}: {pair[0]!r} and {pair[1]!r} are pieces but no merge gives {piece!r}: llama.cpp would "
                    "join them, this tokenizer does not",
                    "accept other tokens for some words with --pre default",
                )


def check_lengths(path: Path, pieces: Iterable[str]) -> None:
    """Refuse pieces whose cuts are too many to look at."""
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SQUARES:
        raise InputError(
            f"{path}: pieces of such lengths are no vocabulary",
            "take the file of the original model",
            file=str(path),
        )


def check_bytes(path: Path, vocab: Mapping[str, int]) -> None:
    """Check that every byte is a piece: llama.cpp fails on a text with one that is not."""
    missing = [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in vocab]
    if missing:
        raise RefusedError(
            f"{path}: byte_fallback, and {len(missing)} of the 256 bytes are no pieces, {missing[0]} first",
            "llama.cpp needs all of them: this tokenizer cannot be carried",
        )


def space_before(
    path: Path, tokenizer: Mapping[str, Any], added: Container[str], *, named: bool
) -> bool:
    """Return whether a space is put before the text; refuse steps that llama.cpp's tokenizer of this kind lacks.

    Args:
        path: ``tokenizer.json``.
        tokenizer: its content.
        added: its added tokens.
        named: other tokens for some words are accepted (``--pre``).
    """
    prefix = replaced = False
    model = tokenizer["model"]
    for node in (
        *flat(tokenizer.get("normalizer"), "normalizers"),
        *flat(tokenizer.get("pre_tokenizer"), "pretokenizers"),
    ):
        kind = node.get("type")
        spaces = node.get("pattern") == {"String": " "}
        if kind == "Prepend" and node.get("prepend") == SPACE and not prefix:
            prefix = True
        elif kind == "Metaspace" and node.get("replacement", SPACE) == SPACE:
            default = "always" if node.get("add_prefix_space", True) else "never"
            prefix = prefix or node.get("prepend_scheme", default) != "never"
            replaced = True
            across = next(
                (one for one in model["vocab"] if SPACE in one[1:] and one not in added), None
            )
            if node.get("split", True) and across is not None and not named:
                raise RefusedError(
                    f"{path}: Metaspace splits a text at spaces, llama.cpp does not, and joins {across!r}",
                    "accept other tokens for some words with --pre default",
                )
        elif kind == "Replace" and spaces and node.get("content") == SPACE:
            replaced = True
        elif not (kind == "Split" and spaces and replaced):
            raise RefusedError(
                f"{path}: llama.cpp's tokenizer has no step {kind!r}",
                "this tokenizer cannot be carried",
            )
    if not replaced:
        raise RefusedError(
            f"{path}: no step writes spaces as {SPACE}, and llama.cpp does",
            "this tokenizer cannot be carried",
        )
    return prefix
