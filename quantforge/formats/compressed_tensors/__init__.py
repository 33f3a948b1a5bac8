"""compressed-tensors: integers, floats and block scales, with or without quantized inputs, mixed in one model.

`linears` has how one module is stored; here is what holds the modules of a model together. ``config_groups`` says which
modules have which scheme (`groups`). One scheme in the whole model targets the class ``Linear`` and, by name, a
quantized head; every exception is in ``ignore``. Several schemes target module names, and are ``mixed-precision`` where
their formats differ.

In this folder:

    groups   Config groups of compressed-tensors: which modules have which scheme and format
    linears  Pack and unpack one linear ``P`` ``[out, in]`` in each format of compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import architecture_of
from quantforge.architectures.configuration import untie_config
from quantforge.errors import InputError
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict, kv_scales
from quantforge.formats.compressed_tensors import linears
from quantforge.formats.compressed_tensors.groups import (
    DAMAGED_HINT,
    FLOAT_QUANTIZED,
    INT_QUANTIZED,
    MIXED_PRECISION,
    MXFP8_QUANTIZED,
    NAIVE_QUANTIZED,
    format_name,
    group_of_module,
    input_arguments,
    parse_group,
    weight_arguments,
)
from quantforge.formats.compressed_tensors.linears import transposed_scheme, untransposed_scheme
from quantforge.formats.configuration import (
    config_json,
    head_module,
    model_dtype,
    quantization_config,
    quantized_modules,
    skip_list_with_stacked_experts,
    target_names,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import (
    GROUPS_OR_ROW,
    MARLIN_RULES,
    NOT_RUN,
    Engine,
    Shape,
    engine_table,
    for_integers_only,
    message_at_bits,
    message_for_grids,
    require_bits,
    require_group_sizes,
    require_symmetric,
)
from quantforge.formats.engine_verdicts import blocks_read_weights
from quantforge.formats.read_checks import contradiction_error, require_scales
from quantforge.formats.refusal_reasons import check_whole_groups, require_possible
from quantforge.grids import DEFAULT_GROUP_SIZE, PerGroup, PerTensor, Row, ScaleType, Zero
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "compressed-tensors"


def _no_fp8_groups(scheme: Scheme, _: Shape) -> str:
    grouped = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerGroup)
    return "fp8 per tensor, row or 128x128 tile only" if grouped else ""


def _fp8_rows_or_tiles(scheme: Scheme, _: Shape) -> str:
    is_per_tensor = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerTensor)
    return "fp8 per row or tile only" if is_per_tensor else ""


def _four_by_four(layer: LayerScheme) -> str:
    bare = layer.weight.grid == "nvfp4" and layer.input is None
    return "nvfp4 with nvfp4 inputs only (NVFP4_W4A4)" if bare else ""


def _integers_only(scheme: Scheme, _: Shape) -> str:
    return "" if scheme.integer else "integers only of this format"


def _no_inputs(layer: LayerScheme) -> str:
    return "" if layer.input is None else "no quantized inputs of this format"


def _unsupported_expert_scheme(layer: LayerScheme) -> str:
    """Return why transformers 5.23 does not load experts of this scheme correctly (seen with mixtral, qwen3_moe)."""
    is_supported = layer.weight.integer or layer.weight.grid in {"fp8_e4m3", "mxfp4"}
    inputs = layer.input is None or layer.weight.grid == "fp8_e4m3"
    return "" if is_supported and inputs else "its loader cannot join packed experts of this scheme"


_FLOAT_NOTES = (
    message_for_grids(
        ("fp8_e4m3",),
        "8-bit floats are fast from compute capability 8.9 on; a CPU has kernels with inputs by token (or tiles, "
        "with AMX) only",
    ),
    message_for_grids(("nvfp4", "mxfp4", "mxfp8"), "kernels run on a GPU only"),
)
_VLLM_SUPPORT = Engine(
    layer_rules=(*for_integers_only(require_bits(4, 8), GROUPS_OR_ROW), _no_fp8_groups),
    note_rules=(*for_integers_only(*MARLIN_RULES), *_FLOAT_NOTES),
)
_PACKED_ZERO_POINTS_REASON = (
    "compressed-tensors 0.18 to 0.20 cannot load packed zero points: load with "
    "CompressedTensorsConfig(dequantize=True)"
)
_UNUSUAL_BITS_NOTES = tuple(
    message_at_bits(width, "needs compressed-tensors 0.18 or later") for width in (3, 5, 6, 7)
)

# Seen with transformers 5.23 and compressed-tensors 0.20.
_CONV1D_REASON = (
    "its Conv1D layers take no packed weights and would stay random; quantforge eval loads them, and --for "
    "transformers stores symmetric integers in groups, of one scheme, for it to decode on loading"
)
_MIXED_EXPERTS_REASON = (
    "its loader joins the matrices of experts into one tensor, so that all of them need one scheme"
)
_UNQUANTIZED_EXPERTS_REASON = (
    "beside packed layers its loader joins packed experts alone, and these stay as they are"
)
ENGINES = engine_table(
    transformers=Engine(
        layer_rules=(require_symmetric(_PACKED_ZERO_POINTS_REASON),),
        note_rules=for_integers_only(*_UNUSUAL_BITS_NOTES),
        transposed_reason=_CONV1D_REASON,
        unquantized_experts_reason=_UNQUANTIZED_EXPERTS_REASON,
        expert_rule=_unsupported_expert_scheme,
        mixed_experts_reason=_MIXED_EXPERTS_REASON,
        loads_unstacked_experts=True,
        can_decode=True,
    ),
    vllm=replace(_VLLM_SUPPORT, loads_unstacked_experts=True),
    sglang=_VLLM_SUPPORT,
    tensorrt_llm=Engine(
        layer_rules=(
            lambda scheme, _: "reads no integers of this format" if scheme.integer else "",
            _no_fp8_groups,
            _fp8_rows_or_tiles,
            message_for_grids(("mxfp8",), "no kernel for mxfp8"),
        ),
        input_rule=_four_by_four,
        note=NOT_RUN,
    ),
    lmdeploy=Engine(
        layer_rules=(
            _integers_only,
            require_bits(4),
            require_group_sizes(32, 128, row=False),
            require_symmetric("no zero points"),
        ),
        input_rule=_no_inputs,
        mixed_schemes_reason="it reads one group of the configuration, for all layers",
        note=NOT_RUN,
    ),
    mlx=Engine(
        unsupported_reason="reads this format of a few model families only, others not: take --for mlx"
    ),
)


INFO = FormatInfo(
    scales_are_tunable=True,
    engine_packages={"transformers": "compressed-tensors"},
    example_schemes=(
        "int4:g128:sym:bf16",
        "int4:g128:asym:bf16",
        "int8:row:sym:bf16",
        "W8A8",
        "fp8:row",
        "fp8:tensor",
        "FP8_BLOCK",
        "nvfp4",
        "mxfp4",
        "mxfp8",
    ),
    fused_scale_suffixes=(".weight_global_scale",),
    holds_kv_scales=True,
    group_index_suffix=".weight_g_idx",
    engines=ENGINES,
    row_sliced_suffixes=(".weight", ".weight_packed", ".weight_scale", ".weight_zero_point"),
    used_for_releases=True,
    stores_transposed=True,
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
unpack = linears.unpack
# Formats whose codes are stored as they are
UNPACKED_FORMATS = (INT_QUANTIZED, FLOAT_QUANTIZED, NAIVE_QUANTIZED, MXFP8_QUANTIZED)
# Says nothing of how a module is stored; engines infer it from the scheme
UNSPECIFIC_FORMATS = (MIXED_PRECISION,)
# How inputs may be quantized beside a weight of each grid.
SUPPORTED_INPUTS: Mapping[str, tuple[Activation, ...]] = {
    "int8": (Activation("int8", "token"), Activation("int8", "tensor", dynamic=False)),
    "fp8_e4m3": (
        Activation("fp8_e4m3", "token"),
        Activation("fp8_e4m3", "tensor"),
        Activation("fp8_e4m3", "tensor", dynamic=False),
        Activation("fp8_e4m3", "g128"),
    ),
    "nvfp4": (Activation("nvfp4", "g16", dynamic=False),),
    "mxfp4": (Activation("mxfp4", "g32"),),
    "mxfp8": (Activation("mxfp8", "g32"),),
}


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return the model's dtype, to which engines cast the scales of integers."""
    return ScaleType(model_dtype.lower())


