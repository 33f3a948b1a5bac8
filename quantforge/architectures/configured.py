"""Declarations for one configuration: what it may not ask for, so that they hold, and which tensors it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from quantforge.architectures import Architecture
from quantforge.errors import InputError

_HINT = "--method rtn works without the architecture's declarations"


def required(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Refuse configuration values that the declarations do not cover.

    Raises:
        InputError: naming the key, the value and what is supported.
    """
    for key, value in architecture.requires.items():
        if config.get(key, value) != value:
            raise InputError(
                f"config.json: {key} = {config[key]!r} is not supported for {architecture.model_type}",
                f"supported: {key} = {value!r}; {_HINT}",
            )
    if architecture.uncovered:
        module, _, name = architecture.uncovered.rpartition(".")
        stated = {**architecture.defaults, **config}
        if what := getattr(import_module(module), name)(stated):
            raise InputError(
                f"config.json: {what} is not supported for {architecture.model_type}", _HINT
            )


def configured(config: Mapping[str, Any], architecture: Architecture) -> Architecture:
    """Return the declarations of models of a (text) configuration: without the tensors that it leaves out."""
    stated, keys = {**architecture.defaults, **config}, architecture.replayed
    return replace(
        architecture,
        outer=tuple(item for item in architecture.outer if item.exists(stated)),
        kinds=tuple(kind.present(stated) for kind in architecture.kinds),
        replayed=keys if isinstance(keys, bool) else any(map(stated.get, keys)),
    )
