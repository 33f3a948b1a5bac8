"""``quantization_config``: every key is known, says nothing that the stored tensors do not do, and is said alike.

The readers of the formats obey bits, groups, types and exceptions, and refuse what contradicts the tensors. The other
keys are listed here, each with what a loader may be told by it: some are notes of the tool that quantized, some would
make a loader transform, skip or reread weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.verification.beside.allowed import Allowed, dtype, free, one, text, wrong
from quantforge.verification.beside.config_groups import group_contradictions
from quantforge.verification.beside.trees import ABSENT, at, plain, same, shown


def _dense(found: Any) -> bool:
    """Return whether nothing was pruned."""
    return not found or (isinstance(found, Mapping) and found.get("format") in (None, "dense"))


_OFF = one(None, False)
_EMPTY = one(None, {}, [], "")
_NOTES: dict[str, Allowed] = dict.fromkeys(
    ("dataset", "tokenizer", "batch_size", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential",
     "cache_block_outputs", "max_input_length", "model_seqlen", "use_cuda_fp16", "use_exllama", "exllama_config",
     "backend", "disable_exllama", "pad_token_id", "meta", "model_name_or_path", "block_name_to_quantize",
     "module_name_preceding_first_block", "act_group_aware", "mse", "quantizer", "uri"), free)  # fmt: skip
_PACKED: dict[str, Allowed] = {
    "bits": free, "group_size": free, "sym": free, "desc_act": free, "lm_head": free, "quant_method": free,
    "dynamic": free, "pack_dtype": one("int32", None), "checkpoint_format": free, "format": free,
    "method": one("gptq", "awq", None), "modules_in_block_to_quantize": free, "modules_to_not_convert": free,
    "is_marlin_format": _OFF, "model_file_base_name": one(None, "model"), "zero_point": free, "version": free,
}  # fmt: skip
KNOWN: Mapping[str, Mapping[str, Allowed]] = {
    "compressed-tensors": {
        "config_groups": free, "format": free, "ignore": free, "kv_cache_scheme": free, "quant_method": free,
        "quantization_status": one("compressed", "frozen", None), "sparsity_config": _dense,
        "transform_config": _EMPTY, "global_compression_ratio": free, "version": text,
        "dequantize": one(None, False, True)},
    "gptq": {**_PACKED, **_NOTES},
    "awq": {**_PACKED, **_NOTES, "do_fuse": _OFF, "fuse_max_seq_len": free, "modules_to_fuse": _EMPTY,
            "w_bit": free, "q_group_size": free},
    "bitsandbytes": {
        "_load_in_4bit": free, "_load_in_8bit": free, "load_in_4bit": free, "load_in_8bit": free, "quant_method": free,
        "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": free,
        "bnb_4bit_quant_type": free,
        "bnb_4bit_use_double_quant": free, "llm_int8_enable_fp32_cpu_offload": _OFF, "llm_int8_has_fp16_weight": _OFF,
        "llm_int8_skip_modules": free, "llm_int8_threshold": one(0.0, 6.0, None), "target_parameters": _EMPTY,
        "bnb_4bit_blocksize": free},
    "fp8": {"activation_scheme": free, "fmt": one("e4m3", None), "quant_method": free, "weight_block_size": free,
            "modules_to_not_convert": free, "ignored_layers": free, "scale_fmt": free, "kv_cache_scheme": free,
            "kv_cache_quant_method": free, "dequantize": _OFF},
}  # fmt: skip
_AUTO_ROUND = {"auto-round", "intel/auto-round"}
_AUTO_ROUND_OFF = {
    "act_bits": lambda found: found is None or (isinstance(found, int) and found >= 16)
}
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
        yield from wrong(found, _AUTO_ROUND_OFF, "quantization_config", unknown=False)
    elif method in KNOWN:
        yield from wrong(found, KNOWN[method], "quantization_config")
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
        yield from group_contradictions(found, tensors)


def _states(found: Mapping[str, Any], tensors: frozenset[str]) -> Iterator[str]:
    """Yield contradictions in bitsandbytes' 4 bits: names of tensors tell the kind, and if scales are quantized too."""
    kinds = {name.rpartition("__")[2] for name in tensors if "quant_state.bitsandbytes__" in name}
    stated = found.get("bnb_4bit_quant_type", "fp4")
    if kinds and stated not in kinds:
        yield f"quantization_config.bnb_4bit_quant_type = {shown(stated)}, the tensors are {', '.join(sorted(kinds))}"
    nested = any(name.endswith("nested_absmax") for name in tensors)
    if kinds and bool(found.get("bnb_4bit_use_double_quant")) != nested:
        yield f"quantization_config.bnb_4bit_use_double_quant = {shown(found.get('bnb_4bit_use_double_quant'))}, not so"


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