def default_scheme(bits: int) -> str:
    """Return symmetric integers in groups of the default size, which every engine of the format loads."""
    return f"int{bits}:g{DEFAULT_GROUP_SIZE}:sym"


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: integers in groups that divide the columns, e4m3, block scales; see `SUPPORTED_INPUTS`."""
    scheme = layer.weight
    if format_name(layer) is None or scheme.zero is Zero.MIN:
        nearest = default_scheme(4) if scheme.weight_bits < 8 else "fp8:row:sym"
        return Compatibility(
            Verdict.IMPOSSIBLE, f"{scheme.grid}:{scheme.zero} is no number of this format", nearest
        )
    if layer.input is not None:
        if layer.input not in SUPPORTED_INPUTS.get(scheme.grid, ()):
            return Compatibility(
                Verdict.IMPOSSIBLE, f"no {layer.input} inputs beside {scheme.grid}", str(scheme)
            )
        if scheme.integer and (isinstance(scheme.granularity, PerGroup) or not scheme.symmetric):
            return Compatibility(
                Verdict.IMPOSSIBLE, "with 8-bit inputs, weights have one scale per row", "W8A8"
            )
    return check_whole_groups(scheme, shape) or Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Return EXACT: schemes can be mixed freely."""
    del layers
    return Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with its scale type; for integers, one scale per matrix becomes one per row."""
    del shape
    if not scheme.integer:
        return scheme.with_scale(ScaleType.F32)
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, scheme.scale or ScaleType.F16)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    return linears.packed_tensors(
        module, LayerScheme(stored_scheme(layer.weight, shape), layer.input), shape
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes and parameters into the tensors that `packed_tensors` describes."""
    scheme = stored_scheme(tensor.scheme, tensor.shape)
    require_possible(module, check_layer(LayerScheme(scheme, tensor.input), tensor.shape))
    return linears.pack(module, convert(tensor, scheme))


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with one config group per scheme, in the order of the plan."""
    modules = quantized_modules(plan, ".weight_scale")
    targets: dict[LayerScheme, list[str]] = {}
    for module, tensor in modules.items():
        if tensor.scheme is not None:
            weight = stored_scheme(tensor.scheme.weight, tensor.matrix)
            layer = replace(
                tensor.scheme,
                weight=transposed_scheme(weight) if tensor.codes_transposed else weight,
            )
            targets.setdefault(layer, []).append(module)
    if len(targets) == 1 and not any("embed" in module for module in modules):
        # A head by name too: its module in SGLang is not a Linear, and one that no target names is read as unquantized.
        head_modules = [module for module in modules if module == head_module(config)]
        targets = {layer: ["Linear", *head_modules] for layer in targets}
    formats = list(dict.fromkeys(format_name(layer) for layer in targets))
    quantization: dict[str, Any] = {
        "quant_method": KEY,
        "format": MIXED_PRECISION if len(formats) > 1 else formats[0],
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": [
                    name for module in names for name in target_names(module, plan, config)
                ],
                "weights": weight_arguments(layer.weight),
                "input_activations": input_arguments(layer.input),
                "output_activations": None,
                "format": format_name(layer),
            }
            for index, (layer, names) in enumerate(targets.items())
        },
        "ignore": skip_list_with_stacked_experts(plan, config, modules),
        "kv_cache_scheme": kv_scales.kv_cache_scheme(
            item for tensor in plan.tensors for item in tensor.outputs
        ),
    }
    reads = blocks_read_weights(plan.model_type, str(config.get("model_type")))
    if len(targets) == 1 and (reads or any(tensor.codes_transposed for tensor in modules.values())):
        quantization["dequantize"] = True  # to transformers: decode while loading
    dtype = model_dtype(plan, config)
    if head_module(config) in modules and config.get("tie_word_embeddings"):
        config = untie_config(config)  # a relaid head, whatever its source says
    return {"config.json": config_json(config, dtype, quantization)}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` is compressed-tensors."""
    return quantization_config(config).get("quant_method") == KEY


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the quantized linears, each with the scheme of the config group that targets it.

    Raises:
        InputError: another format of the family, a module without a group or without scales, headers that
        disagree with the group, or weights that mean something only together with a transform of their inputs.
    """
    quantization = quantization_config(config)
    if transform := quantization.get("transform_config"):
        raise InputError(
            f"transform_config {str(transform)[:60]}: the inputs of its weights are transformed as well",
            "quantize the model that this one was made from",
            subject="config.json",
        )
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        raise InputError(
            "compressed-tensors without config_groups", DAMAGED_HINT, subject="config.json"
        )
    parsed_groups = [parse_group(group, quantization) for group in groups.values()]
    require_scales(tensors, "_scale")
    ends = (".weight_packed", ".weight_scale")
    names = [name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)]
    family = architecture_of(config)
    result = []
    for name in dict.fromkeys(names):
        group_of_layer = group_of_module(name, parsed_groups)
        packed = f"{name}{linears.PACKED_SUFFIX}" in tensors
        if (
            packed != (group_of_layer.kind not in UNPACKED_FORMATS)
            and group_of_layer.kind not in UNSPECIFIC_FORMATS
        ):
            packing = "packed" if packed else "not packed"
            raise contradiction_error(
                f"the format of its group is {group_of_layer.kind!r}", f"{name} is {packing}", name
            )
        transposed = (
            untransposed_scheme(group_of_layer.layer.weight)
            if family and family.transposed
            else None
        )
        if transposed is not None:
            result.append(linears.read_transposed_layout(name, transposed, tensors))
            continue
        result.append(
            linears.read_layout(
                name, group_of_layer.layer, tensors, act_order=group_of_layer.act_order
            )
        )
    return result
