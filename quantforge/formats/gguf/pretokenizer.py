"""Recognising a pre-tokenizer by what ``tokenizer.json`` says it does.

Byte-level BPE first cuts the text into words, and llama.cpp has those regular expressions compiled in, under names
(``tokenizer.ggml.pre``). Its converter recognises a name by a digest of the ids of one fixed text, which depends on the
whole vocabulary and so rejects every newly trained tokenizer. Here the steps themselves are compared: the split
patterns, whether digits stand alone, and whether a word that is a token of the vocabulary is taken whole
(``ignore_merges``), which llama.cpp ties to the name. What is not recognised is refused, because a wrong name gives
wrong tokens without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.errors import RefusedError
from quantforge.formats.gguf.special import flat

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
