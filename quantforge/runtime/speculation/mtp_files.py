"""Files that hold a layer for further tokens behind the last one: the same files as a model of that layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures import architecture_of
from quantforge.architectures.heads import BEHIND, layers_of, without_heads
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, RefusedError

_JOINED = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
HINT = "take --draft ngram, int2 or a model"


def as_model(source: Checkpoint, path: str) -> tuple[Checkpoint, dict[str, str]]:
    """Return the block as a model of one layer, and the names of the tensors that join it to the model.

    Raises:
        InputError: there is none, or a tensor of it is missing.
        RefusedError: the files hold such layers in another way than behind the last layer.
    """
    layers, count = layers_of(source.config), source.config.get(BEHIND)
    family = architecture_of(source.config)
    at = f"model.layers.{layers}."
    mine = {name.removeprefix(at): name for name in source.entries if name.startswith(at)}
    if not count or not mine:
        raise InputError(f"{path}: no layer for further tokens in its files", HINT)
    joins = {name: f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    missing = [name for name in (*joins.values(), "shared_head.norm.weight") if name not in mine]
    if missing or family is None or family.embedding != "model.embed_tokens":
        raise RefusedError(
            f"{path}: its layers for further tokens are not those of DeepSeek or GLM: no {missing[:1]}",
            HINT,
        )
    beside = {
        "model.norm.weight": "shared_head.norm.weight",
        "lm_head.weight": "shared_head.head.weight",
        "model.embed_tokens.weight": "embed_tokens.weight",
    }
    names = {new: mine[name] for new, name in beside.items() if name in mine}
    names |= {new: new for new in beside if new not in names and new in source.entries}
    own = {name: stored for name, stored in mine.items() if not name.startswith(_JOINED)}
    names |= {f"model.layers.0.{name}": stored for name, stored in own.items()}
    entries = {new: replace(source.entries[old], name=new) for new, old in sorted(names.items())}
    config = {**without_heads(source.config), "num_hidden_layers": 1, **_sparse(source.config)}
    return replace(source, config=config, entries=entries), {
        key: mine[name] for key, name in joins.items()
    }


def _sparse(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that make the one layer a mixture, as the last ones are."""
    found: dict[str, Any] = (
        {"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {}
    )
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            found[key] = config[key][-1:]
    return found
