"""MLX files: integers with a scale and a bias per group, and MLX's block-scale modes.

For a linear ``P`` with weight ``[out, in]``, ``b`` bits, groups of ``G``:

=============  ====  =====================  =======================================================
``P.weight``   U32   ``[out, in*b/32]``     a dense stream along the row, the least significant bit first
``P.scales``   16 b  ``[out, in/G]``
``P.biases``   16 b  ``[out, in/G]``        the value is ``code * scale + bias``, codes from 0
=============  ====  =====================  =======================================================

The modes ``mxfp4`` (groups of 32), ``nvfp4`` (16) and ``mxfp8`` (32) have U8 scales and no biases. MLX's nvfp4 has no
scale for the matrix: it is read with a divisor of 1, and not written, because ours have another.

A symmetric grid is written with the bias ``-2^(b-1) scale``, which is exact; a zero point with ``-zero scale``, which
is exact where the type of the scales can hold it. Files of mlx-lm, whose biases are free, are read as ``min`` grids.
``config.json`` has ``quantization`` beside an equal ``quantization_config`` without ``quant_method``. That is MLX's
convention; transformers refuses such a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError, join_with_or
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import (
    config_json,
    model_dtype,
    quantization_config,
    quantized_modules,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import Engine, engine_table
from quantforge.formats.read_checks import (
    check_config_value,
    contradiction_error,
    matrix_shape,
    require_finite,
    require_headers,
    require_valid_scales,
    require_whole_groups,
    scale_type_of,
    tensor_headers,
)
from quantforge.formats.refusal_reasons import check_whole_groups, require_possible
from quantforge.grids import PerGroup, ScaleType, Zero
from quantforge.notation import parse
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "mlx"
_UNSUPPORTED = Engine(unsupported_reason="does not read MLX files")
ENGINES = engine_table(
    transformers=_UNSUPPORTED,
    vllm=_UNSUPPORTED,
    sglang=_UNSUPPORTED,
    tensorrt_llm=_UNSUPPORTED,
    lmdeploy=_UNSUPPORTED,
    mlx=Engine(loads_embedding=True),
)
INFO = FormatInfo(
    hub_library="mlx",
    example_schemes=("int4:g64:min:bf16", "int8:g64:min:bf16", "mxfp4", "mxfp8"),
    fuses_shared_inputs=False,
    engines=ENGINES,
    tied_embedding_reference="mlx_lm.convert",
    preserved_scale_types=(ScaleType.F16, ScaleType.BF16),
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
WRITTEN_MODES = ("mxfp4", "mxfp8")  # their grids have the same names
READABLE_MODES = (*WRITTEN_MODES, "nvfp4")


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16 for float16 models, else bfloat16."""
    return ScaleType.F16 if model_dtype == "F16" else ScaleType.BF16


def default_scheme(bits: int) -> str:
    """Return integers in groups of 64 with a minimum, as mlx-lm does; raise `RefusedError` for other widths."""
    if bits not in SUPPORTED_BITS:
        raise RefusedError(
            f"--bits {bits}: MLX has {join_with_or(SUPPORTED_BITS)}", f"--bits {min(bits + 1, 8)}"
        )
    return f"int{bits}:g64:min"


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: integers in groups of 32, 64 or 128, mxfp4 or mxfp8; inputs unquantized."""
    scheme = stored_scheme(layer.weight, shape)
    if layer.input is not None and (scheme.integer or scheme.grid in WRITTEN_MODES):
        return Compatibility(
            Verdict.IMPOSSIBLE, "quantized inputs are not written", str(layer.weight)
        )
    if scheme.grid in WRITTEN_MODES:
        return check_whole_groups(scheme, shape) or Compatibility(Verdict.EXACT)
    if not scheme.integer or scheme.bits not in SUPPORTED_BITS:
        nearest = "int8:g64:min" if scheme.bits > 6 else "int4:g64:min"
        return Compatibility(Verdict.IMPOSSIBLE, f"{scheme.grid} is no number of MLX", nearest)
    if not isinstance(scheme.granularity, PerGroup) or scheme.granularity.size not in GROUP_SIZES:
        reason = (
            f"groups of {join_with_or(GROUP_SIZES)}, not {scheme.granularity} of {shape[1]} columns"
        )
        return Compatibility(Verdict.IMPOSSIBLE, reason, f"{scheme.grid}:g64:min")
    if scheme.scale not in {None, ScaleType.F16, ScaleType.BF16}:
        return Compatibility(
            Verdict.IMPOSSIBLE,
            f"scales of 16 bits are read, not {scheme.scale}",
            f"{scheme.grid}:{scheme.granularity}:{scheme.zero}:bf16",
        )
    return check_whole_groups(scheme, shape) or Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Return EXACT: every module can have its own entry in the configuration."""
    del layers
    return Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with minima; coarser granularities become groups with repeated scales."""
    if not scheme.integer:
        return scheme
    granularity = scheme.granularity
    size = scheme.group_size(shape[1])
    if not isinstance(granularity, PerGroup) or size not in GROUP_SIZES:
        fitting_sizes = [
            fit for fit in reversed(GROUP_SIZES) if size % fit == 0 and shape[1] % fit == 0
        ]
        granularity = PerGroup(fitting_sizes[0]) if fitting_sizes else granularity
    return replace(scheme, granularity=granularity, zero=Zero.MIN)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    scheme = stored_scheme(layer.weight, shape)
    packed_codes = StoredTensor(f"{module}.weight", "U32", (shape[0], shape[1] * scheme.bits // 32))
    size = scheme.parameter_shape(shape)
    if not scheme.integer:
        return (packed_codes, StoredTensor(f"{module}.scales", "U8", size))
    kind = (scheme.scale or ScaleType.BF16).value.upper()
    names = (f"{module}.scales", f"{module}.biases")
    return (packed_codes, *(StoredTensor(name, kind, size) for name in names))


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes, scales and biases."""
    import torch

    from quantforge.packers.bits import pack_rows

    scheme = stored_scheme(tensor.scheme, tensor.shape)
    require_possible(module, check_layer(LayerScheme(scheme, tensor.input), tensor.shape))
    tensor = convert(tensor, scheme)
    codes = tensor.codes.contiguous()
    packed_codes = pack_rows(codes.view(torch.uint8), scheme.bits).view(torch.uint32)
    if not scheme.integer:
        return {
            f"{module}.weight": packed_codes,
            f"{module}.scales": tensor.parameters["exponents"],
        }
    return {
        f"{module}.weight": packed_codes,
        f"{module}.scales": tensor.parameters["scales"],
        f"{module}.biases": tensor.parameters["mins"],
    }


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack codes, scales and biases."""
    import torch

    from quantforge.packers.bits import unpack_rows
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme, shape = layout.module, layout.scheme.weight, layout.shape
    require_headers(tensor_headers(tensors), packed_tensors(module, layout.scheme, shape))
    codes = unpack_rows(tensors[f"{module}.weight"].view(torch.int32), scheme.bits, shape[1])
    if scheme.grid == "mxfp8":
        codes = codes.view(torch.float8_e4m3fn)
    scales = tensors[f"{module}.scales"]
    if scheme.integer:
        biases = require_finite(f"{module}.biases", tensors[f"{module}.biases"], "bias")
        parameters = {"scales": scales, "mins": biases}
    elif scheme.grid == "nvfp4":
        parameters = {"scales": scales.view(torch.float8_e4m3fn), "divisor": torch.ones(1, 1)}
    else:
        parameters = {"exponents": scales}
    return require_valid_scales(Quantized(codes, parameters, scheme), f"{module}.scales")


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with the most common parameters as default, and an entry for each other module."""
    modules = quantized_modules(plan, ".scales")
    entries = {
        module: _config_entry(stored_scheme(tensor.scheme.weight, tensor.matrix))
        for module, tensor in modules.items()
        if tensor.scheme is not None
    }
    if not entries:
        raise RefusedError("nothing is quantized", "choose --format plain")
    kinds = list(entries.values())
    common_entry = max(kinds, key=kinds.count)
    quantization = {
        **common_entry,
        **{name: entry for name, entry in entries.items() if entry != common_entry},
    }
    dtype = model_dtype(plan, config)
    return {"config.json": config_json(config, dtype, quantization, duplicate_key="quantization")}


