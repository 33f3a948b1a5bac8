"""What ``config.json`` says of the quantization: against the stored tensors, and against files that say it again.

Readers of the formats already refuse a configuration that does not fit the headers of the tensors. Here is the rest:
what only some loaders refuse or read differently, and flags that only the values of the tensors can deny.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from quantforge.architectures import text_config
from quantforge.checkpoint.reader import CONFIG
from quantforge.formats import kv_scales
from quantforge.formats.configuration import quantization_config, spellings
from quantforge.formats.ct_arguments import input_arguments, weight_arguments
from quantforge.formats.ct_groups import group_of
from quantforge.verification.loaded_files import COPIES
from quantforge.verification.opening import Artifact
from quantforge.verification.trees import ABSENT, changes, same, shorten, shown

# What decides how codes are read, and what loaders assume if a description leaves it out (`ABSENT`: it may be left
# out). GPTQModel reads quantize_config.json before config.json, vLLM and transformers read config.json.
_DECISIVE: Mapping[str, Any] = {
    "bits": None, "group_size": None, "sym": True, "zero_point": True, "desc_act": False, "lm_head": False,
    "dynamic": {}, "extra_config": {}, "format": ABSENT, "checkpoint_format": ABSENT, "quant_method": ABSENT,
}  # fmt: skip
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
# Arguments of a compressed-tensors group that are assumed if they are left out, and those that decide nothing.
_ASSUMED = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": -1}
_FREE = {"observer", "observer_kwargs", "actorder", "zp_dtype"}
_GROUP = {"targets", "weights", "input_activations", "format"}


def contradictions(
    config: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]], tensors: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield the file and a message for whatever contradicts ``quantization_config``.

    Args:
        config: ``config.json``.
        documents: the other JSON files by name, of which some describe the quantization again.
        tensors: the names of the stored tensors.
    """
    stated = config.get("quantization_config")
    found = stated if isinstance(stated, Mapping) else {}
    for name in sorted(COPIES & documents.keys()):
        first, second = (
            {_ALIASES.get(key, key): value for key, value in description.items() if value is not None}
            for description in (found, documents[name])
        )  # fmt: skip
        for key, usual in _DECISIVE.items():
            one, two = first.get(key, usual), second.get(key, usual)
            if not same(one, two) and (usual is not ABSENT or ABSENT not in (one, two)):
                yield name, f"{key} = {shown(two)}, {CONFIG} has {shown(one)}"
    if not found:
        return
    twins = {key: config.get(key) for key in ("quantization", "compression_config")}
    twins["text_config"] = text_config(config).get("quantization_config")
    for name, twin in twins.items():
        inner = twin.get("quantization_config", twin) if isinstance(twin, Mapping) else found
        for change in islice(changes(inner, found), 1):
            place = shorten(".".join((name, *change.path)))
            text = f"{place} = {shown(change.own)}, quantization_config has {shown(change.other)}"
            yield CONFIG, text
    for alias, name in (*_ALIASES.items(), ("checkpoint_format", "format")):
        if {alias, name} <= found.keys() and not same(found[alias], found[name]):
            yield CONFIG, f"{name} = {shown(found[name])}, {alias} = {shown(found[alias])}"
    groups, form = found.get("config_groups"), found.get("format", "mixed-precision")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        other = group.get("format") if isinstance(group, Mapping) else None
        if form != "mixed-precision" and other not in (None, form):
            place = f"config_groups.{shorten(name)}.format"
            yield CONFIG, f"{place} = {shown(other)}, format = {shown(form)}"
    for key in ("sparsity_config", "transform_config"):
        step = found.get(key)
        if step and not (isinstance(step, Mapping) and step.get("format") == "dense"):
            yield CONFIG, f"{key} = {shown(step)}: loaders transform the weights by it"
    announced = found.get("kv_cache_scheme") or found.get("quant_method") != "compressed-tensors"
    if not announced and (scales := kv_scales.named(tensors)):
        text = f"{scales[0]} is a scale of a KV cache ({len(scales)} in all)"
        yield CONFIG, f"kv_cache_scheme is missing, but {text}"


def doubts(artifact: Artifact) -> Iterator[str]:
    """Yield what only some loaders refuse, and flags that the values of the tensors deny.

    Raises:
        InputError: a tensor cannot be read.
    """
    found = quantization_config(artifact.checkpoint.config)
    method = found.get("quant_method")
    if method == "compressed-tensors":
        yield from _group_doubts(artifact, found)
    elif method in {"gptq", "awq"}:
        yield from _flag_doubts(artifact, found, "sym" if method == "gptq" else "zero_point")


def _group_doubts(artifact: Artifact, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a group of compressed-tensors says beside what our own files would say of the same scheme."""
    groups, config = found["config_groups"], artifact.checkpoint.config
    if groups and "group_0" not in groups:
        yield "config_groups has no group_0, the only group that TensorRT-LLM reads"
    modules = [name for module in artifact.layouts for name in spellings(module, config)]
    status = found.get("quantization_status")
    if status not in (None, "compressed"):
        yield f"quantization_status = {shown(status)}: loaders expect weights that are not packed"
    for name, stated in groups.items():
        group, place = group_of(stated, found), f"config_groups.{shorten(name)}"
        if not any(group.rank(module) is not None for module in modules):
            yield f"{place}.targets = {shown(stated.get('targets'))} name no quantized layer"
        for key in stated.keys() - _GROUP:
            if stated[key] is not None:
                yield f"{place}.{shorten(key)} = {shown(stated[key])}: loaders refuse or ignore it"
        for key, expected in (
            ("weights", weight_arguments(group.layer.weight)),
            ("input_activations", input_arguments(group.layer.input) or {}),
        ):
            for argument, value in (stated.get(key) or {}).items():
                usual = expected.get(argument, _ASSUMED.get(argument))
                if value and argument not in _FREE and not same(value, usual):
                    text = f"{place}.{key}.{shorten(argument)} = {shown(value)}"
                    yield f"{text}: loaders refuse it, or do something else than the weights ask for"


def _flag_doubts(artifact: Artifact, found: Mapping[str, Any], flag: str) -> Iterator[str]:
    """Yield flags of GPTQ and AWQ files that all tensors deny: scattered columns, zero points."""
    layouts = artifact.layouts.values()
    read = artifact.checkpoint.read
    meta = found.get("meta")
    static = any(isinstance(one, Mapping) and one.get("static_groups") for one in (found, meta))
    grouped = [one.module for one in layouts if one.scheme.weight.groups(one.shape[1]) > 1]
    indices = [name for one in grouped if (name := f"{one}.g_idx") in artifact.checkpoint.entries]
    ordered = indices and not any(bool((read(name).diff() < 0).any()) for name in indices)
    if ordered and found.get("desc_act") is True and not static:
        yield "desc_act = true, but the columns of every layer are in order"
    uneven = [one for one in layouts if not one.scheme.weight.symmetric]
    if uneven and all(_is_centered(artifact, one) for one in uneven):
        yield f"{flag} = {shown(found.get(flag))}, but every zero point is that of symmetric weights"


def _is_centered(artifact: Artifact, layout: Any) -> bool:
    """Return whether all zero points of a weight are in the middle of the codes."""
    middle = 1 << (layout.scheme.weight.bits - 1)
    zeros = artifact.unpack(layout).parameters["zeros"]
    return bool((zeros.to(torch.int32) == middle).all())
