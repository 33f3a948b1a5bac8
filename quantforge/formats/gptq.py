"""GPTQ files: 2, 3, 4 or 8 bits, one bit width and group size for the whole model.

A linear ``P`` ``[N, K]``: everything is transposed; with ``b`` bits and groups of ``G`` columns:

=============  ====  ================  =========================================================
``P.qweight``  I32   ``[K*b/32, N]``   codes, one bit stream per output, running down the rows
``P.qzeros``   I32   ``[K/G, N*b/32]``  zero points, one bit stream per group
``P.scales``   F16   ``[K/G, N]``
``P.g_idx``    I32   ``[K]``           group of each column
=============  ====  ================  =========================================================

The value is ``(code - zero) * scale``; a symmetric grid has the zero point ``2^(b-1)`` everywhere.
The first layout (``checkpoint_format: gptq``, read by everything) stores ``zero - 1``. Readers
disagree about a stored ``2^b - 1``, some carry into the neighbouring field, so a zero point of 0 is
refused; `quantforge.formats.gptq_v2` stores zero points as they are.

We write groups of consecutive columns and say ``desc_act: false``: vLLM refuses anything else. Files with scattered
groups (``desc_act: true``) are read, and keep their ``g_idx`` where one layout of GPTQ is restated in the other. Layers
that stay as they were are written in both spellings that exist: ``dynamic`` (vLLM, gptqmodel) and
``modules_in_block_to_quantize`` (transformers with optimum, which ignores the former).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge import __version__
from quantforge.errors import Fault, InputError, RefusedError, join_with_or
from quantforge.formats import (
    Compatibility,
    FormatInfo,
    ModuleLayout,
    Verdict,
    gptq_checkpoint_format,
)
from quantforge.formats.configuration import (
    config_json,
    float16_or_model_dtype,
    json_bytes,
    name_within_block,
    quantization_config,
    quantized_modules,
    unquantized_expert_modules,
    unquantized_linears,
)
from quantforge.formats.convert import compare_schemes, convert
from quantforge.formats.engine_rules import (
    GROUPS_OR_ROW,
    MARLIN_RULES,
    MODELOPT,
    TURBOMIND,
    Engine,
    engine_table,
    require_bits,
    require_symmetric,
)
from quantforge.formats.patterns import config_pattern_matches
from quantforge.formats.read_checks import (
    apply_group_index,
    check_aliases_agree,
    check_config_value,
    check_head_declaration,
    check_not_in_skip_list,
    contradiction_error,
    expected_headers,
    matrix_shape,
    require_group_index,
    require_headers,
    require_valid_scales,
    require_whole_groups,
    scale_type_of,
    tensor_headers,
)
from quantforge.formats.refusal_reasons import (
    check_float16_scales,
    check_inside_blocks,
    check_single_group_size,
    check_weight_only_integers,
    check_whole_groups,
    config_group_size,
    require_possible,
)
from quantforge.grids import DEFAULT_GROUP_SIZE, PerGroup, PerTensor, Row, ScaleType, Zero
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.plans import TensorPlan

KEY = "gptq"
_VLLM_SUPPORT = Engine(
    layer_rules=(require_bits(4, 8), GROUPS_OR_ROW, require_symmetric("no kernel for zero points")),
    note_rules=MARLIN_RULES,
)
ENGINES = engine_table(
    transformers=Engine(note="through gptqmodel and optimum"),
    vllm=_VLLM_SUPPORT,
    sglang=_VLLM_SUPPORT,
    tensorrt_llm=MODELOPT,
    lmdeploy=replace(
        TURBOMIND, layer_rules=(*TURBOMIND.layer_rules, require_symmetric("no zero points"))
    ),
    mlx=Engine(unsupported_reason="refuses files with g_idx"),
)
INFO = FormatInfo(
    engine_packages={"transformers": "gptqmodel optimum"},
    example_schemes=("int4:g128:sym:f16", "int4:g128:asym:f16", "int8:g128:sym:f16"),
    group_index_suffix=".g_idx",
    single_group_size=True,
    scales_are_tunable=True,
    engines=ENGINES,
)
MIN_ZERO_POINT = 1
DEFAULT_BITS = 4
SUPPORTED_BITS = (2, 3, 4, 8)


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, whatever the model's dtype."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return symmetric integers in groups of the default size, which every engine of the format loads."""
    return f"int{bits}:g{DEFAULT_GROUP_SIZE}:sym"


