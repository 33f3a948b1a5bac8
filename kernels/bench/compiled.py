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
    layer_kernels,
    plane_kernels,
    w8a8_kernel,
)
from quantforge_kernels.gpu.plane_products import kernel_constants
from quantforge_kernels.matmul_spec import MatmulSpec


def main() -> None:
    """Compile every variant and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", nargs="*", default=None, choices=list(variants()))
    options = parser.parse_args()
    target = GPUTarget("cuda", options.capability, 32)
    names = options.only or list(variants())
    print(json.dumps({name: compile_variant(*variants()[name], target) for name in names}))


def make_spec(
    bits: int,
    group: int,
    symmetric: bool = True,
    grid: str = "int",
    tile_rows: int = 1,
    has_minima: bool = False,
    superblock_size: int = 0,
    lower_encoding: str = "",
) -> MatmulSpec:
    return MatmulSpec(
        8192, 8192, bits, group, symmetric, torch.bfloat16, "cuda", grid, tile_rows,
        has_minima=has_minima, superblock_size=superblock_size, lower_encoding=lower_encoding,
    )  # fmt: skip


def variants() -> dict[str, tuple[Any, ...]]:
    """Return kernel, argument types, constants, warps and weights per loop step of each variant, by name."""
    variants_by_name: dict[str, tuple[Any, ...]] = {}
    four, eight = make_spec(4, 128), make_spec(8, 128, grid="fp8", tile_rows=128)
    for name, spec, mode in (
        ("int4 row, exponents", four, 1), ("int4 row, assembly", four, 2),
        ("int4 row, asymmetric g32", make_spec(4, 32, False), 2), ("int8 row", make_spec(8, 8192), 2),
        ("int2 row", make_spec(2, 64), 2), ("table row", make_spec(4, 64, grid="table"), 2),
        ("fp8 row", eight, 0), ("e5m2 row", make_spec(8, 8192, grid="e5m2"), 0),
        ("nvfp4 row", make_spec(4, 16, grid="table", superblock_size=8192, lower_encoding="e4m3"), 2),
        ("q2_k row", make_spec(2, 16, False, has_minima=True, superblock_size=256, lower_encoding="pairs"), 2),
        ("q4_k row", make_spec(4, 32, False, has_minima=True, superblock_size=256), 2),
        ("q6_k row", make_spec(6, 16, superblock_size=256), 2),
    ):  # fmt: skip
        constants = kernel_constants(spec) | {
            "WORD_IN_GROUP": True, "UNMASKED": True, "FIELD_MODE": mode, "TOP_K": 0, "BLOCK_N": 8, "BLOCK_K": 1024,
        }  # fmt: skip
        variants_by_name[name] = (
            plane_kernels.matvec_kernel,
            packed_types(spec),
            constants,
            1,
            8 * 1024,
        )
        if spec is four and mode == 2:
            variants_by_name["int4 row, grouped"] = (
                *variants_by_name[name][:2],
                constants | {"TOP_K": 8},
                *variants_by_name[name][3:],
            )
    for name, spec in (
        ("int4 rows", four), ("int4 rows, g32", make_spec(4, 32)), ("fp8 rows", eight),
        ("table rows", make_spec(4, 64, grid="table")),
        ("q4_k rows", make_spec(4, 32, False, has_minima=True, superblock_size=256)),
    ):  # fmt: skip
        constants = kernel_constants(spec) | {
            "WORD_IN_GROUP": True, "SCALE_AFTER_DOT": spec.group_size == 128, "DOT_IN_FLOAT32": False,
            "FIELD_MODE": 2, "TOP_K": 0, "BLOCK_E": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128,
        }  # fmt: skip
        variants_by_name[name] = (
            plane_kernels.matmul_kernel,
            packed_types(spec),
            constants,
            2,
            64 * 128,
        )
        if spec is four:
            for width in (16, 64):
                grouped = constants | {"TOP_K": 8, "BLOCK_E": 128, "BLOCK_M": width}
                variants_by_name[f"int4 rows, grouped, {width}"] = (
                    *variants_by_name[name][:2],
                    grouped,
                    *variants_by_name[name][3:],
                )
    variants_by_name["int4 decode"] = (
        plane_kernels.decode_kernel,
        packed_types(four),
        kernel_constants(four) | {"FIELD_MODE": 2, "BLOCK_N": 8, "BLOCK_K": 512},
        4,
        0,
    )
    for kind, pointer_type in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
        types = {
            "x_ptr": pointer_type, "x_scales": "*fp32", "codes_ptr": pointer_type, "scales_ptr": "*fp32",
            "out_ptr": "*bf16",
        }  # fmt: skip
        tile = {"GROUP": 8192, "TILE_ROWS": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
        variants_by_name[f"{kind} x {kind}"] = (
            w8a8_kernel.w8a8_matmul_kernel,
            types,
            tile,
            4,
            64 * 128,
        )
    types_by_name = {
        "16 bits": "*bf16",
        "int8": "*i8",
        "fp8": "*fp8e4nv",
        "int4": "*u8",
        "fp8 bytes": "*u8",
    }
    for index, (kind, pointer_type) in enumerate(types_by_name.items()):
        types = dict.fromkeys(("key_scales", "key_minima", "value_scales", "value_minima"), "*fp16")
        types |= {
            "q_ptr": "*bf16",
            "keys": pointer_type,
            "values": pointer_type,
            "scale": "fp32",
            "cap": "fp32",
        }
        types |= dict.fromkeys(("sums_ptr", "maxima_ptr", "denominators_ptr"), "*fp32")
        types |= dict.fromkeys(("page_table_ptr", "lengths_ptr"), "*i32")
        constants = {
            "GROUP_SIZE": 4, "HEAD_DIM": 128, "PAGE_SIZE": 32, **dict.fromkeys(("KEY_KIND", "VALUE_KIND"), index),
            **dict.fromkeys(("KEY_SCALE_WIDTH", "VALUE_SCALE_WIDTH"), 32 if kind == "int4" else 64),
            "GROUP_BLOCK": 16, "HALF_BLOCK": 64, "HAS_SOFTCAP": False, "HAS_WINDOW": False, "DOT_IN_FLOAT32": False,
        }  # fmt: skip
        variants_by_name[f"attention, {kind}"] = (
            attention_kernel.paged_attention_kernel,
            types,
            constants,
            4,
            0,
        )
    types = dict.fromkeys(("sums_ptr", "maxima_ptr", "denominators_ptr"), "*fp32") | {
        "out_ptr": "*bf16"
    }
    variants_by_name["attention, combine"] = (
        attention_kernel.combine_splits_kernel, types, {"HEAD_DIM": 128, "SPLIT_BLOCK": 8, "BLOCK": 128}, 4, 0,
    )  # fmt: skip
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), "*bf16")
    constants = {"OFFSET": 0.0, "ADD": True, "BLOCK": 4096}
    variants_by_name["splits"] = (
        layer_kernels.add_splits_kernel, {"parts_ptr": "*fp32", "out_ptr": "*bf16"}, {"BLOCK": 512}, 4, 0,
    )  # fmt: skip
    variants_by_name["norm"] = (
        layer_kernels.add_rms_norm_kernel,
        types | {"epsilon": "fp32"},
        constants,
        4,
        0,
    )
    types = dict.fromkeys(("x_ptr", "cosine_ptr", "sine_ptr", "out_ptr"), "*bf16")
    variants_by_name["rotary"] = (
        layer_kernels.rotary_kernel,
        types,
        {"HALF": 64, "BLOCK": 64},
        1,
        0,
    )
    types = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16")
    variants_by_name["gate"] = (
        layer_kernels.gate_kernel,
        types,
        {"TANH": False, "BLOCK": 1024},
        4,
        0,
    )
    return variants_by_name


def packed_types(spec: MatmulSpec) -> dict[str, str]:
    """Return the pointer types of the kernels that read packed weights."""
    routing_pointers = ("experts_ptr", "order_ptr", "starts_ptr")
    words = dict.fromkeys(("words0", "words1", "words2", *routing_pointers), "*i32")
    float16_pointers = dict.fromkeys(("scales", "d", "dmin"), "*fp16")
    if spec.superblock_size:
        float16_pointers["scales"] = "*u8"
    return (
        words
        | float16_pointers
        | {"x_ptr": "*bf16", "out_ptr": "*bf16", "table": "*fp32", "minima": "*u8"}
    )


def compile_variant(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, weights: int,
    target: GPUTarget,
) -> dict[str, Any]:  # fmt: skip
    """Compile one variant and describe the result."""
    names = kernel.arg_names
    types_by_name = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if types_by_name[name].startswith("*") or types_by_name[name] == "i32"
    }
    constants_by_position = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(
        fn=kernel, signature=types_by_name, constexprs=constants_by_position, attrs=aligned
    )
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    ptx: str = compiled.asm["ptx"]
    loads = Counter(re.findall(r"ld\.global\S*?((?:\.v\d)?\.b\d+)", ptx))
    loads += Counter(re.findall(r"cp\.async\S* .*?, (0x10|16)\b", ptx))
    loop = longest_loop(compiled.asm["cubin"]) if weights else None
    per_weight = None if loop is None else round(sum(loop.values()) * 32 * warps / weights, 2)
    return {
        "loads": dict(loads),
        "loads_of_16_bytes": loads[".v4.b32"] + loads[".v2.b64"] + loads["16"] + loads["0x10"],
        "lop3_in_ptx": ptx.count("lop3"),
        "tensor_cores": "mma" in ptx,
        "instructions_per_weight": per_weight,
        "shared_bytes": compiled.metadata.shared,
    }


def longest_loop(cubin: bytes) -> Counter[str] | None:
    """Count the instructions of the longest loop, by name; None if there is no disassembler."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    names: list[str] = []
    longest: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", line):
            names.append(code[1])
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if jump and jump[1] in labels and len(names) - labels[jump[1]] > len(longest):
                longest = names[labels[jump[1]] :]
    return Counter(longest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
