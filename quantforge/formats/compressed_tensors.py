"""compressed-tensors ``pack-quantized``: 2 to 8 bits, any mixture of schemes, no transposition.

For a linear ``P`` with weight ``[out, in]`` and ``b`` bits:

=======================  =====  ============================  ================================
``P.weight_packed``      I32    ``[out, ceil(in*b/32)]``      ``code + 2^(b-1)``, a stream per row
``P.weight_scale``       float  ``[out, groups]``             one group: one scale per row
``P.weight_shape``       I64    ``[2]``                       ``(out, in)``
``P.weight_zero_point``  I32    ``[ceil(out*b/32), groups]``  asymmetric: a stream along *out*
=======================  =====  ============================  ================================

The value is ``(code - zero) * scale``. Both are stored shifted into the unsigned range, so an
asymmetric code and its zero point are stored as they are. The stream is dense
(`quantforge.packers.bits`); releases of the library before 0.18 packed 3, 5, 6 and 7 bits with
gaps, and such files are refused by their width.

``config_groups`` says which modules have which scheme. One scheme in the whole model targets the
class ``Linear`` and lists every exception in ``ignore``; several schemes target module names. The
library's configuration classes refuse unknown keys, so only those that 0.17 (used by vLLM 0.33)
knows are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError
from quantforge.formats import Fit, ModuleLayout, Verdict
from quantforge.formats.checks import (
    by_group_index,
    described,
    grouped,
    matches,
    matrix,
    possible,
    require,
    scale_of,
    sound,
)
from quantforge.formats.configuration import (
    config_json,
    head_of,
    model_dtype,
    quantization_config,
    quantized_modules,
    skipped,
    spellings,
)
from quantforge.formats.convert import convert
from quantforge.formats.engines import verdicts
from quantforge.planned import EngineVerdict, Plan, StoredTensor
from quantforge.scheme import (
    INTEGER_BITS,
    LayerScheme,
    PerGroup,
    PerTensor,
    Row,
    ScaleType,
    Scheme,
    Zero,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.tensor import QuantizedTensor

KEY = "compressed-tensors"
LEAST_ZERO = 0
_FORMAT = "pack-quantized"
_PACKED = ".weight_packed"
_OLD = "3-, 5-, 6- and 7-bit files of compressed-tensors before 0.18 are packed with gaps: not read"


def scale_type(model_dtype: str) -> ScaleType:
    """Return the type of the model: engines cast scales to it."""
    return ScaleType(model_dtype.lower())


def default_scheme(bits: int) -> str:
    """Return groups of 128 without zero points, which every engine of the format loads."""
    return f"int{bits}:g128:sym"


def check(layer: LayerScheme, shape: tuple[int, int]) -> Fit:
    """Any width, symmetric or not, as long as the groups divide the columns."""
    if layer.input is not None:
        return Fit(Verdict.IMPOSSIBLE, "quantized activations are not written", str(layer.weight))
    return grouped(layer.weight, shape) or Fit(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Fit:
    """Return EXACT: schemes mix freely."""
    del layers
    return Fit(Verdict.EXACT)


def native(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with one scale per matrix as one per row, which is what kernels read."""
    del shape
    granularity = Row() if isinstance(scheme.granularity, PerTensor) else scheme.granularity
    return Scheme(scheme.grid, granularity, scheme.zero, scheme.scale or ScaleType.F16)


