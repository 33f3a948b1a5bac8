"""Config groups of compressed-tensors: which modules have which scheme and format.

Only keys are written that the library's release 0.17 knows (vLLM 0.33 uses it): its classes refuse any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import InputError
from quantforge.formats.configuration import string_list
from quantforge.formats.patterns import ModulePatterns
from quantforge.grids import INTEGER_BITS, Granularity, PerGroup, PerTensor, Row, Tile, Zero
from quantforge.notation import parse
from quantforge.scheme import Activation, LayerScheme, Scheme

Arguments = Mapping[str, Any]
PACK_QUANTIZED, INT_QUANTIZED = "pack-quantized", "int-quantized"
FLOAT_QUANTIZED, NAIVE_QUANTIZED = "float-quantized", "naive-quantized"
NVFP4_PACK_QUANTIZED, MXFP4_PACK_QUANTIZED, MXFP8_QUANTIZED = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
MIXED_PRECISION = "mixed-precision"
READABLE_FORMATS = (
    PACK_QUANTIZED,
    INT_QUANTIZED,
    FLOAT_QUANTIZED,
    NAIVE_QUANTIZED,
    NVFP4_PACK_QUANTIZED,
    MXFP4_PACK_QUANTIZED,
    MXFP8_QUANTIZED,
)
_FORMAT_BY_GRID = {
    "fp8_e4m3": FLOAT_QUANTIZED,
    "nvfp4": NVFP4_PACK_QUANTIZED,
    "mxfp4": MXFP4_PACK_QUANTIZED,
    "mxfp8": MXFP8_QUANTIZED,
}
_SCALE_DTYPES = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8", "mxfp8": "torch.uint8"}
_FLOAT_ARGUMENTS = {"type": "float", "symmetric": True}
DAMAGED_HINT = "quantization_config is damaged: get the model again"
# `actorder` with an index of groups; others leave columns in order
ACT_ORDER_VALUES = ("group", "dynamic", True)


def format_name(layer: LayerScheme) -> str | None:
    """Return the name of the compressed-tensors format that holds a layer, None if there is none."""
    if layer.weight.integer:
        return PACK_QUANTIZED if layer.input is None else INT_QUANTIZED
    return _FORMAT_BY_GRID.get(layer.weight.grid)


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """Return the ``weights`` object of a config group for a scheme."""
    if scheme.grid in _SCALE_DTYPES:
        return _block_scale_arguments(scheme.grid, scheme.group_size(0))
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
    }
    if not scheme.integer:
        arguments |= _FLOAT_ARGUMENTS
    match scheme.granularity:
        case PerGroup(size):
            return arguments | {"strategy": "group", "group_size": size}
        case Tile(rows, columns):
            return arguments | {"strategy": "block", "block_structure": [rows, columns]}
        case PerTensor():
            return arguments | {"strategy": "tensor"}
        case Row():
            return arguments | {"strategy": "channel"}


def _block_scale_arguments(grid: str, size: int) -> dict[str, Any]:
    bits, strategy = (8 if grid == "mxfp8" else 4), ("tensor_group" if grid == "nvfp4" else "group")
    return {
        "num_bits": bits,
        **_FLOAT_ARGUMENTS,
        "strategy": strategy,
        "group_size": size,
        "scale_dtype": _SCALE_DTYPES[grid],
    }


def input_arguments(activation: Activation | None) -> dict[str, Any] | None:
    """Return the ``input_activations`` object of a config group, None for unquantized inputs."""
    if activation is None:
        return None
    grid, granularity = activation.grid, activation.granularity
    if grid in _SCALE_DTYPES:
        dynamic: bool | str = "local" if grid == "nvfp4" else True
        return _block_scale_arguments(grid, int(granularity[1:])) | {"dynamic": dynamic}
    arguments: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    if grid != "int8":
        arguments |= _FLOAT_ARGUMENTS
    if granularity.startswith("g"):
        arguments |= {"strategy": "group", "group_size": int(granularity[1:])}
    else:
        arguments["strategy"] = granularity
    return arguments | {"dynamic": activation.dynamic}


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """A parsed config group: target modules, scheme, format, and whether groups are in act-order."""

    targets: ModulePatterns
    layer: LayerScheme
    kind: str
    act_order: bool

    def match_rank(self, module: str) -> int | None:
        """Return how the group targets a module: 0 by name, 1 by pattern, 2 by class; None if not at all."""
        rank = self.targets.match_rank(module)
        if rank is None and any(
            self.targets.match_rank(kind) == 0 for kind in ("Linear", "Embedding")
        ):
            return 2
        return rank


def parse_group(group: object, config: Mapping[str, Any]) -> ConfigGroup:
    """Parse a config group.

    Raises:
        InputError: it is no group, or says what is not read.
    """
    if not isinstance(group, Mapping):
        raise InputError("a config group is not a table", DAMAGED_HINT, subject="config.json")
    kind = group.get("format") or config.get("format") or MIXED_PRECISION
    if kind not in (*READABLE_FORMATS, MIXED_PRECISION):
        raise InputError(
            f"compressed-tensors format {kind!r} is not read",
            f"{', '.join(READABLE_FORMATS)} are",
            subject="config.json",
        )
    weights = group.get("weights")
    layer = LayerScheme(_parse_weights(weights), _parse_input(group.get("input_activations")))
    expected = {format_name(layer), NAIVE_QUANTIZED, MIXED_PRECISION}
    if layer.weight.grid == "int8":
        expected |= {PACK_QUANTIZED, INT_QUANTIZED}
    if kind not in expected:
        raise InputError(
            f"{layer} in a group of format {kind!r}",
            f"{format_name(layer)} holds it",
            subject="config.json",
        )
    act_order = (
        weights.get("actorder") in ACT_ORDER_VALUES if isinstance(weights, Mapping) else False
    )
    return ConfigGroup(ModulePatterns(string_list(group, "targets")), layer, str(kind), act_order)


def group_of_module(module: str, groups: Iterable[ConfigGroup]) -> ConfigGroup:
    """Return the group that targets a module, preferring names over patterns over classes.

    Raises:
        InputError: none does.
    """
    ranked = [(rank, group) for group in groups if (rank := group.match_rank(module)) is not None]
    if not ranked:
        raise InputError(
            f"{module}: no config group in config.json targets it",
            "config_groups is incomplete",
            tensor=module,
        )
    return min(ranked, key=lambda item: item[0])[1]


def _parse_weights(arguments: object) -> Scheme:
    """Return the scheme that the ``weights`` of a config group describe, without its scale type.

    Raises:
        InputError: no such numbers are read.
    """
    if not isinstance(arguments, Mapping):
        raise _unsupported_error("no weights in a config group", {})
    fields = arguments
    bits, kind, size = (
        fields.get("num_bits", 8),
        fields.get("type", "int"),
        fields.get("group_size"),
    )
    if kind == "float" and (grid := _block_scale_grid(bits, fields)):
        return parse(grid)
    if kind == "int" and bits in INTEGER_BITS:
        grid = f"int{bits}"
    elif kind == "float" and bits == 8:
        grid = "fp8_e4m3"
    else:
        raise _unsupported_error(f"{kind} weights of {bits!r} bits", fields)
    symmetric = fields.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _unsupported_error(f"symmetric = {symmetric!r}", fields)
    zero = Zero.NONE if symmetric else Zero.INT
    if grid == "fp8_e4m3" and zero is not Zero.NONE:
        raise _unsupported_error("asymmetric float weights", fields)
    return Scheme(grid, _parse_granularity(fields.get("strategy"), size, fields), zero)


def _block_scale_grid(bits: object, fields: Arguments) -> str:
    size, scale = fields.get("group_size"), str(fields.get("scale_dtype"))
    if (bits, size) == (4, 16):
        return "nvfp4"
    if (bits, size) == (4, 32):
        return "mxfp4"
    return "mxfp8" if (bits, size, scale) == (8, 32, "torch.uint8") else ""


def _parse_granularity(strategy: object, size: object, fields: Arguments) -> Granularity:
    if strategy == "block":
        block = fields.get("block_structure")
        if (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            return Tile(block[0], block[1])
    if strategy == "tensor":
        return PerTensor()
    if type(size) is int and size > 0 and strategy in (None, "group"):
        return PerGroup(size)
    if strategy == "channel" or (strategy in (None, "group") and size in (None, -1)):
        return Row()
    raise _unsupported_error(f"strategy {strategy!r} with group_size {size!r}", fields)


def _parse_input(arguments: object) -> Activation | None:
    """Return the activation scheme that ``input_activations`` describe; errors as `_parse_weights`."""
    if arguments is None:
        return None
    fields = arguments if isinstance(arguments, Mapping) else {}
    bits, kind, size = (
        fields.get("num_bits", 8),
        fields.get("type", "int"),
        fields.get("group_size"),
    )
    strategy, dynamic = fields.get("strategy") or "tensor", fields.get("dynamic", False)
    if fields.get("symmetric", True) is not True:
        raise _unsupported_error("asymmetric activations", fields)
    if kind == "float" and (grid := _block_scale_grid(bits, fields)):
        return Activation(grid, f"g{size}", grid != "nvfp4")
    grid = {"int": "int8", "float": "fp8_e4m3"}.get(str(kind), "") if bits == 8 else ""
    supported_strategies = [("token", True), ("tensor", True), ("tensor", False), ("group", True)]
    sized = strategy != "group" or (type(size) is int and size > 0)
    if not grid or not sized or (strategy, dynamic) not in supported_strategies:
        raise _unsupported_error(f"{kind} activations of {bits!r} bits per {strategy}", fields)
    return Activation(grid, f"g{size}" if strategy == "group" else str(strategy), bool(dynamic))


def _unsupported_error(feature: str, fields: Arguments) -> InputError:
    return InputError(
        f"compressed-tensors with {feature} is not read ({dict(fields)})",
        f"read are {', '.join(READABLE_FORMATS)}",
        subject="config.json",
    )
