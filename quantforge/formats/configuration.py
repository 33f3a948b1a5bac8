"""Write the ``config.json`` of a result (the source's, with the quantization and both spellings of the dtype).

Engines have to know which linears and mixtures of experts stay as they are, by the names under which they look for
them: they hold a mixture as one module.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.draft_heads import is_draft
from quantforge.architectures.routers import expert_counts, is_expert_stack
from quantforge.architectures.towers import NUMBERED_NAME
from quantforge.errors import InputError
from quantforge.files.hub import is_hub_name
from quantforge.files.safetensors import TORCH_NAMES
from quantforge.formats.auto_round import translate_config
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan

FLOAT_DTYPES = ("F16", "BF16", "F32")
# Types of a source that may be restated in one of `FLOAT_DTYPES`
CASTABLE_DTYPES = (*FLOAT_DTYPES, "F64")
QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")
NAME_OR_PATH_KEY = "_name_or_path"
# Last parts of the names of two-dimensional tensors that are looked up, not multiplied.
EMBEDDING_MODULES = {"embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"}
_EXPERTS_MODULE = re.compile(r"(.*\bexperts)\.")
# vLLM decides on a mixture by these parts of its first expert, however files hold it; which three differs by family.
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a configuration, {} if there is none; AutoRound's is translated."""
    quantization = config.get("quantization_config")
    return translate_config(quantization) if isinstance(quantization, Mapping) else {}


