"""Decoders within models that have further towers: where files and the running model hold the decoder.

The towers are told by the beginnings of their names; they are kept as they are. Where transformers has a class for the
decoder alone, that one runs, and names are those of its own; where it has none, the whole model is built, and the
decoder's names have its place in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantforge.architectures import Architecture

QWEN_TOWER = r"(model\.)?visual\..*"
WITHIN = "model.language_model"
ALONE = r"model\.(embed_tokens|layers|norm)\."  # names of a decoder alone, as `Architecture.unmapped` states them
WITHIN_TOWERS = r"(model\.)?language_model\."  # names of one within a model that has towers


def beside_towers(
    text: Architecture,
    model_type: str,
    towers: Sequence[str],
    prefixes: Sequence[tuple[str, str]] = (("model.language_model.", "model."),),
) -> Architecture:
    """Return a family whose decoder runs alone.

    Args:
        text: the family of the decoder.
        model_type: of the whole.
        towers: regular expressions of the names of their tensors in files.
        prefixes: of the decoder's tensors, each (in files, canonical), beside the decoder's own.
    """
    return replace(
        text,
        model_type=model_type,
        prefixes=(*text.prefixes, *prefixes),
        unmapped={**text.unmapped, model_type: ALONE},
        foreign=(*text.foreign, *towers),
        text_config="text_config",
    )


def within_whole(text: Architecture, model_type: str, towers: Sequence[str]) -> Architecture:
    """Return a family of which transformers runs the whole model; files may hold the decoder as if it were alone."""
    return replace(
        text,
        model_type=model_type,
        blocks=_moved(text.blocks),
        outer=tuple(replace(item, name=_moved(item.name)) for item in text.outer),
        embedding=_moved(text.embedding),
        final_norm=_moved(text.final_norm),
        prefixes=(("", ""), ("model.", f"{WITHIN}.")),
        foreign=(*text.foreign, *towers),
        text_config="text_config",
        graph=None,
        gguf=None,
    )


def _moved(name: str) -> str:
    own = name.startswith("model.")
    return f"{WITHIN}.{name.removeprefix('model.')}" if own else name
