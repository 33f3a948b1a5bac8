"""Experts that stay as they are, by the names under which engines look for them: these hold a mixture as one module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.routers import experts_of, is_stack
from quantforge.architectures.towers import BLOCK
from quantforge.formats.configuration import skipped, spellings
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan

_MIXTURE = re.compile(r"(.*\bexperts)\.")
# vLLM decides on a mixture by these parts of its first expert, however files hold it; which three differs by family.
_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def skipped_with_mixtures(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the full names of all linears and mixtures that stay as they are."""
    return [*skipped(plan, config, quantized), *kept_mixtures(plan, config, quantized)]


def skipped_with_stacks(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return what compressed-tensors has to ignore: linears, and of mixtures that are stored stacked the parts too.

    No file has such parts; without their names vLLM takes a mixture for packed wherever linears are as a class.
    """
    stacks = _mixtures(_stacks(_kept(plan), config)) - _mixtures(quantized)
    names = [
        name
        for mixture in stacks
        for local in (mixture, *(f"{mixture}.0.{part}" for part in _PARTS))
        for name in spellings(local, config)
    ]
    return sorted({*skipped(plan, config, quantized), *names})


def kept_mixtures(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the names of the mixtures whose experts all stay as they are, however these are stored."""
    kept = _kept(plan)
    stored = _mixtures(item.name for item in kept) | _mixtures(_stacks(kept, config))
    whole = stored - _mixtures(quantized)
    return sorted(name for mixture in whole for name in spellings(mixture, config))


def _kept(plan: Plan) -> list[StoredTensor]:
    return [
        item
        for tensor in plan.tensors
        if tensor.action is not Action.DROP
        for item in tensor.stored
    ]


def _stacks(stored: Iterable[StoredTensor], config: Mapping[str, Any]) -> list[str]:
    """Return the names of stacked experts, as parts of a module ``experts`` where files have none."""
    counts = experts_of(text_config(config))
    names = (
        item.name.removesuffix(".weight")
        for item in stored
        if BLOCK.match(item.name) and is_stack(item.shape, counts)
    )
    return [
        name if _MIXTURE.match(name) else ".experts.".join(name.rsplit(".", 1)) for name in names
    ]


def _mixtures(names: Iterable[str]) -> set[str]:
    return {found[1] for name in names if (found := _MIXTURE.match(name))}
