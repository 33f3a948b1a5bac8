"""BPE as sentencepiece does it, where llama.cpp has to come to the same: merges and spaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


def space_before(path: Path, tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a space is put before the text; refuse steps that llama.cpp's tokenizer of this kind lacks."""
    prefix = False
    for node in (
        *flat(tokenizer.get("normalizer"), "normalizers"),
        *flat(tokenizer.get("pre_tokenizer"), "pretokenizers"),
    ):
        kind = node.get("type")
        spaces = node.get("pattern") == {"String": " "}
        if kind == "Prepend" and node.get("prepend") == SPACE:
            prefix = True
        elif kind == "Metaspace" and node.get("replacement", SPACE) == SPACE:
            scheme = node.get(
                "prepend_scheme", "always" if node.get("add_prefix_space", True) else "never"
            )
            prefix = prefix or scheme != "never"
        elif not (
            (kind == "Replace" and spaces and node.get("content") == SPACE)
            or (kind == "Split" and spaces)
        ):
            raise RefusedError(
                f"{path}: llama.cpp's tokenizer has no step {kind!r}",
                "this tokenizer cannot be carried",
            )
    return prefix
