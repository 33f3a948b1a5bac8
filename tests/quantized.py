"""Random quantized tensors, their values by the plain formula, and plans around them, for tests of formats."""

from __future__ import annotations

import torch

from quantforge.formats import Format
from quantforge.grids import ScaleType
from quantforge.notation import parse
from quantforge.packers.tensor import QuantizedTensor
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan
from quantforge.scheme import LayerScheme, Scheme

INTEGER_FORMATS = ("compressed-tensors", "gptq", "gptq_v2", "awq")
DTYPES = {
    ScaleType.F16: torch.float16,
    ScaleType.BF16: torch.bfloat16,
    ScaleType.F32: torch.float32,
}


def random_tensor(
    scheme: Scheme | str, shape: tuple[int, int], seed: int = 0, least_zero: int = 0
) -> QuantizedTensor:
    """Return random codes over the whole range, scales of both signs, and zero points from ``least_zero``."""
    scheme = parse(scheme) if isinstance(scheme, str) else scheme
    generator = torch.Generator().manual_seed(seed)
    size, levels = scheme.parameter_shape(shape), 1 << scheme.bits
    scales = (torch.rand(size, generator=generator) * 0.02 + 0.002) * torch.where(
        torch.rand(size, generator=generator) < 0.2, -1.0, 1.0
    )
    parameters = {"scales": scales.to(DTYPES[scheme.scale or ScaleType.F16])}
    codes = torch.randint(0, levels, shape, generator=generator, dtype=torch.uint8)
    if scheme.symmetric:
        codes = (codes.short() - levels // 2).to(torch.int8)
    else:
        parameters["zeros"] = torch.randint(
            least_zero, levels, size, generator=generator, dtype=torch.uint8
        )
    return QuantizedTensor(codes, parameters, scheme.with_scale(ScaleType.F16))


def dequantize_reference(tensor: QuantizedTensor) -> torch.Tensor:
    """Return ``(codes - zeros) * scales`` in float32, spelled out."""
    rows, columns = tensor.shape

    def spread(parameter: torch.Tensor) -> torch.Tensor:
        return (
            parameter.float().expand(rows, -1).repeat_interleave(columns // parameter.shape[1], 1)
        )

    zeros = spread(tensor.parameters["zeros"]) if "zeros" in tensor.parameters else 0
    return (tensor.codes.float() - zeros) * spread(tensor.parameters["scales"])


def bit_equal(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    """Whether two tensors are equal to the bit, types included."""
    pairs = [(first.codes, second.codes)]
    pairs += [(value, second.parameters[key]) for key, value in first.parameters.items()]
    return (
        first.scheme == second.scheme
        and first.parameters.keys() == second.parameters.keys()
        and all(a.dtype == b.dtype and torch.equal(a.double(), b.double()) for a, b in pairs)
    )


def quantized_plan(
    form: Format, name: str, scheme: str, shape: tuple[int, int], block: int
) -> TensorPlan:
    """Plan one quantized weight as the planner does."""
    layer = LayerScheme(parse(scheme).with_scale(form.default_scale_type("BF16")))
    stored = form.packed_tensors(name.removesuffix(".weight"), layer, shape)
    return TensorPlan(name, "BF16", shape, Action.QUANTIZE, "", layer, stored, block)


def unquantized_plan(name: str, shape: tuple[int, ...], block: int = -1) -> TensorPlan:
    """Plan one kept tensor."""
    stored = (StoredTensor(name, "BF16", shape),)
    return TensorPlan(name, "BF16", shape, Action.KEEP, "", outputs=stored, block=block)


def format_plan(form: Format, tensors: list[TensorPlan]) -> Plan:
    """Return a plan that holds what ``side_files`` reads."""
    return Plan("m", "llama", "rtn", (), "rtn", form.KEY, tuple(tensors), (), 0, 0)
