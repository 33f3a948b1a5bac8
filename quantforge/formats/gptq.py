"""GPTQ files: 2, 3, 4 or 8 bits, one width and group size in the whole model.

How one linear is stored is in `quantforge.formats.gptq_layouts`.

We write groups of consecutive columns and say ``desc_act: false``: vLLM refuses anything else.
Files with scattered groups (``desc_act: true``) are read, and keep their ``g_idx`` where one layout of
GPTQ is restated in the other. Layers that stay as they were are written in both spellings
that exist: ``dynamic`` (vLLM, gptqmodel) and ``modules_in_block_to_quantize`` (transformers with
optimum, which ignores the former).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge import __version__
from quantforge.errors import InputError, RefusedError
from quantforge.formats import About, Fit, ModuleLayout, Verdict, gptq_layout
from quantforge.formats.configuration import (
    config_json,
    half_dtype,
    json_bytes,
    kept_linears,
    quantization_config,
    quantized_modules,
    within_block,
)
from quantforge.formats.contradictions import agree, agree_on_head, denied, not_excepted, one_name
from quantforge.formats.engines import (
    GROUPS,
    MARLIN,
    MODELOPT,
    TURBOMIND,
    Engine,
    bits_in,
    by_engine,
    symmetric,
)
from quantforge.formats.fits import outside_blocks
from quantforge.formats.gptq_layouts import (
    LEAST_ZERO,
    check,
    layout_of,
    native,
    pack,
    stored,
    unpack,
)
from quantforge.formats.kept_experts import kept_mixtures
from quantforge.formats.module_names import matches
from quantforge.formats.one_group import differing_groups, stated_size
from quantforge.grids import ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from quantforge.plans import TensorPlan

__all__ = ["KEY", "LEAST_ZERO", "OWN_BITS", "check", "check_model", "claims", "default_scheme",
           "layouts", "native", "pack", "scale_type", "side_files", "stored", "unpack"]  # fmt: skip

KEY = "gptq"
_SERVING = Engine(
    refuses=(bits_in(4, 8), GROUPS, symmetric("no kernel for zero points")), notes=MARLIN
)
ENGINES = by_engine(
    transformers=Engine(note="through gptqmodel and optimum"),
    vllm=_SERVING,
    sglang=_SERVING,
    tensorrt_llm=MODELOPT,
    lmdeploy=replace(TURBOMIND, refuses=(*TURBOMIND.refuses, symmetric("no zero points"))),
    mlx=Engine(never="refuses files with g_idx"),
)
ABOUT = About(
    packages={"transformers": "gptqmodel optimum"},
    specimens=("int4:g128:sym:f16", "int4:g128:asym:f16", "int8:g128:sym:f16"),
    group_index=".g_idx",
    one_group=True,
    tunable=True,
    engines=ENGINES,
)
OWN_BITS = 4


def scale_type(model_dtype: str) -> ScaleType:
    """Return float16, whatever the model is."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return groups of 128 without zero points, which every engine of the format loads."""
    return f"int{bits}:g128:sym"


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Fit:
    """Judge a model: one width and one group size; no head or embedding. Symmetric and asymmetric layers mix."""
    if refusal := outside_blocks(layers):
        return refusal
    schemes = {
        module: (native(layer.weight, shape), shape) for module, (layer, shape) in layers.items()
    }
    widths = {scheme.bits: module for module, (scheme, _) in schemes.items()}
    if len(widths) > 1:
        shown = " and ".join(f"{bits} ({module})" for bits, module in sorted(widths.items()))
        reason = f"one width for the whole model, not {shown} bits (transformers reads no other)"
        return Fit(Verdict.IMPOSSIBLE, reason, "--format compressed-tensors, which mixes schemes")
    return differing_groups(schemes) or Fit(Verdict.EXACT)


def side_files(
    plan: Plan, config: Mapping[str, Any], *, checkpoint_format: str = KEY
) -> dict[str, bytes]:
    """Return ``config.json`` and ``quantize_config.json``, which is its ``quantization_config`` alone."""
    modules = quantized_modules(plan, ".qweight")
    schemes = [native(t.scheme.weight, t.matrix) for t in modules.values() if t.scheme is not None]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    quantization: dict[str, Any] = {
        "quant_method": KEY,
        "bits": schemes[0].bits,
        "group_size": stated_size(schemes[0]),
        "desc_act": any(tensor.scattered for tensor in modules.values()),
        "sym": all(scheme.symmetric for scheme in schemes),
        "lm_head": False,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"quantforge:{__version__}"]},
    }
    quantization |= _skipping(plan, config, modules)
    return {
        "config.json": config_json(config, half_dtype(plan, config), quantization),
        "quantize_config.json": json_bytes(quantization),
    }


def _skipping(
    plan: Plan, config: Mapping[str, Any], modules: Mapping[str, TensorPlan]
) -> dict[str, Any]:
    """Return both spellings of the linears inside the blocks that stay as they were.

    Names relative to the block serve when every block skips the same ones; otherwise full names do,
    because readers only ask whether a module's name ends with (optimum) or contains (vLLM) an
    entry.
    """
    kept = [name for name in kept_linears(plan) if within_block(name)]
    whole = kept_mixtures(plan, config, modules)
    if not kept and not whole:
        return {}
    relative = list(dict.fromkeys(map(within_block, modules)))
    mixed = any(within_block(name) in relative for name in kept)
    return {
        # The model's own name may have a prefix that the checkpoint's has not (gpt2).
        "dynamic": {rf"-:(.*\.)?{re.escape(name)}$": {} for name in (*kept, *whole)},
        "modules_in_block_to_quantize": [list(modules) if mixed else relative],
    }


def claims(config: Mapping[str, Any], *, checkpoint_format: str = KEY) -> bool:
    """Return whether ``quant_method`` is gptq, in this checkpoint format."""
    found = quantization_config(config)
    return found.get("quant_method") == "gptq" and gptq_layout(found) == checkpoint_format


def layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears that have a ``qweight``, each as ``dynamic`` rules override it.

    Raises:
        InputError: a width that is not read, or headers that disagree with the configuration.
    """
    found = quantization_config(config)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    agree(found, "pack_dtype", "int32", "codes are packed into int32")
    agree_on_head(found, "lm_head", names)
    one_name(found, "method", "quant_method")
    not_excepted(found, "modules_to_not_convert", names)
    return [layout_of(name, {**found, **override(found, name)}, tensors) for name in names]


def override(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the values of the first rule of ``dynamic`` whose pattern matches a packed module, {} without one.

    Raises:
        InputError: it says that the module is not packed, or ``dynamic`` is no table.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(v, Mapping) for v in rules.values()):
        raise InputError("config.json: dynamic is no table of rules by pattern")
    for pattern, values in rules.items():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            if pattern.startswith("-:"):
                raise denied(f"dynamic excepts {pattern!r}", f"{module} is packed", module)
            return dict(values)
    return {}
