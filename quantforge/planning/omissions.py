"""Omissions: what of a model directory does not reach the result, and is said instead of passed over.

Code, pickles and stray files are not carried, keys that make a loader run code are not acted on, and a licence that the
source does not state is not made up. None of it makes the result worse, so none of it is an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.index import INDEX
from quantforge.checkpoint.reader import CARD, CONFIG, Checkpoint, is_licence
from quantforge.results.front_matter import carried_fields
from quantforge.results.manifest import NAME as MANIFEST
from quantforge_calibration.chat_templates import FOLDER

# Keys by which loaders find code: transformers, Hydra, diffusers.
CODE_KEYS = (
    "auto_map",
    "trust_remote_code",
    "_attn_implementation_internal",
    "_target_",
    "custom_pipelines",
)
_NAMED = 8


def left_behind(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note for everything of a directory that the result leaves out; none for a GGUF file."""
    if not checkpoint.path.is_dir():
        return ()
    names = [name for name in FILES.listing(checkpoint.path, None) if not name.startswith(".")]
    known = {CONFIG, CARD, INDEX, FOLDER, MANIFEST, *(path.name for path in checkpoint.shards)}
    known |= {path.name for path in checkpoint.side_files}
    said = []
    if keys := sorted(_code_keys(checkpoint.config)):
        said.append(f"{CONFIG} names code, which is never run: {', '.join(keys)}")
    if left := [_shown(checkpoint.path / name) for name in names if name not in known]:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        said.append(f"not carried over: {', '.join(left[:_NAMED])}{more}")
    stated = any(key.startswith("license") for key in carried_fields(checkpoint.card))
    if not stated and not any(is_licence(path.name) for path in checkpoint.side_files):
        said.append(
            "the source states no licence, so the result states none: ask whoever made the model"
        )
    return tuple(said)


def _code_keys(config: Mapping[str, Any]) -> set[str]:
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    return {key for part in (config, *nested) for key in CODE_KEYS if part.get(key)}


def _shown(path: Path) -> str:
    name = path.name if path.name.isprintable() else ascii(path.name)
    return f"{name}/" if path.is_dir() and not path.is_symlink() else name