def check_layer(
    layer: LayerScheme, shape: tuple[int, int], *, min_zero_point: int = MIN_ZERO_POINT
) -> Compatibility:
    """Check a weight: 2, 3, 4 or 8 bits, rows and columns that fill 32-bit words, float16 scales.

    ``min_zero_point``, here and below, is 1 in the first layout and 0 in gptq_v2.
    """
    scheme = layer.weight
    if refusal := check_weight_only_integers(layer):
        return refusal
    if scheme.bits not in SUPPORTED_BITS:
        wider = Scheme("int8", scheme.granularity, scheme.zero)
        return Compatibility(
            Verdict.IMPOSSIBLE, f"the layout holds {join_with_or(SUPPORTED_BITS)} bits", str(wider)
        )
    if any(size * scheme.bits % 32 for size in shape):
        reason = f"{shape[0]}x{shape[1]} codes of {scheme.bits} bits do not fill 32-bit words"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    stored = stored_scheme(scheme, shape)
    return (
        check_float16_scales(scheme)
        or check_whole_groups(scheme, shape)
        or compare_schemes(scheme, stored, shape, min_zero_point)
    )


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Check a model: one bit width and one group size; no quantized head or embedding."""
    if refusal := check_inside_blocks(layers):
        return refusal
    schemes = {
        module: (stored_scheme(layer.weight, shape), shape)
        for module, (layer, shape) in layers.items()
    }
    widths = {scheme.bits: module for module, (scheme, _) in schemes.items()}
    if len(widths) > 1:
        width_text = " and ".join(f"{bits} ({module})" for bits, module in sorted(widths.items()))
        reason = (
            f"one width for the whole model, not {width_text} bits (transformers reads no other)"
        )
        return Compatibility(
            Verdict.IMPOSSIBLE, reason, "--format compressed-tensors, which mixes schemes"
        )
    return check_single_group_size(schemes) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float16 scales; one scale per matrix becomes one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, ScaleType.F16)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    bits, groups = layer.weight.bits, stored_scheme(layer.weight, shape).groups(shape[1])
    return (
        StoredTensor(f"{module}.qweight", "I32", (shape[1] * bits // 32, shape[0])),
        StoredTensor(f"{module}.qzeros", "I32", (groups, shape[0] * bits // 32)),
        StoredTensor(f"{module}.scales", "F16", (groups, shape[0])),
        StoredTensor(f"{module}.g_idx", "I32", (shape[1],)),
    )


def pack(
    module: str, tensor: QuantizedTensor, *, min_zero_point: int = MIN_ZERO_POINT
) -> dict[str, Tensor]:
    """Pack codes, zero points (minus ``min_zero_point``), scales and the group index of each column."""
    import torch

    from quantforge.packers.bits import pack_rows, to_unsigned_codes

    scheme, columns = stored_scheme(tensor.scheme, tensor.shape), tensor.shape[1]
    require_possible(module, check_layer(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme, min_zero_point)
    scales = tensor.parameters["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if not scheme.symmetric:
        zeros = tensor.parameters["zeros"].T.contiguous()
    index = torch.arange(columns, dtype=torch.int32) // scheme.group_size(columns)
    return {
        f"{module}.qweight": pack_rows(
            to_unsigned_codes(tensor.codes, scheme.bits), scheme.bits
        ).T.contiguous(),
        f"{module}.qzeros": pack_rows(zeros - min_zero_point, scheme.bits),
        f"{module}.scales": scales,
        f"{module}.g_idx": index,
    }


def unpack(
    layout: ModuleLayout, tensors: Mapping[str, Tensor], *, min_zero_point: int = MIN_ZERO_POINT
) -> QuantizedTensor:
    """Unpack codes and parameters; act-order groups are resolved by `apply_group_index`."""
    from quantforge.packers.bits import to_signed_codes, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require_headers(tensor_headers(tensors), expected_headers(layout, packed_tensors))
    codes = unpack_rows(tensors[f"{module}.qweight"].T.contiguous(), scheme.bits, shape[1])
    zeros = unpack_rows(tensors[f"{module}.qzeros"], scheme.bits, shape[0])
    _check_zero_points(f"{module}.qzeros", zeros, scheme, min_zero_point)
    parameters = {"scales": tensors[f"{module}.scales"].T.contiguous()}
    if scheme.symmetric:
        codes = to_signed_codes(codes, scheme.bits)
    else:
        parameters["zeros"] = (zeros + min_zero_point).T.contiguous()
    tensor = require_valid_scales(Quantized(codes, parameters, scheme), f"{module}.scales")
    index = tensors.get(f"{module}.g_idx")
    if index is None:
        return tensor
    return apply_group_index(tensor, index, f"{module}.g_idx", act_order=layout.act_order)


def _check_zero_points(name: str, zeros: Tensor, scheme: Scheme, min_zero_point: int) -> None:
    middle = (1 << (scheme.bits - 1)) - min_zero_point
    if scheme.symmetric and bool((zeros != middle).any()):
        raise InputError(
            f"{name}: zero points differ from {middle}, although config.json says sym = true",
            "engines disagree about such a file; set sym to false if it is asymmetric",
            tensor=name,
            fault=Fault.ZERO,
        )
    if bool((zeros.int() + min_zero_point >= 1 << scheme.bits).any()):
        raise InputError(
            f"{name}: a stored zero point of {(1 << scheme.bits) - 1}, which readers take for "
            f"{1 << scheme.bits} or for 0",
            "the file was written with a zero point of 0, which its layout cannot hold",
            tensor=name,
            fault=Fault.ZERO,
        )


def side_files(
    plan: Plan, config: Mapping[str, Any], *, checkpoint_format: str = KEY
) -> dict[str, bytes]:
    """Return ``config.json``, and ``quantize_config.json`` with the quantization alone."""
    modules = quantized_modules(plan, ".qweight")
    schemes = [
        stored_scheme(t.scheme.weight, t.matrix) for t in modules.values() if t.scheme is not None
    ]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    quantization: dict[str, Any] = {
        "quant_method": KEY,
        "bits": schemes[0].bits,
        "group_size": config_group_size(schemes[0]),
        "desc_act": any(tensor.has_group_index for tensor in modules.values()),
        "sym": all(scheme.symmetric for scheme in schemes),
        "lm_head": False,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"quantforge:{__version__}"]},
    }
    quantization |= _skip_rules(plan, config, modules)
    return {
        "config.json": config_json(config, float16_or_model_dtype(plan, config), quantization),
        "quantize_config.json": json_bytes(quantization),
    }


def _skip_rules(
    plan: Plan, config: Mapping[str, Any], modules: Mapping[str, TensorPlan]
) -> dict[str, Any]:
    """Return both forms in which engines look up the unquantized linears of the blocks.

    Names relative to the block serve when every block skips the same ones; otherwise full names do,
    because readers only ask whether a module's name ends with (optimum) or contains (vLLM) an
    entry.
    """
    skipped_linears = [name for name in unquantized_linears(plan) if name_within_block(name)]
    skipped_experts = unquantized_expert_modules(plan, config, modules)
    if not skipped_linears and not skipped_experts:
        return {}
    relative = list(dict.fromkeys(map(name_within_block, modules)))
    mixed = any(name_within_block(name) in relative for name in skipped_linears)
    return {
        # The model's own name may have a prefix that the checkpoint's has not (gpt2).
        "dynamic": {
            rf"-:(.*\.)?{re.escape(name)}$": {} for name in (*skipped_linears, *skipped_experts)
        },
        "modules_in_block_to_quantize": [list(modules) if mixed else relative],
    }


def is_declared(config: Mapping[str, Any], *, checkpoint_format: str = KEY) -> bool:
    """Return whether ``quant_method`` is gptq, with this checkpoint format."""
    quantization = quantization_config(config)
    return (
        quantization.get("quant_method") == "gptq"
        and gptq_checkpoint_format(quantization) == checkpoint_format
    )


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears that have a ``qweight``, with their ``dynamic`` overrides applied.

    Raises:
        InputError: a width that is not read, or headers that disagree with the configuration.
    """
    quantization = quantization_config(config)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    check_config_value(quantization, "pack_dtype", "int32", "codes are packed into int32")
    check_head_declaration(quantization, "lm_head", names)
    check_aliases_agree(quantization, "method", "quant_method")
    check_not_in_skip_list(quantization, "modules_to_not_convert", names)
    return [
        _read_layout(name, {**quantization, **dynamic_override(quantization, name)}, tensors)
        for name in names
    ]


