"""GPTQ files: 2, 3, 4 or 8 bits, one width and group size in the whole model.

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
from quantforge.errors import Fault, InputError, RefusedError, either
from quantforge.formats import (
    Compatibility,
    FormatInfo,
    ModuleLayout,
    Verdict,
    gptq_checkpoint_format,
)
from quantforge.formats.configuration import (
    config_json,
    half_dtype,
    json_bytes,
    kept_linears,
    kept_mixtures,
    quantization_config,
    quantized_modules,
    within_block,
)
from quantforge.formats.convert import convert, fit_of_schemes
from quantforge.formats.engine_rules import (
    GROUPS,
    MARLIN,
    MODELOPT,
    TURBOMIND,
    Engine,
    bits_in,
    by_engine,
    symmetric,
)
from quantforge.formats.patterns import matches_module
from quantforge.formats.read_checks import (
    agree,
    agree_on_head,
    announced,
    by_group_index,
    denied,
    described,
    has_group_index,
    matrix,
    not_excepted,
    one_name,
    require,
    scale_of,
    sound,
    whole_groups,
)
from quantforge.formats.refusal_reasons import (
    differing_groups,
    float16_scales,
    grouped,
    integers,
    outside_blocks,
    possible,
    stated_size,
)
from quantforge.grids import PerGroup, PerTensor, Row, ScaleType, Zero
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.plans import TensorPlan

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
WIDTHS = (2, 3, 4, 8)


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, whatever the model is."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return groups of 128 without zero points, which every engine of the format loads."""
    return f"int{bits}:g128:sym"


