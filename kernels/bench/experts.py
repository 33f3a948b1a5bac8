"""Grouped products on a GPU, of the shapes of mixtures of experts; a part of `gpu.py`.

Every shape is the two products of an expert, gate with up and down, of all experts of a layer. Tokens are sent to
different experts at random, evenly: decoding a few sequences reads little more than the weights of as many experts as
there are pairs, and a prompt reads all of them. Beside it torch multiplies the same pairs in bfloat16
(``torch._grouped_mm``), where it can.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from timing import ROTATED_BYTES, problem, random_weights, seconds

from quantforge_kernels import fallback
from quantforge_kernels.grouped import GroupedProblem, Owners, by_matrix, stack
from quantforge_kernels.problem import Packed
from quantforge_kernels.select import select_grouped

# By name: experts, of a token, and (out, in) of gate with up and of down.
SHAPES = {
    "128 experts, 8 of a token, 768x2048": (128, 8, ((1536, 2048), (2048, 768))),
    "8 experts, 2 of a token, 14336x4096": (8, 2, ((28672, 4096), (4096, 14336))),
    "256 experts, 8 of a token, 2048x7168": (256, 8, ((4096, 7168), (7168, 2048))),
}
FORMS = ("int4 g128", "int8 g128", "nf4 g64", "fp8 128x128", "q4_k")
TOKENS = (1, 4, 16, 64, 512, 2048)
TURNS = 24  # of owners, drawn anew: what few tokens read would else stay in the cache


def owners_of(tokens: int, experts: int, each: int, seed: int = 0) -> Owners:
    """Send tokens to different experts at random."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=rng).topk(each).indices
    owners = Owners(index.cuda(), experts)
    assert len(owners.starts) == experts + 1  # sorted once, as for the two products of a layer
    return owners


def grouped(form: str, experts: int, shape: tuple[int, int]) -> tuple[GroupedProblem, Packed]:
    """Random weights of all experts, as the kernel that is chosen lays them out: one matrix again and again."""
    task = GroupedProblem(problem(form, shape, torch.bfloat16), experts)
    given = random_weights(task.each)
    return task, stack((given for _ in range(experts)), task, select_grouped(task))


def grouped_error(form: str, tokens: int) -> float:
    """The error of a small mixture relative to the reference in float64."""
    experts, each, shape = 16, 4, (1000, 2048)
    task = GroupedProblem(problem(form, shape, torch.bfloat16), experts)
    given = [random_weights(task.each) for _ in range(experts)]
    if "table" in given[0][1]:
        given = [(codes, values | {"table": given[0][1]["table"]}) for codes, values in given]
    chosen, plain = select_grouped(task), by_matrix(fallback.KERNEL)
    x, owners = (
        torch.randn(tokens, shape[1], device="cuda").bfloat16(),
        owners_of(tokens, experts, each),
    )
    y = chosen.matmul(x, owners, stack(iter(given), task, chosen), task)
    packed = stack(iter(given), task, plain)
    wanted = torch.empty(len(owners.pairs), shape[0], dtype=torch.float64, device="cuda")
    for number, pairs in owners.groups():
        one = {name: v if name == "table" else v[number] for name, v in packed.items()}
        weight = fallback.decode_rows(one, task.each, slice(None))
        wanted[pairs] = fallback.product(x[pairs // each], weight)
    return float((y.double() - wanted).norm() / wanted.norm())


def measure(part: dict[str, Any], rate: float, deadline: float) -> None:
    """Time every form, shape and number of tokens; bytes are those of the experts that own a token."""
    for name, (experts, each, shapes) in SHAPES.items():
        for shape in shapes:
            base = dense_times(experts, each, shape)
            for form in FORMS:
                if time.monotonic() > deadline:
                    part["cut short"] = f"{name}, {form}"
                    return
                task, packed = grouped(form, experts, shape)
                size = sum(value.nbytes for value in packed.values())
                rotated = [packed, *({k: v.clone() for k, v in packed.items()}
                                     for _ in range(ROTATED_BYTES // size))]  # fmt: skip
                for tokens in TOKENS:
                    sent = [owners_of(tokens, experts, each, turn) for turn in range(TURNS)]
                    x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
                    multiply = select_grouped(task).matmul
                    value = seconds([
                        partial(multiply, x, owners, rotated[turn % len(rotated)], task)
                        for turn, owners in enumerate(sent)
                    ])  # fmt: skip
                    active = sum(len(owners.pairs.unique()) for owners in sent) / TURNS
                    found = {
                        "seconds": value,
                        "bandwidth_share": size * active / experts / value / rate,
                    }
                    if tokens in base:
                        found["over_bf16"] = base[tokens] / value
                    part[f"{form}, {name}, out {shape[0]}, {tokens} tokens"] = found
                del packed, rotated


def dense_times(experts: int, each: int, shape: tuple[int, int]) -> dict[int, float]:
    """The grouped product of torch in bfloat16, of rows that are sorted already; empty where it has none."""
    multiply = getattr(torch, "_grouped_mm", None)
    if multiply is None:
        return {}
    weight = torch.randn(experts, *shape, device="cuda").bfloat16()
    found = {}
    for tokens in TOKENS:
        ends = [
            owners_of(tokens, experts, each, turn).starts[1:].contiguous() for turn in range(TURNS)
        ]
        x = torch.randn(tokens * each, shape[1], device="cuda").bfloat16()
        try:
            found[tokens] = seconds(
                [partial(multiply, x, weight.transpose(1, 2), offs=last) for last in ends]
            )
        except RuntimeError:
            return {}
    return found
