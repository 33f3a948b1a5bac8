"""Time grouped products on a GPU with the shapes of MoE models; a step of `gpu.py`.

Every shape is the two products of an expert, gate with up and down, for all experts of a layer. Tokens are sent to
different experts at random, evenly: decoding a few sequences reads little more than the weights of as many experts as
there are pairs, and a prompt reads all of them. For comparison torch multiplies the same pairs in bfloat16
(``torch._grouped_mm``), where it can.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from timing import ROTATED_BYTES, make_spec, measure_seconds, random_weights

from quantforge_kernels import fallback
from quantforge_kernels.grouped import (
    ExpertRouting,
    GroupedMatmulSpec,
    make_looped_kernel,
    prepare_stacked,
)
from quantforge_kernels.matmul_spec import PackedWeight
from quantforge_kernels.select import select_grouped_kernel

# By name: experts, of a token, and (out, in) of gate with up and of down.
SHAPES = {
    "128 experts, 8 of a token, 768x2048": (128, 8, ((1536, 2048), (2048, 768))),
    "8 experts, 2 of a token, 14336x4096": (8, 2, ((28672, 4096), (4096, 14336))),
    "256 experts, 8 of a token, 2048x7168": (256, 8, ((4096, 7168), (7168, 2048))),
}
WEIGHT_FORMATS = ("int4 g128", "int8 g128", "nf4 g64", "fp8 128x128", "q4_k")
TOKENS = (1, 4, 16, 64, 512, 2048)
ROUTINGS = 24  # of owners, drawn anew: what few tokens read would else stay in the cache


def random_routing(tokens: int, experts: int, top_k: int, seed: int = 0) -> ExpertRouting:
    """Send tokens to different experts at random."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=rng).topk(top_k).indices
    routing = ExpertRouting(index.cuda(), experts)
    assert (
        len(routing.expert_starts) == experts + 1
    )  # sorted once, as for the two products of a layer
    return routing


def grouped(
    weight_format: str, experts: int, shape: tuple[int, int]
) -> tuple[GroupedMatmulSpec, PackedWeight]:
    """Return random weights of all experts, packed for the selected kernel; the same matrix is repeated."""
    spec = GroupedMatmulSpec(make_spec(weight_format, shape, torch.bfloat16), experts)
    weights = random_weights(spec.matrix_spec)
    return spec, prepare_stacked(
        (weights for _ in range(experts)), spec, select_grouped_kernel(spec)
    )


def grouped_error(weight_format: str, tokens: int) -> float:
    """The error of a small mixture relative to the reference in float64."""
    experts, top_k, shape = 16, 4, (1000, 2048)
    spec = GroupedMatmulSpec(make_spec(weight_format, shape, torch.bfloat16), experts)
    weights = [random_weights(spec.matrix_spec) for _ in range(experts)]
    if "table" in weights[0][1]:
        weights = [(codes, values | {"table": weights[0][1]["table"]}) for codes, values in weights]
    chosen, plain = select_grouped_kernel(spec), make_looped_kernel(fallback.KERNEL)
    x, routing = (
        torch.randn(tokens, shape[1], device="cuda").bfloat16(),
        random_routing(tokens, experts, top_k),
    )
    y = chosen.matmul(x, routing, prepare_stacked(iter(weights), spec, chosen), spec)
    packed = prepare_stacked(iter(weights), spec, plain)
    reference = torch.empty(
        len(routing.expert_of_pair), shape[0], dtype=torch.float64, device="cuda"
    )
    for number, pairs in routing.pairs_by_expert():
        expert_packed = {name: v if name == "table" else v[number] for name, v in packed.items()}
        weight = fallback.decode_rows(expert_packed, spec.matrix_spec, slice(None))
        reference[pairs] = fallback.reference_product(x[pairs // top_k], weight)
    return float((y.double() - reference).norm() / reference.norm())


def measure(part: dict[str, Any], bandwidth_rate: float, deadline: float) -> None:
    """Time every form, shape and number of tokens; bytes are those of the experts that own a token."""
    for name, (experts, top_k, shapes) in SHAPES.items():
        for shape in shapes:
            base = time_dense_products(experts, top_k, shape)
            for weight_format in WEIGHT_FORMATS:
                if time.monotonic() > deadline:
                    part["cut short"] = f"{name}, {weight_format}"
                    return
                spec, packed = grouped(weight_format, experts, shape)
                size = sum(value.nbytes for value in packed.values())
                rotated = [packed, *({k: v.clone() for k, v in packed.items()}
                                     for _ in range(ROTATED_BYTES // size))]  # fmt: skip
                for tokens in TOKENS:
                    routings = [
                        random_routing(tokens, experts, top_k, seed) for seed in range(ROUTINGS)
                    ]
                    x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
                    multiply = select_grouped_kernel(spec).matmul
                    value = measure_seconds([
                        partial(multiply, x, routing, rotated[seed % len(rotated)], spec)
                        for seed, routing in enumerate(routings)
                    ])  # fmt: skip
                    active = (
                        sum(len(routing.expert_of_pair.unique()) for routing in routings) / ROUTINGS
                    )
                    results = {
                        "seconds": value,
                        "bandwidth_share": size * active / experts / value / bandwidth_rate,
                    }
                    if tokens in base:
                        results["over_bf16"] = base[tokens] / value
                    part[f"{weight_format}, {name}, out {shape[0]}, {tokens} tokens"] = results
                del packed, rotated


def time_dense_products(experts: int, top_k: int, shape: tuple[int, int]) -> dict[int, float]:
    """The grouped product of torch in bfloat16, of rows that are sorted already; empty where it has none."""
    multiply = getattr(torch, "_grouped_mm", None)
    if multiply is None:
        return {}
    weight = torch.randn(experts, *shape, device="cuda").bfloat16()
    results = {}
    for tokens in TOKENS:
        ends = [
            random_routing(tokens, experts, top_k, seed).expert_starts[1:].contiguous()
            for seed in range(ROUTINGS)
        ]
        x = torch.randn(tokens * top_k, shape[1], device="cuda").bfloat16()
        try:
            results[tokens] = measure_seconds(
                [partial(multiply, x, weight.transpose(1, 2), offs=last) for last in ends]
            )
        except RuntimeError:
            return {}
    return results
