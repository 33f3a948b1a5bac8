"""Fine-grained fp8 (``quant_method: fp8``), as in DeepSeek's releases: e4m3 in tiles of 128 by 128.

For a linear ``P`` with weight ``[out, in]``, both multiples of 128 (tiles of any size are read):

======================  ========  =======================  ==============================
``P.weight``            F8_E4M3   ``[out, in]``
``P.weight_scale_inv``  F32       ``[out/128, in/128]``    the multiplier, whatever its name says
======================  ========  =======================  ==============================

Inputs are rounded at run time, each run of 128 channels of a token by its own range. Files with one scale per matrix
exist, but transformers and the serving engines look for it under different names: they are not written here
(compressed-tensors has them), and read where the scale is called ``weight_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.configuration import (
    config_json,
    model_dtype,
    quantization_config,
    quantized_modules,
    skip_list_with_experts,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import NOT_RUN, Engine, engine_table
from quantforge.formats.read_checks import (
    check_config_value,
    check_not_in_skip_list,
    contradiction_error,
    matrix_shape,
    require_head_in_skip_list,
    require_headers,
    require_scales,
    require_valid_scales,
    scalar_scale,
    scale_type_of,
    split_ragged_tiles,
    tensor_headers,
)
from quantforge.formats.refusal_reasons import check_inside_blocks, require_possible
from quantforge.grids import PerTensor, ScaleType, Tile
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "fp8"


def _tiles_only(scheme: Scheme, _: tuple[int, int]) -> str:
    is_per_tensor = isinstance(scheme.granularity, PerTensor)
    return "tiles of 128x128 only" if is_per_tensor else ""


ENGINES = engine_table(
    transformers=Engine(note="decoded to the model's type without a GPU"),
    vllm=Engine(note="no kernel for tiles on a CPU without AMX"),
    sglang=Engine(note=NOT_RUN),
    tensorrt_llm=Engine(note=NOT_RUN),
    lmdeploy=Engine(layer_rules=(_tiles_only,), note=NOT_RUN),
    llama_cpp=Engine(unsupported_reason="reads GGUF files only (its converter decodes fp8)"),
    mlx=Engine(unsupported_reason="does not read fp8"),
)
INFO = FormatInfo(
    example_schemes=("FP8_BLOCK",),
    engines=ENGINES,
    skip_list_key="modules_to_not_convert",
    row_sliced_suffixes=(".weight", ".weight_scale_inv"),
    used_for_releases=True,
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 8
TILE_SIZE = 128
INPUT_SCHEME = Activation("fp8_e4m3", "g128")
_SCALE_SUFFIX = ".weight_scale_inv"
_DEFAULT_SCHEME = "fp8:128x128+fp8:g128:dynamic"


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float32, whatever the model's dtype."""
    del model_dtype
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    """Return the only scheme of the format; raise `RefusedError` unless ``bits`` is 8."""
    if bits != 8:
        raise RefusedError(f"--bits {bits}: the format holds 8 bits", "--bits 8")
    return _DEFAULT_SCHEME


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: e4m3 in whole tiles of 128x128; inputs in groups of 128 channels or unquantized."""
    scheme = layer.weight
    if scheme.grid != "fp8_e4m3" or not isinstance(stored_scheme(scheme, shape).granularity, Tile):
        return Compatibility(
            Verdict.IMPOSSIBLE, "the format holds e4m3 in tiles of 128x128", _DEFAULT_SCHEME
        )
    if layer.input not in {None, INPUT_SCHEME}:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"inputs are not quantized as {layer.input}", _DEFAULT_SCHEME
        )
    if stored_scheme(scheme, shape).granularity != Tile(TILE_SIZE, TILE_SIZE) or any(
        size % TILE_SIZE for size in shape
    ):
        reason = f"{shape[0]}x{shape[1]} is no multiple of {TILE_SIZE}x{TILE_SIZE}"
        return Compatibility(
            Verdict.IMPOSSIBLE, reason, "fp8:row:sym in --format compressed-tensors"
        )
    if scheme.scale not in {None, ScaleType.F32}:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"scales are stored as f32, not {scheme.scale}", _DEFAULT_SCHEME
        )
    return Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Check a model: no quantized head or embedding."""
    return check_inside_blocks(layers) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float32 scales; one scale per matrix becomes one per tile."""
    del shape
    granularity = scheme.granularity
    if isinstance(granularity, PerTensor):
        granularity = Tile(TILE_SIZE, TILE_SIZE)
    return replace(scheme, granularity=granularity).with_scale(ScaleType.F32)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the headers of the stored tensors of one module."""
    size = stored_scheme(layer.weight, shape).parameter_shape(shape)
    return (
        StoredTensor(f"{module}.weight", "F8_E4M3", shape),
        StoredTensor(module + _SCALE_SUFFIX, "F32", size),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Pack codes and scales."""
    scheme = stored_scheme(tensor.scheme, tensor.shape)
    require_possible(module, check_layer(LayerScheme(scheme, tensor.input), tensor.shape))
    tensor = convert(tensor, scheme)
    return {f"{module}.weight": tensor.codes, module + _SCALE_SUFFIX: tensor.parameters["scales"]}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack codes and scales."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, layer, shape = layout.module, layout.scheme, layout.shape
    codes = StoredTensor(f"{module}.weight", "F8_E4M3", shape)
    require_headers(tensor_headers(tensors), [codes])
    scale = tensors[module + _SCALE_SUFFIX].reshape(layer.weight.parameter_shape(shape))
    weight, parameters = split_ragged_tiles(layer.weight, shape[1], {"scales": scale})
    if f"{module}.activation_scale" in tensors:
        activation_scale = tensors[f"{module}.activation_scale"]
        parameters["input_scale"] = scalar_scale(f"{module}.activation_scale", activation_scale)
    tensor = Quantized(tensors[f"{module}.weight"], parameters, weight, layer.input)
    return require_valid_scales(tensor, module + _SCALE_SUFFIX)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with the list of unquantized linears."""
    modules = quantized_modules(plan, _SCALE_SUFFIX)
    quantization = {
        "quant_method": KEY,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [TILE_SIZE, TILE_SIZE],
        INFO.skip_list_key: skip_list_with_experts(plan, config, modules),
    }
    return {"config.json": config_json(config, model_dtype(plan, config), quantization)}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` is fp8."""
    return quantization_config(config).get("quant_method") == KEY


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the linears that have a ``weight_scale_inv``.

    Raises:
        InputError: a block size that is no pair of positive numbers, codes without scales, or headers that disagree
            with the configuration.
    """
    quantization = quantization_config(config)
    block = quantization.get("weight_block_size", [TILE_SIZE, TILE_SIZE])
    if block is not None and not _is_tile(block):
        raise InputError(
            f"weight_block_size {block!r}",
            f"[{TILE_SIZE}, {TILE_SIZE}] and null are usual",
            subject="config.json",
        )
    require_scales(tensors, "_scale_inv")
    require_head_in_skip_list(quantization, INFO.skip_list_key, tensors)
    names = [name.removesuffix(_SCALE_SUFFIX) for name in tensors if name.endswith(_SCALE_SUFFIX)]
    for key in (INFO.skip_list_key, "ignored_layers"):  # transformers' name, and vLLM's
        check_not_in_skip_list(quantization, key, names)
    check_config_value(quantization, "fmt", "e4m3", "codes are e4m3")
    tile = None if block is None else Tile(*block)
    return [_read_layout(name, quantization, tile, tensors) for name in names]


def _is_tile(block: object) -> bool:
    sizes = block if isinstance(block, list) else []
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


@cache
def _layer_scheme(tile: Tile | None, scale: ScaleType, *, static: bool) -> LayerScheme:
    """Return the scheme of a linear with these tiles and scales; cached, so that experts share one object."""
    activation = Activation(
        "fp8_e4m3", f"g{tile.columns}" if tile else "tensor", not static or tile is not None
    )
    return LayerScheme(Scheme("fp8_e4m3", tile or PerTensor(), scale=scale), activation)


def _read_layout(
    module: str, config: Mapping[str, Any], tile: Tile | None, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    shape = matrix_shape(tensors, f"{module}.weight")
    scheme_of_inputs = config.get("activation_scheme", "dynamic")
    if scheme_of_inputs not in ("static", "dynamic"):
        raise InputError(
            f"activation_scheme {scheme_of_inputs!r}",
            "static and dynamic are read",
            subject="config.json",
        )
    static = scheme_of_inputs == "static"
    layer = _layer_scheme(tile, scale_type_of(tensors, module + _SCALE_SUFFIX), static=static)
    names = [
        f"{module}.weight",
        module + _SCALE_SUFFIX,
        *([f"{module}.activation_scale"] if static else []),
    ]
    require_headers(tensors, [StoredTensor(names[0], "F8_E4M3", shape)])
    size = tensors[names[1]].shape
    expected_size = layer.weight.parameter_shape(shape)
    has_one_scale = all(length == 1 for length in size)
    if size != expected_size and has_one_scale and tile and "weight_block_size" not in config:
        raise InputError(
            f"{names[1]}: one scale, but config.json has no weight_block_size, which means tiles of "
            f"{TILE_SIZE}x{TILE_SIZE}",
            'if one scale is right, put "weight_block_size": null into quantization_config',
            tensor=names[1],
        )
    if size != expected_size and not (tile is None and has_one_scale):
        raise InputError(
            f"{names[1]}: {list(size)}, weight_block_size and the weight ask for {list(expected_size)}",
            "quantization_config and the tensors disagree",
            tensor=names[1],
        )
    if not static and f"{module}.activation_scale" in tensors:
        raise contradiction_error(
            "activation_scheme is dynamic", f"{module} has a scale of its input", module
        )
    if static and names[2] not in tensors:
        raise InputError(
            f"{names[2]}: missing, although activation_scheme is static", tensor=names[2]
        )
    return ModuleLayout(module, layer, shape, tuple(names))
