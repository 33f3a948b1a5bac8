"""Fine-grained fp8 (``quant_method: fp8``), as DeepSeek publishes its models: e4m3 in tiles of 128 by 128.

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
    skipped_with_mixtures,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import UNTRIED, Engine, by_engine
from quantforge.formats.read_checks import (
    agree,
    bare_codes,
    denied,
    described,
    matrix,
    not_excepted,
    refuse_open_head,
    require,
    scalar,
    scale_of,
    sound,
    whole_tiles,
)
from quantforge.formats.refusal_reasons import outside_blocks, possible
from quantforge.grids import PerTensor, ScaleType, Tile
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import Activation, LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "fp8"


def _tiles_only(scheme: Scheme, _: tuple[int, int]) -> str:
    whole = isinstance(scheme.granularity, PerTensor)
    return "tiles of 128x128 only" if whole else ""


ENGINES = by_engine(
    transformers=Engine(note="decoded to the model's type without a GPU"),
    vllm=Engine(note="no kernel for tiles on a CPU without AMX"),
    sglang=Engine(note=UNTRIED),
    tensorrt_llm=Engine(note=UNTRIED),
    lmdeploy=Engine(refuses=(_tiles_only,), note=UNTRIED),
    llama_cpp=Engine(never="reads GGUF files only (its converter decodes fp8)"),
    mlx=Engine(never="does not read fp8"),
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
SIDE = 128
INPUT = Activation("fp8_e4m3", "g128")
_SCALE = ".weight_scale_inv"
_NEAREST = "fp8:128x128+fp8:g128:dynamic"


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float32, whatever the model is."""
    del model_dtype
    return ScaleType.F32


def default_scheme(bits: int) -> str:
    """Return the one scheme of the format."""
    if bits != 8:
        raise RefusedError(f"--bits {bits}: the format holds 8 bits", "--bits 8")
    return _NEAREST


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Judge a weight: e4m3 in whole tiles of 128x128, inputs by runs of 128 channels or as they are."""
    scheme = layer.weight
    if scheme.grid != "fp8_e4m3" or not isinstance(stored_scheme(scheme, shape).granularity, Tile):
        return Compatibility(
            Verdict.IMPOSSIBLE, "the format holds e4m3 in tiles of 128x128", _NEAREST
        )
    if layer.input not in {None, INPUT}:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"inputs are not quantized as {layer.input}", _NEAREST
        )
    if stored_scheme(scheme, shape).granularity != Tile(SIDE, SIDE) or any(
        size % SIDE for size in shape
    ):
        reason = f"{shape[0]}x{shape[1]} is no multiple of {SIDE}x{SIDE}"
        return Compatibility(
            Verdict.IMPOSSIBLE, reason, "fp8:row:sym in --format compressed-tensors"
        )
    if scheme.scale not in {None, ScaleType.F32}:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"scales are stored as f32, not {scheme.scale}", _NEAREST
        )
    return Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Judge a model: no head or embedding."""
    return outside_blocks(layers) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with one scale per matrix as one per tile."""
    del shape
    granularity = scheme.granularity
    if isinstance(granularity, PerTensor):
        granularity = Tile(SIDE, SIDE)
    return replace(scheme, granularity=granularity).with_scale(ScaleType.F32)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    size = stored_scheme(layer.weight, shape).parameter_shape(shape)
    return (
        StoredTensor(f"{module}.weight", "F8_E4M3", shape),
        StoredTensor(module + _SCALE, "F32", size),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes and scales."""
    scheme = stored_scheme(tensor.scheme, tensor.shape)
    possible(module, check_layer(LayerScheme(scheme, tensor.input), tensor.shape))
    tensor = convert(tensor, scheme)
    return {f"{module}.weight": tensor.codes, module + _SCALE: tensor.parameters["scales"]}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and scales back."""
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, layer, shape = layout.module, layout.scheme, layout.shape
    codes = StoredTensor(f"{module}.weight", "F8_E4M3", shape)
    require(described(tensors), [codes])
    scale = tensors[module + _SCALE].reshape(layer.weight.parameter_shape(shape))
    weight, parameters = whole_tiles(layer.weight, shape[1], {"scales": scale})
    if f"{module}.activation_scale" in tensors:
        found = tensors[f"{module}.activation_scale"]
        parameters["input_scale"] = scalar(f"{module}.activation_scale", found)
    tensor = Quantized(tensors[f"{module}.weight"], parameters, weight, layer.input)
    return sound(tensor, module + _SCALE)


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json``, naming all linears that stay as they are."""
    modules = quantized_modules(plan, _SCALE)
    quantization = {
        "quant_method": KEY,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [SIDE, SIDE],
        INFO.skip_list_key: skipped_with_mixtures(plan, config, modules),
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
    found = quantization_config(config)
    block = found.get("weight_block_size", [SIDE, SIDE])
    if block is not None and not _is_tile(block):
        raise InputError(
            f"config.json: weight_block_size {block!r}", f"[{SIDE}, {SIDE}] and null are usual"
        )
    bare_codes(tensors, "_scale_inv")
    refuse_open_head(found, INFO.skip_list_key, tensors)
    names = [name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)]
    for key in (INFO.skip_list_key, "ignored_layers"):  # transformers' name, and vLLM's
        not_excepted(found, key, names)
    agree(found, "fmt", "e4m3", "codes are e4m3")
    tile = None if block is None else Tile(*block)
    return [_layout(name, found, tile, tensors) for name in names]


