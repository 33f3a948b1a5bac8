"""Everything that has to be known of the kernels on a GPU, in one run of less than 8 minutes.

    scripts/gpu_benchmark [--out FILE.json] [--minutes 8] [--part NAME ...]

Parts, in this order; what was found is written after each, so that a run that is cut short keeps it:
``correctness`` (against float64, and inline assembly against plain Triton to the bit), ``bandwidth``
(of a kernel that only reads), ``kernels`` (real shapes, 1 to 64 rows, weights rotated through more
than any cache, beside torch's fp16 product and what else is there), ``experts`` (grouped products of
the shapes of mixtures, 1 to 2048 tokens, beside torch's own in bfloat16), ``decode`` (a random llama of
the shape of 8 billion weights, batch 1, one CUDA graph per token).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from timing import (
    ROTATED_BYTES,
    WEIGHT_FORMATS,
    make_spec,
    measure_seconds,
    pack_copies,
    random_weights,
    read_bandwidth,
)
from torch import Tensor
from triton.errors import TritonError

from quantforge_kernels import attention, fallback, kv
from quantforge_kernels.gpu import plane_products, w8a8_products
from quantforge_kernels.kv_row_layout import CACHE_KINDS
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.score_options import ScoreOptions
from quantforge_kernels.select import select_kernel

SHAPES = ((4096, 4096), (4096, 14336), (8192, 8192), (14336, 4096))  # out, in
ROWS = (1, 2, 4, 8, 16, 32, 64)
TIMED_FORMATS = (
    "int4 g128",
    "int4 g32 asym",
    "int8 g128",
    "nf4 g64",
    "fp8 128x128",
    "q4_k",
    "q6_k",
)
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
DECODE_SCHEMES = {
    "bf16": None, "int4": "int4:g128:sym:bf16", "int8": "int8:row:sym:bf16",
    "nf4": "nf4:g64:sym:f32", "fp8": "fp8:row:sym:f32",
}  # fmt: skip
Results = dict[str, Any]
FAILURES = (RuntimeError, ValueError, ImportError, AssertionError, TritonError)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark.json"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--part", nargs="*", choices=list(STEPS), default=list(STEPS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing is measured")
    deadline = time.monotonic() + 60 * options.minutes
    torch.manual_seed(0)
    results: Results = {
        "schema": "quantforge.gpu-benchmark/1", "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "seconds": {},
    }  # fmt: skip
    for name in options.part:
        start = time.monotonic()
        results[name] = {}
        try:
            STEPS[name](results, results[name], deadline)
        except FAILURES as error:
            results[name]["error"] = f"{type(error).__name__}: {error}"
        results["seconds"][name] = round(time.monotonic() - start, 1)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {results['measure_seconds'][name]} s", file=sys.stderr, flush=True)
    print(format_results(results))


def relative_error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


def correctness(_found: Results, step_results: Results, deadline: float) -> None:
    """Compare the kernels with the reference for all weight formats, some numbers of rows and both types."""
    for weight_format in WEIGHT_FORMATS:
        for rows in (1, 3, 16, 70):
            for dtype in (torch.float16, torch.bfloat16):
                if time.monotonic() > deadline:
                    return
                spec = make_spec(weight_format, (1000, 2048), dtype)
                step_results[f"{weight_format}, {rows} rows, {dtype}"] = product_error(spec, rows)
    for dtype in (torch.float16, torch.bfloat16):
        step_results[f"assembly equals plain Triton, {dtype}"] = same_bits_in_both_modes(dtype)
    for kind, grid in (("int8", "int"), ("fp8", "fp8")):
        spec = MatmulSpec(1000, 2048, 8, 2048, True, torch.bfloat16, "cuda", grid, 1, kind)
        if w8a8_products.accepts(spec):
            codes, parameters = random_weights(spec)
            x = torch.randn(5, 2048, device="cuda").bfloat16()
            y = w8a8_products.matmul(x, w8a8_products.prepare(codes, parameters, spec), spec)
            weight = fallback.decode_rows(
                fallback.prepare(codes, parameters, spec), spec, slice(None)
            )
            step_results[f"{kind} x {kind}"] = relative_error(
                y, fallback.reference_product(x, weight, kind)
            )
    from experts import WEIGHT_FORMATS as GROUPED
    from experts import grouped_error

    for weight_format in GROUPED:
        for tokens in (1, 8, 200):
            step_results[f"experts, {weight_format}, {tokens} tokens"] = grouped_error(
                weight_format, tokens
            )
    for kind in CACHE_KINDS:
        step_results[f"attention, cache {kind or '16 bits'}"] = attention_error(kind, kind)
    step_results["attention, keys int8, values int4"] = attention_error("int8", "int4")


def product_error(spec: MatmulSpec, rows: int) -> float:
    codes, parameters = random_weights(spec)
    x = torch.randn(rows, spec.in_features, device="cuda").to(spec.dtype)
    kernel = select_kernel(spec)
    y = kernel.matmul(x, kernel.prepare(codes, parameters, spec), spec)
    weight = fallback.decode_rows(fallback.prepare(codes, parameters, spec), spec, slice(None))
    return relative_error(y, fallback.reference_product(x, weight))


def same_bits_in_both_modes(dtype: torch.dtype) -> bool:
    spec = make_spec("int4 g128", (4096, 4096), dtype)
    packed = plane_products.prepare(*random_weights(spec), spec)
    x = torch.randn(1, 4096, device="cuda").to(dtype)
    results = [
        plane_products.launch(
            "matvec", x, packed, spec,
            plane_products.Tile(8, 1024, 1, 1), mode,
        )
        for mode in (1, 2)
    ]  # fmt: skip
    return torch.equal(*results)


def attention_error(*kinds: str) -> float:
    shape = (64, kv.PAGE_SIZE, 8, 128)
    stores = [kv.encode(torch.randn(shape, device="cuda").bfloat16(), kind) for kind in kinds]
    q = torch.randn(2, 32, 128, device="cuda").bfloat16()
    table = torch.randperm(64, device="cuda").view(2, 32).int()
    lengths = torch.tensor([700, 1024], device="cuda", dtype=torch.int32)
    scores = ScoreOptions(128**-0.5)
    arguments = (q, *stores, table, lengths, scores)
    y = attention.attend_triton(*arguments)
    return relative_error(y, attention.attend_reference(*arguments).double())


def bandwidth(_found: Results, step_results: Results, _deadline: float) -> None:
    """Measure the memory bandwidth of reading."""
    step_results["bytes_per_second"] = read_bandwidth()


def kernels(results: Results, step_results: Results, deadline: float) -> None:
    """Time each weight format, shape and number of rows; bytes are those of the packed weights."""
    bandwidth_rate = results.get("bandwidth", {}).get("bytes_per_second") or read_bandwidth()
    for shape in SHAPES:
        base = time_dense_products(shape)
        for peer, measured in PEERS.items():
            try:
                times = measured(shape)
            except FAILURES as error:
                step_results[f"{peer}: not measured"] = f"{type(error).__name__}: {error}"[:200]
                continue
            for rows, value in times.items():
                step_results[f"{peer}, {shape[0]}x{shape[1]}, {rows}"] = {
                    "seconds": value, "over_fp16": base[rows] / value,
                }  # fmt: skip
        for weight_format in TIMED_FORMATS:
            if time.monotonic() > deadline - 120:  # the last part needs its time
                step_results["cut short"] = f"{shape}, {weight_format}"
                return
            weights = pack_copies(make_spec(weight_format, shape, torch.float16))
            nbytes = sum(value.nbytes for value in weights[0].values())
            for rows in ROWS:
                spec = make_spec(weight_format, shape, torch.float16)
                x = torch.randn(rows, shape[1], device="cuda").half()
                multiply = select_kernel(spec).matmul
                value = measure_seconds([partial(multiply, x, packed, spec) for packed in weights])
                step_results[f"{weight_format}, {shape[0]}x{shape[1]}, {rows}"] = {
                    "seconds": value, "over_fp16": base[rows] / value,
                    "bandwidth_share": nbytes / value / bandwidth_rate,
                }  # fmt: skip


def time_dense_products(shape: tuple[int, int]) -> dict[int, float]:
    """Time the fp16 matrix product of torch."""
    count = 1 + ROTATED_BYTES // (2 * shape[0] * shape[1])
    weights = [torch.randn(shape, device="cuda").half() for _ in range(count)]
    results = {}
    for rows in ROWS:
        x = torch.randn(rows, shape[1], device="cuda").half()
        results[rows] = measure_seconds(
            [partial(torch.nn.functional.linear, x, w) for w in weights]
        )
    return results


def time_tinygemm(shape: tuple[int, int]) -> dict[int, float]:
    """Time torch's own 4-bit GPU kernel, in bfloat16."""
    aten = torch.ops.aten
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, device="cuda")
    words = aten._convert_weight_to_int4pack(codes, 8)
    table = torch.randn(shape[1] // 128, shape[0], 2, device="cuda").bfloat16()
    packed = [words.clone() for _ in range(1 + ROTATED_BYTES // (shape[0] * shape[1] // 2))]
    results = {}
    for rows in ROWS:
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        results[rows] = measure_seconds(
            [partial(aten._weight_int4pack_mm, x, weight, 128, table) for weight in packed]
        )
    return results


def bitsandbytes(shape: tuple[int, int]) -> dict[int, float]:
    """Time the NF4 kernel of bitsandbytes for one row."""
    import bitsandbytes.functional as library

    weight = torch.randn(shape, device="cuda").half()
    count = 1 + ROTATED_BYTES // (shape[0] * shape[1] // 2)
    pairs = [library.quantize_4bit(weight, quant_type="nf4") for _ in range(count)]
    x = torch.randn(1, shape[1], device="cuda").half()
    calls = [partial(library.gemv_4bit, x, data.t(), state=state) for data, state in pairs]
    return {1: measure_seconds(calls)}


PEERS: dict[str, Callable[[tuple[int, int]], dict[int, float]]] = {
    "tinygemm int4 g128": time_tinygemm, "bitsandbytes nf4 g64": bitsandbytes,
}  # fmt: skip


def experts(results: Results, step_results: Results, deadline: float) -> None:
    """Time grouped products; see `experts.measure`."""
    from experts import measure

    bandwidth_rate = results.get("bandwidth", {}).get("bytes_per_second") or read_bandwidth()
    measure(step_results, bandwidth_rate, deadline - 60)


def decode(results: Results, step_results: Results, deadline: float) -> None:
    """Measure tokens per second of a random model with 8 billion weights, and its share of the roofline."""
    from decode_8b import measure_decode

    bandwidth_rate = results.get("bandwidth", {}).get("bytes_per_second") or read_bandwidth()
    for name, scheme in DECODE_SCHEMES.items():
        if time.monotonic() > deadline - 20:
            step_results["cut short"] = name
            return
        step_results[name] = measure_decode(LLAMA_8B, scheme, bandwidth_rate)
        if "bf16" in step_results:
            step_results[name]["over_bf16"] = (
                step_results[name]["tokens_per_second"] / step_results["bf16"]["tokens_per_second"]
            )
        torch.cuda.empty_cache()


STEPS: dict[str, Callable[[Results, Results, float], None]] = {
    "correctness": correctness, "bandwidth": bandwidth, "kernels": kernels, "experts": experts,
    "decode": decode,
}  # fmt: skip


def format_results(results: Results) -> str:
    """Format all results as text."""
    lines = [f"{results['device']}, torch {results['torch']}, triton {results['triton']}"]
    for name in STEPS:
        lines.append(f"\n{name}")
        for key, value in results.get(name, {}).items():
            text = str(value)
            if isinstance(value, dict):
                text = ", ".join(f"{what} {number:.4g}" for what, number in value.items())
            lines.append(f"  {key}: {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
