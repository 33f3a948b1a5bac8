"""Compile the kernels for a GPU that need not be there, and say what became of them.

    python kernels/bench/compiled.py [--capability 90] [--only NAME ...]

Prints JSON: for each variant the loads of 16 bytes from global memory (in PTX), the bytes of the
weight loads of other widths, instructions per weight of the longest loop (of the disassembled
machine code, where nvdisasm comes with Triton), and shared memory. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantforge_kernels.gpu import (
    attention_kernel,
    eight_bits,
    layer_kernels,
    plane_kernels,
)
from quantforge_kernels.gpu.plane_products import constants_of
from quantforge_kernels.problem import Problem


def main() -> None:
    """Compile every variant and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", nargs="*", default=None, choices=list(variants()))
    options = parser.parse_args()
    target = GPUTarget("cuda", options.capability, 32)
    names = options.only or list(variants())
    print(json.dumps({name: look(*variants()[name], target) for name in names}))


def shape(
    bits: int,
    group: int,
    symmetric: bool = True,
    grid: str = "int",
    tile_rows: int = 1,
    minima: bool = False,
    superblock: int = 0,
    lower: str = "",
) -> Problem:
    return Problem(
        8192, 8192, bits, group, symmetric, torch.bfloat16, "cuda", grid, tile_rows,
        minima=minima, superblock=superblock, lower=lower,
    )  # fmt: skip


def variants() -> dict[str, tuple[Any, ...]]:
    """Kernel, types of arguments, constants, warps, weights of a program's step."""
    found: dict[str, tuple[Any, ...]] = {}
    four, eight = shape(4, 128), shape(8, 128, grid="fp8", tile_rows=128)
    for name, form, mode in (
        ("int4 row, exponents", four, 1), ("int4 row, assembly", four, 2),
        ("int4 row, asymmetric g32", shape(4, 32, False), 2), ("int8 row", shape(8, 8192), 2),
        ("int2 row", shape(2, 64), 2), ("table row", shape(4, 64, grid="table"), 2),
        ("fp8 row", eight, 0), ("e5m2 row", shape(8, 8192, grid="e5m2"), 0),
        ("nvfp4 row", shape(4, 16, grid="table", superblock=8192, lower="e4m3"), 2),
        ("q2_k row", shape(2, 16, False, minima=True, superblock=256, lower="pairs"), 2),
        ("q4_k row", shape(4, 32, False, minima=True, superblock=256), 2),
        ("q6_k row", shape(6, 16, superblock=256), 2),
    ):  # fmt: skip
        constants = constants_of(form) | {
            "WHOLE": True, "EVEN": True, "MODE": mode, "EACH": 0, "BLOCK_N": 8, "BLOCK_K": 1024,
        }  # fmt: skip
        found[name] = (plane_kernels.matvec_kernel, packed_types(form), constants, 1, 8 * 1024)
        if form is four and mode == 2:
            found["int4 row, grouped"] = (
                *found[name][:2],
                constants | {"EACH": 8},
                *found[name][3:],
            )
    for name, form in (
        ("int4 rows", four), ("int4 rows, g32", shape(4, 32)), ("fp8 rows", eight),
        ("table rows", shape(4, 64, grid="table")),
        ("q4_k rows", shape(4, 32, False, minima=True, superblock=256)),
    ):  # fmt: skip
        constants = constants_of(form) | {
            "WHOLE": True, "AFTER": form.group_size == 128, "WIDEN": False, "MODE": 2, "EACH": 0,
            "BLOCK_E": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128,
        }  # fmt: skip
        found[name] = (plane_kernels.rows_kernel, packed_types(form), constants, 2, 64 * 128)
        if form is four:
            for width in (16, 64):
                grouped = constants | {"EACH": 8, "BLOCK_E": 128, "BLOCK_M": width}
                found[f"int4 rows, grouped, {width}"] = (
                    *found[name][:2],
                    grouped,
                    *found[name][3:],
                )
    found["int4 decode"] = (
        plane_kernels.decode_kernel,
        packed_types(four),
        constants_of(four) | {"MODE": 2, "BLOCK_N": 8, "BLOCK_K": 512},
        4,
        0,
    )
    for kind, word in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
        types = {
            "x_ptr": word, "x_scales": "*fp32", "codes_ptr": word, "scales_ptr": "*fp32",
            "out_ptr": "*bf16",
        }  # fmt: skip
        tile = {"GROUP": 8192, "TILE_ROWS": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
        found[f"{kind} x {kind}"] = (eight_bits.eight_bit_kernel, types, tile, 4, 64 * 128)
    kinds = {
        "16 bits": "*bf16",
        "int8": "*i8",
        "fp8": "*fp8e4nv",
        "int4": "*u8",
        "fp8 bytes": "*u8",
    }
    for index, (kind, word) in enumerate(kinds.items()):
        types = dict.fromkeys(("key_scales", "key_lows", "value_scales", "value_lows"), "*fp16")
        types |= {"q_ptr": "*bf16", "keys": word, "values": word, "scale": "fp32", "cap": "fp32"}
        types |= dict.fromkeys(("sums_ptr", "peaks_ptr", "totals_ptr"), "*fp32")
        types |= dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32")
        constants = {
            "GROUP": 4, "HEAD": 128, "PAGE": 32, **dict.fromkeys(("KEY_KIND", "VALUE_KIND"), index),
            **dict.fromkeys(("KEY_RUN", "VALUE_RUN"), 32 if kind == "int4" else 64),
            "BLOCK_G": 16, "BLOCK_H": 64, "CAPPED": False, "WINDOWED": False, "WIDEN": False,
        }  # fmt: skip
        found[f"attention, {kind}"] = (attention_kernel.paged_kernel, types, constants, 4, 0)
    types = dict.fromkeys(("sums_ptr", "peaks_ptr", "totals_ptr"), "*fp32") | {"out_ptr": "*bf16"}
    found["attention, combine"] = (
        attention_kernel.combine_kernel, types, {"HEAD": 128, "BLOCK_S": 8, "BLOCK": 128}, 4, 0,
    )  # fmt: skip
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), "*bf16")
    constants = {"OFFSET": 0.0, "ADD": True, "BLOCK": 4096}
    found["splits"] = (
        layer_kernels.splits_kernel, {"parts_ptr": "*fp32", "out_ptr": "*bf16"}, {"BLOCK": 512}, 4, 0,
    )  # fmt: skip
    found["norm"] = (layer_kernels.norm_kernel, types | {"epsilon": "fp32"}, constants, 4, 0)
    types = dict.fromkeys(("x_ptr", "cosine_ptr", "sine_ptr", "out_ptr"), "*bf16")
    found["rotary"] = (layer_kernels.rotary_kernel, types, {"HALF": 64, "BLOCK": 64}, 1, 0)
    types = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16")
    found["gate"] = (layer_kernels.gate_kernel, types, {"TANH": False, "BLOCK": 1024}, 4, 0)
    return found


