"""Print what a product with packed integers becomes on a processor: its form, LLVM's code, or the machine's.

    python scripts/show_program.py form [--bits 4] [--group 128] [--zero centre|zeros|mins] [--rows 1]
    python scripts/show_program.py code        # LLVM's intermediate code, as Python wrote it
    python scripts/show_program.py assembly    # what LLVM made of it for this processor
    python scripts/show_program.py check       # run it: the error against float64

The weight is random, 64 x 512. ``--feature`` prints form and code for a processor that is not this one. Elements of a
constant that repeat are printed once: ``<i16 15, ...>``. docs/cpu-programs.md goes through what is printed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

import torch

from quantforge_kernels import fallback
from quantforge_kernels.cpu import instruction_sets, packed_integers
from quantforge_kernels.matmul_spec import MatmulSpec, QuantParams

ROWS, COLUMNS = 64, 512


def random_weight(
    bits: int, group: int, zero: str
) -> tuple[MatmulSpec, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the specification of a product, and random codes and parameters."""
    generator = torch.Generator().manual_seed(0)
    matmul_spec = MatmulSpec(
        out_features=ROWS, in_features=COLUMNS, bits=bits, group_size=group,
        symmetric=zero == "centre", dtype=torch.bfloat16, device="cpu", has_minima=zero == "mins",
    )  # fmt: skip
    size = (ROWS, COLUMNS // group)
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    parameters = {"scales": (torch.rand(size, generator=generator) / 100 + 1e-3).half()}
    if zero == "zeros":
        parameters["zeros"] = torch.randint(
            0, 1 << bits, size, generator=generator, dtype=torch.uint8
        )
    elif zero == "mins":
        parameters["mins"] = torch.rand(size, generator=generator).half()
    return matmul_spec, codes, parameters


def program_spec(
    matmul_spec: MatmulSpec, parameters: QuantParams, instruction_set: str, rows: int = 1
) -> object:
    """Return what the program is generated for."""
    param_dtypes = tuple((name, value.dtype) for name, value in parameters.items())
    return replace(
        packed_integers.make_program_spec(matmul_spec, param_dtypes, instruction_set),
        shared_rows=rows,
    )


def llvm_code(spec: object) -> str:
    """Return LLVM's intermediate code of a product, without repeated elements of constants."""
    from quantforge_kernels.cpu.integer_programs import build_multiply

    return re.sub(
        r"<(\w+ +[\w.+-]+)(?:, \1)+>", r"<\1, ...>", str(build_multiply(spec, parallel=True))
    )


def assembly(spec: object) -> str:
    """Return the assembly that LLVM makes of it for this CPU."""
    from quantforge_kernels.cpu import compiler
    from quantforge_kernels.cpu.integer_programs import build_multiply

    machine = compiler.target_machine()
    text: str = machine.emit_assembly(
        compiler.optimize(str(build_multiply(spec, parallel=False)), machine)
    )
    return text


def main() -> None:
    """Print what the command line requests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("form", "code", "assembly", "check"))
    parser.add_argument("--bits", type=int, default=4, choices=range(1, 9))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zero", default="centre", choices=("centre", "zeros", "mins"))
    parser.add_argument(
        "--rows", type=int, default=1, choices=range(1, packed_integers.MAX_SHARED_ROWS + 1)
    )
    parser.add_argument("--feature", choices=instruction_sets.INSTRUCTION_SETS)
    options = parser.parse_args()
    cpu_instruction_set = instruction_sets.best_instruction_set()
    instruction_set = options.feature or cpu_instruction_set
    if instruction_set is None or (
        options.what in {"assembly", "check"} and instruction_set != cpu_instruction_set
    ):
        parser.error(f"this processor's programs are for: {cpu_instruction_set}")
    if COLUMNS % options.group:
        parser.error(f"--group {options.group} does not divide {COLUMNS}")
    matmul_spec, codes, parameters = random_weight(options.bits, options.group, options.zero)
    if packed_integers.column_blocks(matmul_spec, instruction_set) is None:
        parser.error(f"groups of {options.group} fill no vectors: the reference multiplies them")
    spec = program_spec(matmul_spec, parameters, instruction_set, options.rows)
    if options.what == "form":
        print(spec)
    elif options.what == "code":
        print(llvm_code(spec))
    elif options.what == "assembly":
        print(assembly(spec))
    else:
        packed = packed_integers.prepare(codes, parameters, matmul_spec)
        for name, value in packed.items():
            print(f"{name}: {value.dtype} {list(value.shape)}")
        x = torch.randn(options.rows, COLUMNS).bfloat16()
        reference_packed = fallback.prepare(codes, parameters, matmul_spec)
        reference = fallback.reference_product(
            x, fallback.decode_rows(reference_packed, matmul_spec, slice(None))
        )
        result = packed_integers.matmul(x, packed, matmul_spec)
        print(
            f"relative error: {float((result.double() - reference).norm() / reference.norm()):.1e} (bfloat16)"
        )


if __name__ == "__main__":
    main()