def stored(module: str, layer: LayerScheme, shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    scheme = native(layer.weight, shape)
    out_features, bits = shape[0], scheme.bits
    groups = scheme.groups(shape[1])
    scale = (scheme.scale or ScaleType.F16).value.upper()
    tensors = (
        StoredTensor(module + _PACKED, "I32", (out_features, _words(shape[1], bits))),
        StoredTensor(f"{module}.weight_scale", scale, (out_features, groups)),
        StoredTensor(f"{module}.weight_shape", "I64", (2,)),
    )
    if scheme.symmetric:
        return tensors
    name = f"{module}.weight_zero_point"
    return (*tensors, StoredTensor(name, "I32", (_words(out_features, bits), groups)))


def _words(codes: int, bits: int) -> int:
    return -(-codes * bits // 32)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes, scales, shape and zero points; see the module's table."""
    import torch

    from quantforge.packers.bits import pack_rows, unsigned

    scheme = native(tensor.scheme, tensor.shape)
    possible(module, check(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme)
    bits = tensor.scheme.bits
    packed = {
        module + _PACKED: pack_rows(unsigned(tensor.codes, bits), bits),
        f"{module}.weight_scale": tensor.parameters["scales"].contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if not tensor.scheme.symmetric:
        zeros = pack_rows(tensor.parameters["zeros"].T.contiguous(), bits)
        packed[f"{module}.weight_zero_point"] = zeros.T.contiguous()
    return packed


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and parameters back.

    The number of columns is that of ``weight_shape``: headers alone do not always tell it for one
    scale per row.
    """
    from quantforge.packers.bits import signed, unpack_rows
    from quantforge.tensor import QuantizedTensor as Quantized

    module, scheme = layout.module, layout.scheme.weight
    shape = _shape(layout, tensors)
    require(described(tensors), stored(module, layout.scheme, shape), _OLD)
    codes = unpack_rows(tensors[module + _PACKED], scheme.bits, shape[1])
    parameters = {"scales": tensors[f"{module}.weight_scale"]}
    zeros = tensors.get(f"{module}.weight_zero_point")
    if scheme.symmetric:
        codes = signed(codes, scheme.bits)
    elif zeros is not None:
        rows = unpack_rows(zeros.T.contiguous(), scheme.bits, shape[0])
        parameters["zeros"] = rows.T.contiguous()
    tensor = sound(Quantized(codes, parameters, scheme), f"{module}.weight_scale")
    index = tensors.get(f"{module}.weight_g_idx")
    return tensor if index is None else by_group_index(tensor, index, f"{module}.weight_g_idx")


def _shape(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    name = f"{layout.module}.weight_shape"
    require(described(tensors), [StoredTensor(name, "I64", (2,))])
    out_features, in_features = tensors[name].tolist()
    bits, (rows, columns) = layout.scheme.weight.bits, layout.shape
    same = out_features == rows and _words(in_features, bits) == _words(columns, bits)
    if not same or in_features < 1 or in_features % layout.scheme.weight.group_size(in_features):
        raise InputError(
            f"{name}: {out_features}x{in_features}, the other tensors say {rows}x{columns}",
            "the checkpoint is damaged",
            tensor=name,
        )
    return out_features, in_features


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json`` with one group per scheme, in the order of the plan."""
    modules = quantized_modules(plan, _PACKED)
    targets: dict[Scheme, list[str]] = {}
    for module, tensor in modules.items():
        if tensor.scheme is not None:
            targets.setdefault(native(tensor.scheme.weight, tensor.matrix), []).append(module)
    if len(targets) == 1 and not any("embed" in module for module in modules):
        targets = {scheme: ["Linear"] for scheme in targets}
    quantization = {
        "quant_method": KEY,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": [name for module in names for name in spellings(module, config)],
                "weights": _arguments(scheme),
                "input_activations": None,
                "output_activations": None,
                "format": _FORMAT,
            }
            for index, (scheme, names) in enumerate(targets.items())
        },
        "ignore": skipped(plan, config, modules),
        "kv_cache_scheme": None,
    }
    dtype = model_dtype(plan, config)
    untied = bool(plan.options.get("untie")) or head_of(config) in modules
    return {"config.json": config_json(config, dtype, quantization, untie=untied)}


def _arguments(scheme: Scheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel",
    }
    if isinstance(scheme.granularity, PerGroup):
        arguments |= {"strategy": "group", "group_size": scheme.granularity.size}
    return arguments


def claims(config: Mapping[str, Any]) -> bool:
    """Whether ``quant_method`` is compressed-tensors."""
    return quantization_config(config).get("quant_method") == KEY


def layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the packed linears; a group's target is a module name, ``re:`` pattern or class name.

    Raises:
        InputError: another format of the family, a module without a group, or headers that disagree
        with it.
    """
    found = quantization_config(config)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping):
        raise InputError("config.json: compressed-tensors without config_groups")
    for group in groups.values():
        _supported(group, found)
    names = [name.removesuffix(_PACKED) for name in tensors if name.endswith(_PACKED)]
    return [_layout(module, _group(module, groups.values()), tensors) for module in names]


def _supported(group: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    weights = group.get("weights")
    stated = weights if isinstance(weights, Mapping) else {"type": None}
    kind, number, strategy = group.get("format"), stated.get("type", "int"), stated.get("strategy")
    kind = kind or config.get("format")
    if kind != _FORMAT or number != "int" or strategy not in {"group", "channel", None}:
        raise InputError(
            f"config.json: compressed-tensors format {kind!r} with {number} weights, "
            f"strategy {strategy!r}, is not read",
            f"{_FORMAT} with int weights per group or channel is",
        )
    if group.get("input_activations") is not None:
        raise InputError(
            "config.json: quantized activations (input_activations) are not read",
            "weight-only checkpoints are",
        )


def _group(module: str, groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The group of a module: by its name first, then by pattern, then by class."""
    ranked = [
        (rank, group)
        for group in groups
        for target in group.get("targets", ())
        if (rank := _rank(module, target)) is not None
    ]
    if not ranked:
        raise InputError(
            f"{module}: no config group targets it", "config_groups is incomplete", tensor=module
        )
    return min(ranked, key=lambda item: item[0])[1]


def _rank(module: str, target: str) -> int | None:
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if matches(target[3:], module) else None
    return 2 if target in {"Linear", "Embedding"} else None


def _layout(
    module: str, group: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    weights = group["weights"]
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    if bits not in INTEGER_BITS or not (size is None or isinstance(size, int)):
        raise InputError(
            f"config.json: num_bits = {bits!r}, group_size = {size!r}",
            "2 to 8 bits in groups of a number of columns are read",
            tensor=module,
        )
    rows, words = matrix(tensors, module + _PACKED)
    granularity: Row | PerGroup = Row()
    columns = words * 32 // bits
    if weights.get("strategy") != "channel" and size is not None and size > 0:
        granularity = PerGroup(size)
        columns = matrix(tensors, f"{module}.weight_scale")[1] * size
    zero = Zero.NONE if weights.get("symmetric", True) else Zero.INT
    scale = scale_of(tensors, f"{module}.weight_scale")
    scheme = Scheme(f"int{bits}", granularity, zero, scale)
    expected = stored(module, LayerScheme(scheme), (rows, columns))
    require(tensors, expected, _OLD)
    extra = [f"{module}.weight_g_idx"] if f"{module}.weight_g_idx" in tensors else []
    names = (*(tensor.name for tensor in expected), *extra)
    return ModuleLayout(module, LayerScheme(scheme), (rows, columns), names)


def engines(layers: Iterable[tuple[LayerScheme, tuple[int, int]]]) -> tuple[EngineVerdict, ...]:
    """FORMATS: 4 and 8 bits run in the serving engines; transformers decodes every width."""
    return verdicts(KEY, layers)
