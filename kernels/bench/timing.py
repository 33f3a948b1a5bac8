"""Timing on a GPU: weights rotated through more memory than any cache, in a CUDA graph, by events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantforge_kernels.problem import Packed, Problem
from quantforge_kernels.select import select

ROTATED_BYTES = 256 << 20  # the L2 cache of an H200 holds 50 MB
REPEATS = 7

FORMS: dict[str, dict[str, object]] = {
    "int4 g128": {"bits": 4, "group_size": 128, "symmetric": True},
    "int4 g32 asym": {"bits": 4, "group_size": 32, "symmetric": False},
    "int8 g128": {"bits": 8, "group_size": 128, "symmetric": True},
    "int3 g128": {"bits": 3, "group_size": 128, "symmetric": True},
    "nf4 g64": {"bits": 4, "group_size": 64, "symmetric": True, "grid": "table"},
    "fp8 128x128": {
        "bits": 8, "group_size": 128, "symmetric": True, "grid": "fp8", "tile_rows": 128,
    },
    "fp8 e5m2": {"bits": 8, "group_size": 128, "symmetric": True, "grid": "e5m2"},
    "nvfp4": {
        "bits": 4, "group_size": 16, "symmetric": True, "grid": "table", "superblock": 256,
        "lower": "e4m3",
    },
    "q2_k": {
        "bits": 2, "group_size": 16, "symmetric": False, "minima": True, "superblock": 256,
        "lower": "pairs",
    },
    "q4_k": {
        "bits": 4, "group_size": 32, "symmetric": False, "minima": True, "superblock": 256,
    },
    "q6_k": {"bits": 6, "group_size": 16, "symmetric": True, "superblock": 256},
}  # fmt: skip


def problem(form: str, shape: tuple[int, int], dtype: torch.dtype) -> Problem:
    """State the product of a named form of weights."""
    fields: dict[str, object] = {"out_features": shape[0], "in_features": shape[1]}
    return Problem(**fields, **FORMS[form], dtype=dtype, device="cuda")  # type: ignore[arg-type]


def random_weights(task: Problem, device: str = "cuda") -> tuple[Tensor, dict[str, Tensor]]:
    """Return codes over their whole range, and parameters."""
    shape = (task.out_features, task.in_features)
    size = (-(-shape[0] // task.tile_rows), task.groups)
    codes = torch.randint(0, 2**task.bits, shape, dtype=torch.uint8, device=device)
    if task.grid in {"fp8", "e5m2"}:
        least = 0x7F if task.grid == "fp8" else 0x7C
        codes = torch.where((codes & 0x7F) >= least, 0, codes)
    parameters = {"scales": (torch.randn(size, device=device) * 0.01).half()}
    most = 16 if task.lower == "pairs" else 64
    if task.superblock:
        above = (shape[0], shape[1] // task.superblock)
        parameters["scales"] = torch.randint(0, most, size, device=device, dtype=torch.uint8)
        parameters["d"] = (torch.randn(above, device=device) * 0.01).half()
    if task.minima:
        parameters["mins"] = torch.randint(0, most, size, device=device, dtype=torch.uint8)
        parameters["dmin"] = (torch.randn(above, device=device) * 0.01).half()
    elif not task.symmetric:
        parameters["zeros"] = torch.randint(0, 2**task.bits, size, device=device, dtype=torch.uint8)
    if task.grid == "table":
        parameters["table"] = torch.linspace(-1, 1, 16, device=device)
    return codes, parameters


def copies(task: Problem) -> list[Packed]:
    """Pack the same problem so often that no cache holds it."""
    first = select(task).prepare(*random_weights(task), task)
    each = sum(part.nbytes for part in first.values())
    rest = range(ROTATED_BYTES // each)
    return [first, *({name: part.clone() for name, part in first.items()} for _ in rest)]


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of one call, from a graph of all of them: the median of some replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)  # type: ignore[no-untyped-call]
    del kept
    return median(times) / len(calls)


@triton.jit
def _read_kernel(data_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, count, step):
        total ^= tl.load(data_ptr + first + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_bandwidth(size: int = 2 << 30) -> float:
    """Return the bytes per second that a kernel which only reads can read: the best of some grids."""
    data = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    best = 0.0
    for programs, block in ((132 * 8, 1024), (132 * 16, 1024), (132 * 8, 4096), (132 * 16, 2048)):
        out = torch.empty(programs, dtype=torch.int32, device="cuda")

        def call(programs: int = programs, block: int = block, out: Tensor = out) -> object:
            return _read_kernel[(programs,)](data, out, data.numel(), BLOCK=block, num_warps=8)

        best = max(best, data.nbytes / seconds([call]))
    return best
