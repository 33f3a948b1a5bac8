"""``quantization_config``: every key is known, says nothing that the stored tensors do not do, and is said alike.

The readers of the formats obey bits, groups, types and exceptions, and refuse what contradicts the tensors. The other
keys are listed here, each with what a loader may be told by it: some are notes of the tool that quantized, some would
make a loader transform, skip or reread weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from quantforge.formats import compressed_tensors, kv_scales
from quantforge.verification.beside.conditions_model import FLOATS
from quantforge.verification.beside.trees import ABSENT, at, plain, same, shown

Allowed = Callable[[Any], bool]


def _any(_: Any) -> bool:
    """Return True: the key is a note, or the reader of the format checks it."""
    return True


def _one(*values: Any) -> Allowed:
    return lambda found: any(same(found, value) for value in values)


def _text(found: Any) -> bool:
    return found is None or isinstance(found, str)


def _dtype(found: Any) -> bool:
    return found is None or str(found).removeprefix("torch.") in FLOATS


def _dense(found: Any) -> bool:
    """Return whether nothing was pruned."""
    return not found or (isinstance(found, Mapping) and found.get("format") in (None, "dense"))


_OFF = _one(None, False)
_EMPTY = _one(None, {}, [], "")
_NOTES: dict[str, Allowed] = dict.fromkeys(
    ("dataset", "tokenizer", "batch_size", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential",
     "cache_block_outputs", "max_input_length", "model_seqlen", "use_cuda_fp16", "use_exllama", "exllama_config",
     "backend", "disable_exllama", "pad_token_id", "meta", "model_name_or_path", "block_name_to_quantize",
     "module_name_preceding_first_block", "act_group_aware", "mse", "quantizer", "uri"), _any)  # fmt: skip
_PACKED: dict[str, Allowed] = {
    "bits": _any, "group_size": _any, "sym": _any, "desc_act": _any, "lm_head": _any, "quant_method": _any,
    "dynamic": _any, "pack_dtype": _one("int32", None), "checkpoint_format": _any, "format": _any,
    "method": _one("gptq", "awq", None), "modules_in_block_to_quantize": _any, "modules_to_not_convert": _any,
    "is_marlin_format": _OFF, "model_file_base_name": _one(None, "model"), "zero_point": _any, "version": _any,
}  # fmt: skip
KNOWN: Mapping[str, Mapping[str, Allowed]] = {
    "compressed-tensors": {
        "config_groups": _any, "format": _any, "ignore": _any, "kv_cache_scheme": _any, "quant_method": _any,
        "quantization_status": _one("compressed", "frozen", None), "sparsity_config": _dense,
        "transform_config": _EMPTY, "global_compression_ratio": _any, "version": _text},
    "gptq": {**_PACKED, **_NOTES},
    "awq": {**_PACKED, **_NOTES, "do_fuse": _OFF, "fuse_max_seq_len": _any, "modules_to_fuse": _EMPTY,
            "w_bit": _any, "q_group_size": _any},
    "bitsandbytes": {
        "_load_in_4bit": _any, "_load_in_8bit": _any, "load_in_4bit": _any, "load_in_8bit": _any, "quant_method": _any,
        "bnb_4bit_compute_dtype": _dtype, "bnb_4bit_quant_storage": _one(None, "uint8", "torch.uint8"),
        "bnb_4bit_quant_type": _any,
        "bnb_4bit_use_double_quant": _any, "llm_int8_enable_fp32_cpu_offload": _OFF, "llm_int8_has_fp16_weight": _OFF,
        "llm_int8_skip_modules": _any, "llm_int8_threshold": _one(0.0, 6.0, None), "target_parameters": _EMPTY,
        "bnb_4bit_blocksize": _any},
    "fp8": {"activation_scheme": _any, "fmt": _one("e4m3", None), "quant_method": _any, "weight_block_size": _any,
            "modules_to_not_convert": _any, "ignored_layers": _any, "scale_fmt": _any, "kv_cache_scheme": _any,
            "kv_cache_quant_method": _any, "dequantize": _OFF},
}  # fmt: skip
_AUTO_ROUND = {"auto-round", "intel/auto-round"}
_AUTO_ROUND_OFF = {
    "act_bits": lambda found: found is None or (isinstance(found, int) and found >= 16)
}
_GROUP = {"format", "targets", "weights", "input_activations", "output_activations"}
_ARGUMENTS: Mapping[str, Allowed] = {
    "num_bits": _any, "type": _any, "symmetric": _any, "group_size": _any, "strategy": _any, "block_structure": _any,
    "dynamic": _any, "actorder": _one(None, False, True, "static", "weight", "group", "dynamic"), "observer": _text,
    "observer_kwargs": lambda found: isinstance(found, dict | None),
    "scale_dtype": _text, "zp_dtype": _one(None, "torch.int8", "torch.uint8"),
}  # fmt: skip
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
_ONE_NAME = (
    ("_load_in_4bit", "load_in_4bit"),
    ("_load_in_8bit", "load_in_8bit"),
    ("format", "checkpoint_format"),
)
# What weights are read by, and what a loader takes for granted where a description leaves it out: gptqmodel reads
# quantize_config.json before config.json, vLLM and transformers read config.json.
_DECISIVE: Mapping[str, Any] = {
    "bits": None, "group_size": None, "sym": True, "zero_point": True, "desc_act": False, "lm_head": False,
    "dynamic": {}, "extra_config": {},
}  # fmt: skip
# Other places in which engines look for a description of the quantization.
_TWINS = (("quantization",), ("compression_config",), ("compression_config", "quantization_config"),
          ("text_config", "quantization_config"))  # fmt: skip


def contradictions(config: Mapping[str, Any], tensors: frozenset[str]) -> Iterator[str]:
    """Yield a text for every key of a configuration's ``quantization_config`` that a loader could not obey."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return
    for path in _TWINS:
        twin = at(config, path)
        inner = isinstance(twin, Mapping) and "quantization_config" in twin
        if twin not in (None, ABSENT) and not inner and not same(twin, found):
            yield f"{'.'.join(path)} = {shown(twin)}, quantization_config is {shown(found)} (engines read one of them)"
    method = str(found.get("quant_method"))
    if method in _AUTO_ROUND:
        yield from _wrong(found, _AUTO_ROUND_OFF, "quantization_config", unknown=False)
    elif method in KNOWN:
        yield from _wrong(found, KNOWN[method], "quantization_config")
    for first, second in _ONE_NAME:
        if (
            method != "compressed-tensors"
            and {first, second} <= found.keys()
            and not same(found[first], found[second])
        ):
            yield f"quantization_config.{first} = {shown(found[first])}, {second} = {shown(found[second])}"
    if method == "bitsandbytes":
        yield from _states(found, tensors)
    if method == "compressed-tensors":
        yield from _groups(found, tensors)