def _is_tile(block: object) -> bool:
    sizes = block if isinstance(block, list) else []
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


@cache
def _scheme(tile: Tile | None, scale: ScaleType, *, static: bool) -> LayerScheme:
    """Return what linears are in that have such scales: one object for all experts."""
    activation = Activation(
        "fp8_e4m3", f"g{tile.columns}" if tile else "tensor", not static or tile is not None
    )
    return LayerScheme(Scheme("fp8_e4m3", tile or PerTensor(), scale=scale), activation)


def _layout(
    module: str, config: Mapping[str, Any], tile: Tile | None, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    shape = matrix(tensors, f"{module}.weight")
    scheme_of_inputs = config.get("activation_scheme", "dynamic")
    if scheme_of_inputs not in ("static", "dynamic"):
        raise InputError(
            f"config.json: activation_scheme {scheme_of_inputs!r}", "static and dynamic are read"
        )
    static = scheme_of_inputs == "static"
    layer = _scheme(tile, scale_of(tensors, module + _SCALE), static=static)
    names = [
        f"{module}.weight",
        module + _SCALE,
        *([f"{module}.activation_scale"] if static else []),
    ]
    require(tensors, [StoredTensor(names[0], "F8_E4M3", shape)])
    size = tensors[names[1]].shape
    wanted = layer.weight.parameter_shape(shape)
    one = all(side == 1 for side in size)
    if size != wanted and one and tile and "weight_block_size" not in config:
        raise InputError(
            f"{names[1]}: one scale, but config.json has no weight_block_size, which means tiles of {SIDE}x{SIDE}",
            'if one scale is right, put "weight_block_size": null into quantization_config',
            tensor=names[1],
        )
    if size != wanted and not (tile is None and one):
        raise InputError(
            f"{names[1]}: {list(size)}, weight_block_size and the weight ask for {list(wanted)}",
            "quantization_config and the tensors disagree",
            tensor=names[1],
        )
    if not static and f"{module}.activation_scale" in tensors:
        raise denied("activation_scheme is dynamic", f"{module} has a scale of its input", module)
    if static and names[2] not in tensors:
        raise InputError(
            f"{names[2]}: missing, although activation_scheme is static", tensor=names[2]
        )
    return ModuleLayout(module, layer, shape, tuple(names))
