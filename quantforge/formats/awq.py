"""AWQ files, the ``gemm`` layout: 4 bits, one group size in the whole model.

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
    half_dtype,
    head_of,
    quantization_config,
    quantized_modules,
    skipped_with_mixtures,
)
from quantforge.formats.convert import convert
from quantforge.formats.engine_rules import (
    GROUPS_ONLY,
    MARLIN,
    MODELOPT,
    TURBOMIND,
    Engine,
    by_engine,
)
from quantforge.formats.gptq import override
from quantforge.formats.read_checks import (
    agree,
    agree_on_head,
    announced,
    described,
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
)
from quantforge.grids import PerGroup, ScaleType, Zero
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "awq"
_SERVING = Engine(refuses=(GROUPS_ONLY,), notes=MARLIN)
ENGINES = by_engine(
    transformers=Engine(note="through gptqmodel"),
    vllm=_SERVING,
    sglang=_SERVING,
    tensorrt_llm=MODELOPT,
    lmdeploy=TURBOMIND,
    mlx=Engine(refuses=(GROUPS_ONLY,), note="converted on loading"),
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
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, lowest first
_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
_SIZES = (128, 64, 32)
ONE_NAME = (("method", "quant_method"), ("bits", "w_bit"), ("group_size", "q_group_size"))


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, whatever the model is."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return groups of 128 with zero points, which the format was made for."""
    return f"int{bits}:g128:asym"


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Judge a weight: 4 bits, a multiple of 8 outputs, groups that divide the columns, float16 scales."""
    scheme = layer.weight
    if refusal := integers(layer):
        return refusal
    if scheme.bits != 4:
        wanted = Scheme("int4", scheme.granularity, scheme.zero)
        return Compatibility(Verdict.IMPOSSIBLE, "the layout holds 4 bits", str(wanted))
    if shape[0] % 8:
        return Compatibility(Verdict.IMPOSSIBLE, f"{shape[0]} outputs are not a multiple of 8")
    if not isinstance(stored_scheme(scheme, shape).granularity, PerGroup):
        reason = f"groups are needed, and {shape[1]} columns are not a multiple of {_SIZES[-1]}"
        return Compatibility(Verdict.IMPOSSIBLE, reason)
    return float16_scales(scheme) or grouped(scheme, shape) or Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Judge a model: one group size, no head or embedding. Symmetric and asymmetric layers mix."""
    if refusal := outside_blocks(layers):
        return refusal
    schemes = {
        module: (stored_scheme(layer.weight, shape), shape)
        for module, (layer, shape) in layers.items()
    }
    return differing_groups(schemes) or Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme with float16 scales, and coarser granularities as repeated groups."""
    granularity = scheme.granularity
    if not isinstance(granularity, PerGroup):
        fitting = (PerGroup(size) for size in _SIZES if shape[1] % size == 0)
        granularity = next(fitting, granularity)
    return Scheme(scheme.grid, granularity, scheme.zero, ScaleType.F16)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Announce the tensors of one module."""
    groups = stored_scheme(layer.weight, shape).groups(shape[1])
    return (
        StoredTensor(f"{module}.qweight", "I32", (shape[1], shape[0] // 8)),
        StoredTensor(f"{module}.qzeros", "I32", (groups, shape[0] // 8)),
        StoredTensor(f"{module}.scales", "F16", (groups, shape[0])),
    )


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Lay out codes, zero points and scales; see the module's table."""
    import torch

    from quantforge.packers.bits import unsigned

    scheme = stored_scheme(tensor.scheme, tensor.shape)
    possible(module, check_layer(LayerScheme(scheme), tensor.shape))
    tensor = convert(tensor, scheme)
    scales = tensor.parameters["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if not tensor.scheme.symmetric:
        zeros = tensor.parameters["zeros"].T
    return {
        f"{module}.qweight": _words(unsigned(tensor.codes, 4).T),
        f"{module}.qzeros": _words(zeros),
        f"{module}.scales": scales,
    }


def _words(codes: Tensor) -> Tensor:
    from quantforge.packers.bits import pack_rows

    rows, outputs = codes.shape
    return pack_rows(codes.reshape(rows, -1, 8)[..., list(ORDER)].reshape(rows, outputs), 4)


def _codes(words: Tensor) -> Tensor:
    from quantforge.packers.bits import unpack_rows

    rows, outputs = words.shape[0], words.shape[1] * 8
    nibbles = unpack_rows(words, 4, outputs).view(rows, -1, 8)
    return nibbles[..., list(_INVERSE)].view(rows, outputs).T.contiguous()


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read codes and parameters back."""
    from quantforge.packers.bits import signed
    from quantforge.packers.tensor import QuantizedTensor as Quantized

    module, scheme = layout.module, layout.scheme.weight
    require(described(tensors), announced(layout, packed_tensors))
    codes, zeros = _codes(tensors[f"{module}.qweight"]), _codes(tensors[f"{module}.qzeros"])
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
        codes = signed(codes, 4)
    return sound(Quantized(codes, parameters, scheme), f"{module}.scales")


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``config.json``, naming all kept linears unless it is the head alone."""
    modules = quantized_modules(plan, ".qweight")
    schemes = [
        stored_scheme(t.scheme.weight, t.matrix) for t in modules.values() if t.scheme is not None
    ]
    if not schemes:
        raise RefusedError("nothing is quantized", "choose --format plain")
    kept = skipped_with_mixtures(plan, config, modules)
    quantization = {
        "quant_method": KEY,
        "bits": 4,
        "group_size": schemes[0].group_size(0),
        "zero_point": not all(scheme.symmetric for scheme in schemes),
        "version": "gemm",
        INFO.skip_list_key: None if kept == [head_of(config)] else kept,
    }
    return {"config.json": config_json(config, half_dtype(plan, config), quantization)}


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
    found = quantization_config(config)
    version = str(found.get("version") or found.get("format") or "gemm").lower()
    bits = found.get("bits", found.get("w_bit"))
    size = found.get("group_size", found.get("q_group_size"))
    if version != "gemm" or bits != 4 or not isinstance(size, int):
        raise InputError(
            f"config.json: AWQ with version = {version!r}, bits = {bits!r}, group_size = {size!r}",
            "4 bits in the gemm layout are read",
        )
    zero = Zero.INT if found.get("zero_point", True) else Zero.NONE
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    not_excepted(found, INFO.skip_list_key, names)
    agree_on_head(found, "lm_head", names)
    for first, second in ONE_NAME:
        one_name(found, first, second)
    for name in names:
        agree(override(found, name), "bits", 4, f"{name} has 4 bits")
    return [_layout(name, size, zero, tensors) for name in names]


def _layout(
    module: str, size: int, zero: Zero, tensors: Mapping[str, StoredTensor]
) -> ModuleLayout:
    scale = scale_of(tensors, f"{module}.scales")
    columns, words = matrix(tensors, f"{module}.qweight")
    size = columns if size == -1 else size
    whole_groups(module, columns, size)
    scheme = LayerScheme(Scheme("int4", PerGroup(size), zero, scale))
    names = tuple(tensor.name for tensor in packed_tensors(module, scheme, (words * 8, columns)))
    layout = ModuleLayout(module, scheme, (words * 8, columns), names)
    require(tensors, announced(layout, packed_tensors))
    return layout