def packed_types(form: Problem) -> dict[str, str]:
    """Types of the pointers of the kernels over planes."""
    lists = ("owners_ptr", "order_ptr", "starts_ptr")
    words = dict.fromkeys(("words0", "words1", "words2", *lists), "*i32")
    halves = dict.fromkeys(("scales", "d", "dmin"), "*fp16")
    if form.superblock:
        halves["scales"] = "*u8"
    return words | halves | {"x_ptr": "*bf16", "out_ptr": "*bf16", "table": "*fp32", "lows": "*u8"}


def look(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, weights: int,
    target: GPUTarget,
) -> dict[str, Any]:  # fmt: skip
    """Compile one variant and describe the result."""
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if kinds[name].startswith("*") or kinds[name] == "i32"
    }
    given = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=given, attrs=aligned)
    found = triton.compile(source, target=target, options={"num_warps": warps})
    ptx: str = found.asm["ptx"]
    loads = Counter(re.findall(r"ld\.global\S*?((?:\.v\d)?\.b\d+)", ptx))
    loads += Counter(re.findall(r"cp\.async\S* .*?, (0x10|16)\b", ptx))
    loop = longest_loop(found.asm["cubin"]) if weights else None
    per_weight = None if loop is None else round(sum(loop.values()) * 32 * warps / weights, 2)
    return {
        "loads": dict(loads),
        "loads_of_16_bytes": loads[".v4.b32"] + loads[".v2.b64"] + loads["16"] + loads["0x10"],
        "lop3_in_ptx": ptx.count("lop3"),
        "tensor_cores": "mma" in ptx,
        "instructions_per_weight": per_weight,
        "shared_bytes": found.metadata.shared,
    }


def longest_loop(cubin: bytes) -> Counter[str] | None:
    """Instructions of the longest backward branch, by name; None without a disassembler."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    names: list[str] = []
    best: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", line):
            names.append(code[1])
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and jump[1] in labels and len(names) - labels[jump[1]] > len(best):
                best = names[labels[jump[1]] :]
    return Counter(best)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