def find_quantization_keys(
    config: Mapping[str, Any], parent_path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the keys that declare a quantization, also in nested configurations: dotted path and value."""
    for key, value in config.items():
        path = f"{parent_path}.{key}" if parent_path else key
        if key in QUANTIZATION_KEYS and (not parent_path or key != "quantization"):
            yield path, value
        elif key.endswith("_config") and isinstance(value, Mapping):
            yield from find_quantization_keys(value, path)


def strip_quantization_keys(config: Mapping[str, Any], parent_path: str = "") -> dict[str, Any]:
    """Return a copy of a configuration without the keys that `find_quantization_keys` yields."""
    return {
        key: strip_quantization_keys(value, key)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS or (parent_path and key == "quantization")
    }


def string_list(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings under a key of a configuration, empty if it is missing.

    Raises:
        InputError: something else is there.
    """
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise InputError(
            f"{key} = {str(names)[:60]} is no list of names",
            "quantization_config is damaged: get the model again",
            subject="config.json",
        )
    return names


def model_dtype(plan: Plan, config: Mapping[str, Any]) -> str:
    """Return the dtype in which the source computes, e.g. ``bfloat16``."""
    declared = config.get("dtype") or config.get("torch_dtype")
    if isinstance(declared, str) and declared != "auto":
        return declared.removeprefix("torch.")
    dtype_counts = Counter(tensor.dtype for tensor in plan.tensors if tensor.dtype in FLOAT_DTYPES)
    return TORCH_NAMES[dtype_counts.most_common(1)[0][0]] if dtype_counts else "float32"


def float16_or_model_dtype(plan: Plan, config: Mapping[str, Any]) -> str:
    """Return ``float16``, which kernels need, or the source's dtype if float16 would overflow."""
    architecture = architecture_of(text_config(config))
    safe = architecture is None or architecture.allows_float16
    return "float16" if safe else model_dtype(plan, config)


def head_module(config: Mapping[str, Any]) -> str:
    """Return the module name of the output projection (``lm_head``)."""
    architecture = architecture_of(text_config(config))
    return "lm_head" if architecture is None else architecture.head


def linear_shape(config: Mapping[str, Any], module: str) -> tuple[int, int] | None:
    """Return the ``(out_features, in_features)`` of a linear in a block; None if no architecture declares it."""
    decoder_config = text_config(config)
    architecture = architecture_of(config) or architecture_of(decoder_config)
    if architecture is None:
        return None
    local_name = name_within_block(module)
    dimensions = architecture.dimensions(decoder_config)
    index = (
        int(module.removesuffix(f".{local_name}").rpartition(".")[2])
        if local_name
        else dimensions.layers
    )
    if index >= dimensions.layers:
        return None
    kind = architecture.layer_kinds(decoder_config, dimensions)[index]
    for item in kind.parameters:
        weight = (item.stored or item.name).removesuffix(".weight")
        if weight == local_name and item.name.removesuffix(".weight") in kind.linears:
            first, second = dimensions.shape(item.shape)
            return (second, first) if architecture.transposed else (first, second)
    return None


def quantized_modules(plan: Plan, suffix: str) -> dict[str, TensorPlan]:
    """Return the plans of all modules that have a stored tensor with a name suffix, by module name."""
    return {
        output.name.removesuffix(suffix): tensor
        for tensor in plan.quantized()
        for output in tensor.outputs
        if output.name.endswith(suffix)
    }


def unquantized_linears(plan: Plan) -> list[str]:
    """Return the sorted full names of the linears that are not quantized."""
    return sorted(
        output.name.removesuffix(".weight")
        for tensor in plan.tensors
        if tensor.action is not Action.DROP
        for output in tensor.outputs
        if output.name.endswith(".weight")
        and len(output.shape) == 2
        and output.name.split(".")[-2] not in EMBEDDING_MODULES
    )


def name_within_block(module: str) -> str:
    """Return the module name relative to its block, "" if it is outside of the blocks."""
    name_parts = module.split(".")
    number_positions = [
        index for index, name_part in enumerate(name_parts) if name_part.isdecimal()
    ]
    return ".".join(name_parts[number_positions[0] + 1 :]) if number_positions else ""


def name_variants(module: str, config: Mapping[str, Any]) -> list[str]:
    """Return the names by which engines may look for a module: as stored, and in a multimodal model as loaded.

    Files of multimodal models keep the names of their first release (``language_model.model.layers``);
    transformers renames while loading (``model.language_model.layers``) and matches configurations
    afterwards. vLLM maps the loaded names to its own. ``Linear`` is a class and stays what it is.
    """
    if "text_config" not in config or module == "Linear" or module.startswith("model."):
        return [module]
    for stored_prefix, loaded_prefix in (
        ("language_model.model.", "model.language_model."),
        ("language_model.", ""),
    ):
        if module.startswith(stored_prefix):
            return [module, loaded_prefix + module.removeprefix(stored_prefix)]
    return [module] if module == head_module(config) else [module, f"model.{module}"]


def skip_list(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the full names of all linears that are not quantized.

    A tied head is one of them, although no tensor has its name. Where the running model has another name for one,
    as the routers of some families, it is listed under both; of draft heads vLLM holds all in ``model``.
    """
    head = head_module(config)
    names = {*unquantized_linears(plan), head} - quantized.keys()
    names |= {f"model.{name}" for name in names} if is_draft(config) else set()
    family = architecture_of(config) or architecture_of(text_config(config))
    for stored_name, running_name in (family.renamed_modules if family else {}).items():
        renamed = {name for name in names if name.endswith(f".{stored_name}")}
        names |= {name.removesuffix(stored_name) + running_name for name in renamed}
    quantized_names = {name for module in quantized for name in target_names(module, plan, config)}
    variants = {name for module in names for name in name_variants(module, config)}
    return sorted(variants.union(plan.running.kept if plan.running else ()) - quantized_names)


def skip_list_with_experts(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the full names of all linears and MoE expert modules that are not quantized."""
    return [
        *skip_list(plan, config, quantized),
        *unquantized_expert_modules(plan, config, quantized),
    ]


def skip_list_with_stacked_experts(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the ``ignore`` list of compressed-tensors: unquantized linears, stacked experts and their projections.

    No file has such parts; without their names vLLM takes a mixture for packed wherever linears are as a class.
    """
    stacks = _expert_module_names(
        _stacked_expert_names(_written_tensors(plan), config)
    ) - _expert_module_names(quantized)
    names = [
        name
        for mixture in stacks
        for local_name in (
            mixture,
            *(f"{mixture}.0.{projection}" for projection in _EXPERT_PROJECTIONS),
        )
        for name in name_variants(local_name, config)
    ]
    return sorted({*skip_list(plan, config, quantized), *names})


def unquantized_expert_modules(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the names of MoE expert modules in which no expert is quantized, stacked or not."""
    written_tensors = _written_tensors(plan)
    stored = _expert_module_names(item.name for item in written_tensors) | _expert_module_names(
        _stacked_expert_names(written_tensors, config)
    )
    unquantized = stored - _expert_module_names(quantized)
    return sorted(name for mixture in unquantized for name in name_variants(mixture, config))


def _written_tensors(plan: Plan) -> list[StoredTensor]:
    return [
        item
        for tensor in plan.tensors
        if tensor.action is not Action.DROP
        for item in tensor.outputs
    ]


def _stacked_expert_names(stored: Iterable[StoredTensor], config: Mapping[str, Any]) -> list[str]:
    """Return the names of stacked expert tensors, with ``experts`` inserted if the stored names lack it."""
    counts = expert_counts(text_config(config))
    names = (
        item.name.removesuffix(".weight")
        for item in stored
        if NUMBERED_NAME.match(item.name) and is_expert_stack(item.shape, counts)
    )
    return [
        name if _EXPERTS_MODULE.match(name) else ".experts.".join(name.rsplit(".", 1))
        for name in names
    ]


def _expert_module_names(names: Iterable[str]) -> set[str]:
    return {match[1] for name in names if (match := _EXPERTS_MODULE.match(name))}


def target_names(module: str, plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """Return the names by which engines may look up a quantized module; see `name_variants`."""
    running_name = plan.running.modules.get(module, module) if plan.running else module
    return list(dict.fromkeys([*name_variants(module, config), running_name]))


def config_json(
    config: Mapping[str, Any],
    dtype: str,
    quantization: Mapping[str, Any] | None = None,
    *,
    duplicate_key: str = "",
) -> bytes:
    """Return ``config.json`` as bytes, with the quantization, repeated under ``duplicate_key`` if that is given.

    The keys keep the source's order. Both spellings of the type are written, because transformers 5
    reads ``dtype`` and older engines read ``torch_dtype``.
    """
    document = strip_quantization_keys(config)
    if duplicate_key and quantization is not None:
        document[duplicate_key] = dict(quantization)
    if not is_hub_name(str(document.get(NAME_OR_PATH_KEY, ""))):
        document.pop(NAME_OR_PATH_KEY, None)  # a path of whoever saved the source
    document |= {"dtype": dtype, "torch_dtype": dtype}
    nested_config = document.get("text_config")
    if isinstance(nested_config, Mapping):
        dtype_keys = {key: dtype for key in ("dtype", "torch_dtype") if key in nested_config}
        document["text_config"] = {**nested_config, **dtype_keys}
    if quantization is not None:
        document["quantization_config"] = dict(quantization)
    return json_bytes(document)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return indented UTF-8 JSON with a final newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