def _states(found: Mapping[str, Any], tensors: frozenset[str]) -> Iterator[str]:
    """Yield contradictions in bitsandbytes' 4 bits: names of tensors tell the kind, and if scales are quantized too."""
    kinds = {name.rpartition("__")[2] for name in tensors if "quant_state.bitsandbytes__" in name}
    stated = found.get("bnb_4bit_quant_type", "fp4")
    if kinds and stated not in kinds:
        yield f"quantization_config.bnb_4bit_quant_type = {shown(stated)}, the tensors are {', '.join(sorted(kinds))}"
    nested = any(name.endswith("nested_absmax") for name in tensors)
    if kinds and bool(found.get("bnb_4bit_use_double_quant")) != nested:
        yield f"quantization_config.bnb_4bit_use_double_quant = {shown(found.get('bnb_4bit_use_double_quant'))}, not so"


def _groups(found: Mapping[str, Any], tensors: frozenset[str]) -> Iterator[str]:
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
            yield from _wrong(arguments, _ARGUMENTS, place)
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
    groups = [compressed_tensors.group_of(item, found) for item in stated.values()]
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


def _wrong(
    found: Mapping[str, Any], known: Mapping[str, Allowed], place: str, *, unknown: bool = True
) -> Iterator[str]:
    for key, value in found.items():
        if key not in known:
            if unknown and value is not None:  # a newer library's key that states nothing
                yield f"{place}.{plain(key)} = {shown(value)}: no such key is known"
        elif not known[key](value):
            yield f"{place}.{plain(key)} = {shown(value)}: the stored weights are not made so"


def disagreements(copy: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for every key of a second description of the quantization that contradicts the first."""
    stated = config.get("quantization_config")
    first = _named(stated if isinstance(stated, Mapping) else {})
    method = str(first.get("quant_method"))
    known = KNOWN.get(method, {})
    second = _named(copy)
    for key, usual in _DECISIVE.items():
        if (key in first) != (key in second):
            value = first.get(key, second.get(key))
            if (value or usual) and not same(value, usual):
                yield f"{key} = {shown(value)} in {'config.json' if key in first else 'this file'} alone"
    for key, value in second.items():
        if key in first:
            if not same(value, first[key]):
                yield f"{plain(key)} = {shown(value)}, config.json has {shown(first[key])}"
        elif key in _DECISIVE:
            continue  # said above
        elif key not in known and method not in _AUTO_ROUND:
            yield f"{plain(key)} = {shown(value)}, config.json says nothing of it"
        elif key in known and not known[key](value):
            yield f"{plain(key)} = {shown(value)}: the stored weights are not made so"


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys under one name each, and names of layouts in one spelling."""
    return {
        _ALIASES.get(key, key): value.lower()
        if key == "version" and isinstance(value, str)
        else value
        for key, value in found.items()
    }
