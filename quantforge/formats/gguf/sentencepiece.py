"""BPE as sentencepiece does it, where llama.cpp has to come to the same: merges and spaces."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.special import flat

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
