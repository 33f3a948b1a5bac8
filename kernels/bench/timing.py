"""Time GPU kernels with CUDA graphs and events, rotating weights through more memory than any cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantforge_kernels.matmul_spec import MatmulSpec, PackedWeight
from quantforge_kernels.select import select_kernel

ROTATED_BYTES = 256 << 20  # the L2 cache of an H200 holds 50 MB
REPEATS = 7

WEIGHT_FORMATS: dict[str, dict[str, object]] = {
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
        "bits": 4, "group_size": 16, "symmetric": True, "grid": "table", "superblock_size": 256,
        "lower_encoding": "e4m3",
    },
    "q2_k": {
        "bits": 2, "group_size": 16, "symmetric": False, "has_minima": True, "superblock_size": 256,
        "lower_encoding": "pairs",
    },
    "q4_k": {
        "bits": 4, "group_size": 32, "symmetric": False, "has_minima": True, "superblock_size": 256,
    },
    "q6_k": {"bits": 6, "group_size": 16, "symmetric": True, "superblock_size": 256},
}  # fmt: skip


def make_spec(weight_format: str, shape: tuple[int, int], dtype: torch.dtype) -> MatmulSpec:
    """Return the specification of a product with a named weight format."""
    fields: dict[str, object] = {"out_features": shape[0], "in_features": shape[1]}
    return MatmulSpec(**fields, **WEIGHT_FORMATS[weight_format], dtype=dtype, device="cuda")  # type: ignore[arg-type]


def random_weights(spec: MatmulSpec, device: str = "cuda") -> tuple[Tensor, dict[str, Tensor]]:
    """Return random codes over their whole range, and random parameters."""
    shape = (spec.out_features, spec.in_features)
    size = (-(-shape[0] // spec.tile_rows), spec.groups_per_row)
    codes = torch.randint(0, 2**spec.bits, shape, dtype=torch.uint8, device=device)
    if spec.grid in {"fp8", "e5m2"}:
        first_nan = 0x7F if spec.grid == "fp8" else 0x7C
        codes = torch.where((codes & 0x7F) >= first_nan, 0, codes)
    parameters = {"scales": (torch.randn(size, device=device) * 0.01).half()}
    max_code = 16 if spec.lower_encoding == "pairs" else 64
    if spec.superblock_size:
        superblock_shape = (shape[0], shape[1] // spec.superblock_size)
        parameters["scales"] = torch.randint(0, max_code, size, device=device, dtype=torch.uint8)
        parameters["d"] = (torch.randn(superblock_shape, device=device) * 0.01).half()
    if spec.has_minima:
        parameters["mins"] = torch.randint(0, max_code, size, device=device, dtype=torch.uint8)
        parameters["dmin"] = (torch.randn(superblock_shape, device=device) * 0.01).half()
    elif not spec.symmetric:
        parameters["zeros"] = torch.randint(0, 2**spec.bits, size, device=device, dtype=torch.uint8)
    if spec.grid == "table":
        parameters["table"] = torch.linspace(-1, 1, 16, device=device)
    return codes, parameters


def pack_copies(spec: MatmulSpec) -> list[PackedWeight]:
    """Pack so many copies of the same weights that no cache holds them."""
    original = select_kernel(spec).prepare(*random_weights(spec), spec)
    num_bytes = sum(tensor.nbytes for tensor in original.values())
    extra_copies = range(ROTATED_BYTES // num_bytes)
    return [
        original,
        *({name: tensor.clone() for name, tensor in original.items()} for _ in extra_copies),
    ]


def measure_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of one call, from a CUDA graph of all calls: the median of several replays."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)  # type: ignore[no-untyped-call]
    del outputs
    return median(times) / len(calls)


@triton.jit
def _read_kernel(data_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, count, step):
        total ^= tl.load(data_ptr + first + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_bandwidth(size: int = 2 << 30) -> float:
    """Return the bytes per second of a kernel that only reads: the best of several launch grids."""
    data = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    best = 0.0
    for programs, block in ((132 * 8, 1024), (132 * 16, 1024), (132 * 8, 4096), (132 * 16, 2048)):
        out = torch.empty(programs, dtype=torch.int32, device="cuda")

        def call(programs: int = programs, block: int = block, out: Tensor = out) -> object:
            return _read_kernel[(programs,)](data, out, data.numel(), BLOCK=block, num_warps=8)

        best = max(best, data.nbytes / measure_seconds([call]))
    return best
