"""``config.json`` of an artifact: the source's, its type stated twice, the quantization added.

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
from quantforge.architectures.routers import experts_of, is_stack
from quantforge.architectures.towers import BLOCK
from quantforge.errors import InputError
from quantforge.files.hub import is_hub_name
from quantforge.files.safetensors import TORCH_NAMES
from quantforge.formats.auto_round import translated
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan

FLOATS = ("F16", "BF16", "F32")
NUMBERS = (*FLOATS, "F64")  # types of a source that may be restated in one of `FLOATS`
DECLARING = ("quantization_config", "quantization", "compression_config")
LOADED_FROM = "_name_or_path"
# Last parts of the names of two-dimensional tensors that are looked up, not multiplied.
EMBEDDINGS = {"embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"}
_MIXTURE = re.compile(r"(.*\bexperts)\.")
# vLLM decides on a mixture by these parts of its first expert, however files hold it; which three differs by family.
_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``quantization_config`` of a configuration, empty when there is none; AutoRound's translated."""
    found = config.get("quantization_config")
    return translated(found) if isinstance(found, Mapping) else {}


def declarations(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what declares a quantization in a configuration and in those nested in it: dotted path and value."""
    for key, value in config.items():
        path = f"{within}.{key}" if within else key
        if key in DECLARING and (not within or key != "quantization"):
            yield path, value
        elif key.endswith("_config") and isinstance(value, Mapping):
            yield from declarations(value, path)


def without_declarations(config: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return a configuration without what `declarations` yields."""
    return {
        key: without_declarations(value, key)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if key not in DECLARING or (within and key == "quantization")
    }


def listed(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings that a configuration has under ``key``, empty where there is none.

    Raises:
        InputError: something else is there.
    """
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InputError(
            f"config.json: {key} = {str(found)[:60]} is no list of names",
            "quantization_config is damaged: get the model again",
        )
    return found


def model_dtype(plan: Plan, config: Mapping[str, Any]) -> str:
    """Return the type that the source computes in, e.g. ``bfloat16``."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if isinstance(stated, str) and stated != "auto":
        return stated.removeprefix("torch.")
    counted = Counter(tensor.dtype for tensor in plan.tensors if tensor.dtype in FLOATS)
    return TORCH_NAMES[counted.most_common(1)[0][0]] if counted else "float32"


def half_dtype(plan: Plan, config: Mapping[str, Any]) -> str:
    """Return ``float16``, which kernels want, or the source's type where float16 overflows."""
    architecture = architecture_of(text_config(config))
    safe = architecture is None or architecture.float16
    return "float16" if safe else model_dtype(plan, config)


def head_of(config: Mapping[str, Any]) -> str:
    """Return the module name of the output projection."""
    architecture = architecture_of(text_config(config))
    return "lm_head" if architecture is None else architecture.head


def declared_shape(config: Mapping[str, Any], module: str) -> tuple[int, int] | None:
    """Return ``(out_features, in_features)`` of a linear of a block, None where no architecture declares it."""
    text = text_config(config)
    architecture = architecture_of(config) or architecture_of(text)
    if architecture is None:
        return None
    local = within_block(module)
    dimensions = architecture.dimensions(text)
    index = int(module.removesuffix(f".{local}").rpartition(".")[2]) if local else dimensions.layers
    if index >= dimensions.layers:
        return None
    kind = architecture.layers(text, dimensions)[index]
    for item in kind.parameters:
        weight = (item.stored or item.name).removesuffix(".weight")
        if weight == local and item.name.removesuffix(".weight") in kind.linears:
            first, second = dimensions.shape(item.shape)
            return (second, first) if architecture.transposed else (first, second)
    return None


def quantized_modules(plan: Plan, suffix: str) -> dict[str, TensorPlan]:
    """Return the plan of each module that is written with a tensor named ``suffix``."""
    return {
        output.name.removesuffix(suffix): tensor
        for tensor in plan.quantized()
        for output in tensor.outputs
        if output.name.endswith(suffix)
    }


def kept_linears(plan: Plan) -> list[str]:
    """Return the sorted full names of the linear modules that stay as they were."""
    return sorted(
        output.name.removesuffix(".weight")
        for tensor in plan.tensors
        if tensor.action is not Action.DROP
        for output in tensor.outputs
        if output.name.endswith(".weight")
        and len(output.shape) == 2
        and output.name.split(".")[-2] not in EMBEDDINGS
    )


def within_block(module: str) -> str:
    """Return the name of a module relative to its block, "" for one outside of the blocks."""
    parts = module.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbered[0] + 1 :]) if numbered else ""


def spellings(module: str, config: Mapping[str, Any]) -> list[str]:
    """Return the names by which engines may look for a module: as stored, and in a multimodal model as loaded.

    Files of multimodal models keep the names of their first release (``language_model.model.layers``);
    transformers renames while loading (``model.language_model.layers``) and matches configurations
    afterwards. vLLM maps the loaded names to its own. ``Linear`` is a class and stays what it is.
    """
    if "text_config" not in config or module == "Linear" or module.startswith("model."):
        return [module]
    for stored, loaded in (
        ("language_model.model.", "model.language_model."),
        ("language_model.", ""),
    ):
        if module.startswith(stored):
            return [module, loaded + module.removeprefix(stored)]
    return [module] if module == head_of(config) else [module, f"model.{module}"]


def skipped(
    plan: Plan, config: Mapping[str, Any], quantized: Mapping[str, TensorPlan]
) -> list[str]:
    """Return the full names of all linears that stay as they are.

    A tied head is one of them, although no tensor has its name. Where the running model has another name for one,
    as the routers of some families, it is listed under both; of draft heads vLLM holds all in ``model``.
    """
    head = head_of(config)
    names = {*kept_linears(plan), head} - quantized.keys()
    names |= {f"model.{name}" for name in names} if is_draft(config) else set()
    family = architecture_of(config) or architecture_of(text_config(config))
    for stored, running in (family.renamed if family else {}).items():
        found = {name for name in names if name.endswith(f".{stored}")}
        names |= {name.removesuffix(stored) + running for name in found}
    taken = {name for module in quantized for name in targeted(module, plan, config)}
    kept = {name for module in names for name in spellings(module, config)}
    return sorted(kept.union(plan.running.kept if plan.running else ()) - taken)


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
        for item in tensor.outputs
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


def targeted(module: str, plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """Return the names by which engines may look for a quantized module; see `spellings`."""
    running = plan.running.modules.get(module, module) if plan.running else module
    return list(dict.fromkeys([*spellings(module, config), running]))


def config_json(
    config: Mapping[str, Any],
    dtype: str,
    quantization: Mapping[str, Any] | None = None,
    *,
    twin: str = "",
) -> bytes:
    """Return the bytes of ``config.json``, which declares the quantization once, and under ``twin`` if that is named.

    The keys keep the source's order. Both spellings of the type are written, because transformers 5
    reads ``dtype`` and older engines read ``torch_dtype``.
    """
    written = without_declarations(config)
    if twin and quantization is not None:
        written[twin] = dict(quantization)
    if not is_hub_name(str(written.get(LOADED_FROM, ""))):
        written.pop(LOADED_FROM, None)  # a path of whoever saved the source
    written |= {"dtype": dtype, "torch_dtype": dtype}
    nested = written.get("text_config")
    if isinstance(nested, Mapping):
        stated = {key: dtype for key in ("dtype", "torch_dtype") if key in nested}
        written["text_config"] = {**nested, **stated}
    if quantization is not None:
        written["quantization_config"] = dict(quantization)
    return json_bytes(written)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return indented UTF-8 JSON with a final newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