def check_layer(
    layer: LayerScheme, shape: tuple[int, int], *, min_zero_point: int = MIN_ZERO_POINT
) -> Compatibility:
    """Judge a weight: 2, 3, 4 and 8 bits; whole words along both dimensions; float16 scales.

    ``min_zero_point``, here and below, is 1 in the first layout and 0 in gptq_v2.
    """
    scheme = layer.weight
    if refusal := integers(layer):
        return refusal
    if scheme.bits not in WIDTHS:
        wider = Scheme("int8", scheme.granularity, scheme.zero)
        return Compatibility(
            Verdict.IMPOSSIBLE, f"the layout holds {either(WIDTHS)} bits", str(wider)
        )
    if any(size * scheme.bits % 32 for size in shape):
        reason = f"{shape[0]}x{shape[1]} codes of {scheme.bits} bits do not fill 32-bit words"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    wanted = stored_scheme(scheme, shape)
    return (
        float16_scales(scheme)
        or grouped(scheme, shape)
        or fit_of_schemes(scheme, wanted, shape, min_zero_point)
    )


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Judge a model: one width and one group size; no head or embedding. Symmetric and asymmetric layers mix."""
    if refusal := outside_blocks(layers):
        return refusal
    schemes = {
        module: (stored_scheme(layer.weight, shape), shape)
        for module, (layer, shape) in layers.items()
    }
    widths = {scheme.bits: module for module, (scheme, _) in schemes.items()}
    if len(widths) > 1:
        shown = " and ".join(f"{bits} ({module})" for bits, module in sorted(widths.items()))
        reason = f"one width for the whole model, not {shown} bits (transformers reads no other)"
        return Compatibility(
            Verdict.IMPOSSIBLE, reason, "--format compressed-tensors, which mixes schemes"
        )
    return differing_groups(schemes) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float16 scales, and one scale per matrix as one per row."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, ScaleType.F16)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
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
    """Lay out codes, zero points (less ``min_zero_point``), scales and group numbers."""
    import torch

    from quantforge.packers.bits import pack_rows, unsigned

    scheme, columns = stored_scheme(tensor.scheme, tensor.shape), tensor.shape[1]
    possible(module, check_layer(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme, min_zero_point)
    scales = tensor.parameters["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if not scheme.symmetric:
        zeros = tensor.parameters["zeros"].T.contiguous()
    index = torch.arange(columns, dtype=torch.int32) // scheme.group_size(columns)
    return {
        f"{module}.qweight": pack_rows(
            unsigned(tensor.codes, scheme.bits), scheme.bits
        ).T.contiguous(),
        f"{module}.qzeros": pack_rows(zeros - min_zero_point, scheme.bits),
        f"{module}.scales": scales,
        f"{module}.g_idx": index,
    }


def unpack(
    layout: ModuleLayout, tensors: Mapping[str, Tensor], *, min_zero_point: int = MIN_ZERO_POINT
) -> QuantizedTensor:
    """Read codes and parameters back; scattered groups as `by_group_index` says."""
    from quantforge.packers.bits import signed, unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require(described(tensors), announced(layout, packed_tensors))
    codes = unpack_rows(tensors[f"{module}.qweight"].T.contiguous(), scheme.bits, shape[1])
    zeros = unpack_rows(tensors[f"{module}.qzeros"], scheme.bits, shape[0])
    _check_zeros(f"{module}.qzeros", zeros, scheme, min_zero_point)
    parameters = {"scales": tensors[f"{module}.scales"].T.contiguous()}
    if scheme.symmetric:
        codes = signed(codes, scheme.bits)
    else:
        parameters["zeros"] = (zeros + min_zero_point).T.contiguous()
    tensor = sound(Quantized(codes, parameters, scheme), f"{module}.scales")
    index = tensors.get(f"{module}.g_idx")
    if index is None:
        return tensor
    return by_group_index(tensor, index, f"{module}.g_idx", act_order=layout.act_order)


def _check_zeros(name: str, zeros: Tensor, scheme: Scheme, min_zero_point: int) -> None:
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
    """Return ``config.json`` and ``quantize_config.json``, which is its ``quantization_config`` alone."""
    modules = quantized_modules(plan, ".qweight")
    schemes = [
        stored_scheme(t.scheme.weight, t.matrix) for t in modules.values() if t.scheme is not None
    ]
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


def is_declared(config: Mapping[str, Any], *, checkpoint_format: str = KEY) -> bool:
    """Return whether ``quant_method`` is gptq, in this checkpoint format."""
    found = quantization_config(config)
    return (
        found.get("quant_method") == "gptq" and gptq_checkpoint_format(found) == checkpoint_format
    )


def find_layouts(
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
    return [_layout_of(name, {**found, **override(found, name)}, tensors) for name in names]


def _layout_of(
    module: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    """Return the layout of one module from its headers and what the configuration says of it.

    Raises:
        InputError: a width that is not read, or headers that disagree with the configuration.
    """
    bits, size = config.get("bits"), config.get("group_size", -1)
    if bits not in WIDTHS or not isinstance(size, int):
        raise InputError(
            f"{module}: config.json says GPTQ with bits = {bits!r}, group_size = {size!r}",
            f"{either(WIDTHS)} bits and a number are read",
            tensor=module,
        )
    scale = scale_of(tensors, f"{module}.scales")
    words, rows = matrix(tensors, f"{module}.qweight")
    columns = words * 32 // bits
    granularity = PerGroup(size) if size > 0 else Row()
    zero = Zero.NONE if config.get("sym", True) else Zero.INT
    scheme = Scheme(f"int{bits}", granularity, zero, scale)
    whole_groups(module, columns, scheme.group_size(columns))
    names = [tensor.name for tensor in packed_tensors(module, LayerScheme(scheme), (rows, columns))]
    present = tuple(name for name in names if name in tensors or not name.endswith("g_idx"))
    act_order = config.get("desc_act")
    if not isinstance(act_order, bool | None):
        raise InputError(f"{module}: desc_act = {act_order!r}", "true or false", tensor=module)
    layout = ModuleLayout(module, LayerScheme(scheme), (rows, columns), present, act_order)
    require(tensors, announced(layout, packed_tensors))
    has_group_index(act_order, f"{module}.g_idx", scheme.groups(columns), present)
    return layout


def override(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the values of the first rule of ``dynamic`` whose pattern matches a packed module, {} without one.

    Raises:
        InputError: it says that the module is not packed, or ``dynamic`` is no table.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(v, Mapping) for v in rules.values()):
        raise InputError("config.json: dynamic is no table of rules by pattern")
    for pattern, values in rules.items():
        if matches_module(pattern.removeprefix("+:").removeprefix("-:"), module):
            if pattern.startswith("-:"):
                raise denied(f"dynamic excepts {pattern!r}", f"{module} is packed", module)
            return dict(values)
    return {}