def _read_layout(
    module: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    """Return the layout of one module from its headers and the configuration.

    Raises:
        InputError: a width that is not read, or headers that disagree with the configuration.
    """
    bits, size = config.get("bits"), config.get("group_size", -1)
    if bits not in SUPPORTED_BITS or not isinstance(size, int):
        raise InputError(
            f"{module}: config.json says GPTQ with bits = {bits!r}, group_size = {size!r}",
            f"{join_with_or(SUPPORTED_BITS)} bits and a number are read",
            tensor=module,
        )
    scale = scale_type_of(tensors, f"{module}.scales")
    packed_rows, rows = matrix_shape(tensors, f"{module}.qweight")
    columns = packed_rows * 32 // bits
    granularity = PerGroup(size) if size > 0 else Row()
    zero = Zero.NONE if config.get("sym", True) else Zero.INT
    scheme = Scheme(f"int{bits}", granularity, zero, scale)
    require_whole_groups(module, columns, scheme.group_size(columns))
    names = [tensor.name for tensor in packed_tensors(module, LayerScheme(scheme), (rows, columns))]
    present_names = tuple(name for name in names if name in tensors or not name.endswith("g_idx"))
    act_order = config.get("desc_act")
    if not isinstance(act_order, bool | None):
        raise InputError(f"{module}: desc_act = {act_order!r}", "true or false", tensor=module)
    layout = ModuleLayout(module, LayerScheme(scheme), (rows, columns), present_names, act_order)
    require_headers(tensors, expected_headers(layout, packed_tensors))
    require_group_index(act_order, f"{module}.g_idx", scheme.groups(columns), present_names)
    return layout


def dynamic_override(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the values of the first ``dynamic`` rule that matches a packed module, {} if none does.

    Raises:
        InputError: it says that the module is not packed, or ``dynamic`` is no table.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(v, Mapping) for v in rules.values()):
        raise InputError("dynamic is no table of rules by pattern", subject="config.json")
    for pattern, values in rules.items():
        if config_pattern_matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            if pattern.startswith("-:"):
                raise contradiction_error(
                    f"dynamic excepts {pattern!r}", f"{module} is packed", module
                )
            return dict(values)
    return {}