def _config_entry(scheme: Scheme) -> dict[str, Any]:
    entry: dict[str, Any] = {"group_size": scheme.group_size(0), "bits": scheme.bits}
    return entry if scheme.integer else entry | {"mode": scheme.grid}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether there is a ``quantization`` object and no ``quant_method``."""
    quantization = config.get("quantization")
    return isinstance(quantization, Mapping) and "quant_method" not in quantization_config(config)


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the modules that have ``scales``.

    Raises:
        InputError: a mode or width that is not read, or headers that disagree with the configuration.
    """
    quantization = config["quantization"]
    if quantization_config(config) not in ({}, quantization):
        raise contradiction_error(
            "quantization differs from quantization_config", "MLX writes the same twice"
        )
    names = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    for name, layer_settings in quantization.items():
        packed = name in names
        if f"{name}.weight" in tensors and not packed and layer_settings is not False:
            raise contradiction_error(
                f"quantization has {name!r}: {layer_settings!r}", f"{name} has no scales", name
            )
        if packed and layer_settings is not True and not isinstance(layer_settings, Mapping):
            raise contradiction_error(
                f"quantization has {name!r}: {layer_settings!r}", f"{name} is packed", name
            )
    return [_read_layout(name, quantization, tensors) for name in names]


def _read_layout(
    module: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    settings = (
        layer_settings if isinstance(layer_settings := config.get(module), Mapping) else config
    )
    bits, size = settings.get("bits", 4), settings.get("group_size", 64)
    mode = settings.get("mode", "affine")
    if mode == "affine" and bits in SUPPORTED_BITS and type(size) is int and size > 1:
        scale = scale_type_of(tensors, f"{module}.scales")
        scheme = Scheme(f"int{bits}", PerGroup(size), Zero.MIN, scale)
    elif mode in READABLE_MODES:
        scheme = parse(mode)
    else:
        raise InputError(
            f"MLX mode {mode!r} with {bits!r} bits in groups of {size!r} is not read",
            f"affine with {join_with_or(SUPPORTED_BITS)} bits, and {', '.join(READABLE_MODES)} are",
            tensor=module,
            subject="config.json",
        )
    rows, packed_columns = matrix_shape(tensors, f"{module}.weight")
    shape = (rows, packed_columns * 32 // scheme.bits)
    require_whole_groups(module, shape[1], group := scheme.group_size(0))
    layer = LayerScheme(scheme)
    expected = packed_tensors(module, layer, shape)
    require_headers(tensors, expected)
    if not scheme.integer:
        for key, actual in (("bits", scheme.bits), ("group_size", group)):
            check_config_value(settings, key, actual, f"{module} is {scheme}, of {actual}")
        if f"{module}.biases" in tensors:
            raise contradiction_error(
                f"mode = {mode!r}", f"{module} has biases, which are of affine", module
            )
    return ModuleLayout(module, layer, shape, tuple(item.name for item in expected))
