"""AWQ files in the ``gemm`` layout: 4 bits, one group size for the whole model.

Everything is transposed, as in GPTQ, but packed along the outputs: for a linear ``P`` with weight
``[N, K]``

=============  ====  ==============  ================================================
``P.qweight``  I32   ``[K, N/8]``    8 codes per word, outputs in the order 0 2 4 6 1 3 5 7
``P.qzeros``   I32   ``[K/G, N/8]``  zero points, the same order
``P.scales``   F16   ``[K/G, N]``
=============  ====  ==============  ================================================

The value is ``(code - zero) * scale``. A symmetric grid is written with the zero point 8 and
``zero_point: false``. Nothing in the files records the activation-aware scales: they were folded
into the weights before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantforge.errors import Fault, InputError, RefusedError
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import (
    config_json,
    float16_or_model_dtype,
    head_module,
    quantization_config,
    quantized_modules,
    skip_list_with_experts,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import (
    GROUPS_ONLY,
    MARLIN_RULES,
    MODELOPT,
    TURBOMIND,
    Engine,
    engine_table,
)
from quantforge.formats.gptq import dynamic_override
from quantforge.formats.read_checks import (
    check_aliases_agree,
    check_config_value,
    check_head_declaration,
    check_not_in_skip_list,
    expected_headers,
    matrix_shape,
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
    require_possible,
)
from quantforge.grids import DEFAULT_GROUP_SIZE, PerGroup, ScaleType, Zero
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "awq"
_VLLM_SUPPORT = Engine(layer_rules=(GROUPS_ONLY,), note_rules=MARLIN_RULES)
ENGINES = engine_table(
    transformers=Engine(note="through gptqmodel"),
    vllm=_VLLM_SUPPORT,
    sglang=_VLLM_SUPPORT,
    tensorrt_llm=MODELOPT,
    lmdeploy=TURBOMIND,
    mlx=Engine(layer_rules=(GROUPS_ONLY,), note="converted on loading"),
)
INFO = FormatInfo(
    engine_packages={"transformers": "gptqmodel"},
    example_schemes=("int4:g128:sym:f16", "int4:g128:asym:f16"),
    single_group_size=True,
    engines=ENGINES,
    skip_list_key="modules_to_not_convert",
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, lowest first
_INVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_GROUP_SIZES = (128, 64, 32)
KEY_ALIASES = (("method", "quant_method"), ("bits", "w_bit"), ("group_size", "q_group_size"))


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, whatever the model's dtype."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return asymmetric integers in groups of the default size, the usual AWQ scheme."""
    return f"int{bits}:g{DEFAULT_GROUP_SIZE}:asym"


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: 4 bits, a multiple of 8 rows, groups that divide the columns, float16 scales."""
    scheme = layer.weight
    if refusal := check_weight_only_integers(layer):
        return refusal
    if scheme.bits != 4:
        supported = Scheme("int4", scheme.granularity, scheme.zero)
        return Compatibility(Verdict.IMPOSSIBLE, "the layout holds 4 bits", str(supported))
    if shape[0] % 8:
        return Compatibility(Verdict.IMPOSSIBLE, f"{shape[0]} outputs are not a multiple of 8")
    if not isinstance(stored_scheme(scheme, shape).granularity, PerGroup):
        reason = (
            f"groups are needed, and {shape[1]} columns are not a multiple of {_GROUP_SIZES[-1]}"
        )
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    return (
        check_float16_scales(scheme)
        or check_whole_groups(scheme, shape)
        or Compatibility(Verdict.EXACT)
    )


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Check a model: one group size, no quantized head or embedding."""
    if refusal := check_inside_blocks(layers):
        return refusal
    schemes = {
        module: (stored_scheme(layer.weight, shape), shape)
        for module, (layer, shape) in layers.items()
    }
    return check_single_group_size(schemes) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float16 scales; coarser granularities become groups with repeated scales."""
    granularity = scheme.granularity
    if not isinstance(granularity, PerGroup):
        fitting_groups = (PerGroup(size) for size in _GROUP_SIZES if shape[1] % size == 0)
        granularity = next(fitting_groups, granularity)
    return Scheme(scheme.grid, granularity, scheme.zero, ScaleType.F16)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    groups = stored_scheme(layer.weight, shape).groups(shape[1])
    return (
        StoredTensor(f"{module}.qweight", "I32", (shape[1], shape[0] // 8)),
        StoredTensor(f"{module}.qzeros", "I32", (groups, shape[0] // 8)),
        StoredTensor(f"{module}.scales", "F16", (groups, shape[0])),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes, zero points and scales as in the module's table."""
    import torch

    from quantforge.packers.bits import to_unsigned_codes

    scheme = stored_scheme(tensor.scheme, tensor.shape)
    require_possible(module, check_layer(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme)
    scales = tensor.parameters["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if not tensor.scheme.symmetric:
        zeros = tensor.parameters["zeros"].T
    return {
        f"{module}.qweight": _pack_words(to_unsigned_codes(tensor.codes, 4).T),
        f"{module}.qzeros": _pack_words(zeros),
        f"{module}.scales": scales,
    }


def _pack_words(codes: Tensor) -> Tensor:
    from quantforge.packers.bits import pack_rows

    rows, outputs = codes.shape
    return pack_rows(codes.reshape(rows, -1, 8)[..., list(NIBBLE_ORDER)].reshape(rows, outputs), 4)


def _unpack_codes(packed: Tensor) -> Tensor:
    from quantforge.packers.bits import unpack_rows

    rows, outputs = packed.shape[0], packed.shape[1] * 8
    nibbles = unpack_rows(packed, 4, outputs).view(rows, -1, 8)
    return nibbles[..., list(_INVERSE_ORDER)].view(rows, outputs).T.contiguous()


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack codes and parameters."""
    from quantforge.packers.bits import to_signed_codes
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme = layout.module, layout.scheme.weight
    require_headers(tensor_headers(tensors), expected_headers(layout, packed_tensors))
    codes, zeros = (
        _unpack_codes(tensors[f"{module}.qweight"]),
        _unpack_codes(tensors[f"{module}.qzeros"]),
    )
    parameters = {"scales": tensors[f"{module}.scales"].T.contiguous()}
    if not scheme.symmetric:
        parameters["zeros"] = zeros
    elif bool((zeros != 8).any()):
        raise InputError(
            f"{module}.qzeros: zero points differ from 8, although config.json says zero_point = false",
            "engines disagree about such a file; set zero_point to true if it is asymmetric",
            tensor=f"{module}.qzeros",
            fault=Fault.ZERO,
        )
    else:
        codes = to_signed_codes(codes, 4)
    return require_valid_scales(Quantized(codes, parameters, scheme), f"{module}.scales")


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with the list of unquantized linears, unless that is the head alone."""
    modules = quantized_modules(plan, ".qweight")
    schemes = [
        stored_scheme(t.scheme.weight, t.matrix) for t in modules.values() if t.scheme is not None
    ]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    skip_list = skip_list_with_experts(plan, config, modules)
    quantization = {
        "quant_method": KEY,
        "bits": 4,
        "group_size": schemes[0].group_size(0),
        "zero_point": not all(scheme.symmetric for scheme in schemes),
        "version": "gemm",
        INFO.skip_list_key: None if skip_list == [head_module(config)] else skip_list,
    }
    return {"config.json": config_json(config, float16_or_model_dtype(plan, config), quantization)}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` is awq."""
    return quantization_config(config).get("quant_method") == "awq"


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears that have a ``qweight``.

    Raises:
        InputError: another layout than gemm, another width, or headers that disagree with the
        configuration.
    """
    quantization = quantization_config(config)
    version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    if version != "gemm" or bits != 4 or not isinstance(size, int):
        raise InputError(
            f"AWQ with version = {version!r}, bits = {bits!r}, group_size = {size!r}",
            "4 bits in the gemm layout are read",
            subject="config.json",
        )
    zero = Zero.INT if quantization.get("zero_point", True) else Zero.NONE
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    check_not_in_skip_list(quantization, INFO.skip_list_key, names)
    check_head_declaration(quantization, "lm_head", names)
    for first, second in KEY_ALIASES:
        check_aliases_agree(quantization, first, second)
    for name in names:
        check_config_value(dynamic_override(quantization, name), "bits", 4, f"{name} has 4 bits")
    return [_read_layout(name, size, zero, tensors) for name in names]


def _read_layout(
    module: str, size: int, zero: Zero, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    scale = scale_type_of(tensors, f"{module}.scales")
    columns, packed_columns = matrix_shape(tensors, f"{module}.qweight")
    size = columns if size == -1 else size
    require_whole_groups(module, columns, size)
    scheme = LayerScheme(Scheme("int4", PerGroup(size), zero, scale))
    names = tuple(
        tensor.name for tensor in packed_tensors(module, scheme, (packed_columns * 8, columns))
    )
    layout = ModuleLayout(module, scheme, (packed_columns * 8, columns), names)
    require_headers(tensors, expected_headers(layout, packed_tensors))
    return layout
