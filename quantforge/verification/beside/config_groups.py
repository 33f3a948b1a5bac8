"""The config groups of compressed-tensors: every key is known, and says nothing that the stored tensors do not do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantforge.formats import ct_groups, kv_scales
from quantforge.verification.beside.allowed import Allowed, free, one, text, wrong
from quantforge.verification.beside.trees import plain, shown

_GROUP = {"format", "targets", "weights", "input_activations", "output_activations"}


_ARGUMENTS: Mapping[str, Allowed] = {
    "num_bits": free, "type": free, "symmetric": free, "group_size": free, "strategy": free, "block_structure": free,
    "dynamic": free, "actorder": one(None, False, True, "static", "weight", "group", "dynamic"), "observer": text,
    "observer_kwargs": lambda found: isinstance(found, dict | None),
    "scale_dtype": text, "zp_dtype": one(None, "torch.int8", "torch.uint8"),
}  # fmt: skip


def group_contradictions(found: Mapping[str, Any], tensors: frozenset[str]) -> Iterator[str]:
    """Yield a text for every key of the groups of a ``quantization_config`` that a loader could not obey."""
    groups, stated = found.get("config_groups"), found.get("format")
    if found.get("kv_cache_scheme") is None and (scales := kv_scales.named(tensors)):
        yield f"kv_cache_scheme is missing, and {scales[0]} is a scale of a KV cache ({len(scales)} in all)"
    schemes = [("kv_cache_scheme", found.get("kv_cache_scheme"))]
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping):
            continue
        place = f"config_groups.{name}"
        yield from (f"{place}.{plain(key)}: no loader knows it" for key in group.keys() - _GROUP)
        if group.get("output_activations") is not None:
            yield f"{place}.output_activations = {shown(group['output_activations'])}: outputs are not quantized"
        if stated == "mixed-precision" and group.get("format") is None:
            yield f"{place}.format is missing, and the format is mixed-precision"
        if stated != "mixed-precision" and group.get("format") not in (None, stated):
            yield f"{place}.format = {shown(group['format'])}, the format is {shown(stated)}"
        schemes += [
            (f"{place}.{part}", group.get(part)) for part in ("weights", "input_activations")
        ]
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("dynamic") not in (None, False):
            yield f"{place}.weights.dynamic = {shown(weights['dynamic'])}: weights are stored"
        if isinstance(weights, Mapping) and not _signed(weights):
            yield f"{place}.weights.zp_dtype = {shown(weights['zp_dtype'])}: zero points are stored in 8 signed bits"
    for place, arguments in schemes:
        if isinstance(arguments, Mapping):
            yield from wrong(arguments, _ARGUMENTS, place)
            yield from _unused(arguments, place)
        elif arguments is not None:
            yield f"{place} = {shown(arguments)}: no description of numbers"


def _signed(weights: Mapping[str, Any]) -> bool:
    return weights.get("symmetric", True) is True or weights.get("zp_dtype") in (None, "torch.int8")


def cautions(config: Mapping[str, Any], modules: Collection[str]) -> Iterator[str]:
    """Yield a text for what some loaders read otherwise, of a configuration and its quantized ``modules``.

    Raises:
        InputError: a config group says what is not read.
    """
    found = config.get("quantization_config")
    stated = found.get("config_groups") if isinstance(found, Mapping) else None
    if not modules or not isinstance(stated, Mapping) or not isinstance(found, Mapping):
        return
    status = found.get("quantization_status")
    if status != "compressed":
        yield (
            f"quantization_status = {shown(status)}: transformers takes weights as they are packed for such only where"
            " it is 'compressed'"
        )
    groups = [ct_groups.group_of(item, found) for item in stated.values()]
    for module in sorted(modules):
        said = [group for group in groups if group.rank(module) in (0, 1)]
        if any((group.layer, group.kind) != (said[0].layer, said[0].kind) for group in said):
            yield f"{module}: {len(said)} config groups target it and differ; not every engine takes the same"
            return


def _unused(arguments: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield sizes that the strategy does not use: a loader that goes by them reads something else."""
    strategy = arguments.get("strategy")
    if arguments.get("block_structure") is not None and strategy != "block":
        yield f"{place}.block_structure = {shown(arguments['block_structure'])}, the strategy is {shown(strategy)}"
    if arguments.get("group_size") not in (None, -1) and strategy not in (
        None,
        "group",
        "tensor_group",
    ):
        yield f"{place}.group_size = {shown(arguments['group_size'])}, the strategy is {shown(strategy)}"
