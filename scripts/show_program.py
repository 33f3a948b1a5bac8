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
from quantforge_kernels.cpu import features, packed_integers
from quantforge_kernels.problem import Parameters, Problem

ROWS, COLUMNS = 64, 512


def weight(
    bits: int, group: int, zero: str
) -> tuple[Problem, torch.Tensor, dict[str, torch.Tensor]]:
    """Return a problem, and random codes and parameters."""
    generator = torch.Generator().manual_seed(0)
    problem = Problem(
        out_features=ROWS, in_features=COLUMNS, bits=bits, group_size=group,
        symmetric=zero == "centre", dtype=torch.bfloat16, device="cpu", minima=zero == "mins",
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
    return problem, codes, parameters


def form(problem: Problem, parameters: Parameters, feature: str, rows: int = 1) -> object:
    """Return the form that the program is made for."""
    stored = tuple((name, value.dtype) for name, value in parameters.items())
    return replace(packed_integers.form_of(problem, stored, feature), rows=rows)


def code(made_for: object) -> str:
    """Return LLVM's intermediate code of a product, repeated elements of constants left out."""
    from quantforge_kernels.cpu.integer_programs import multiply

    return re.sub(
        r"<(\w+ +[\w.+-]+)(?:, \1)+>", r"<\1, ...>", str(multiply(made_for, parallel=True))
    )


def assembly(made_for: object) -> str:
    """Return the assembly that LLVM makes of it for this processor."""
    from quantforge_kernels.cpu import compiler
    from quantforge_kernels.cpu.integer_programs import multiply

    machine = compiler.target_machine()
    text: str = machine.emit_assembly(
        compiler.optimized(str(multiply(made_for, parallel=False)), machine)
    )
    return text


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("form", "code", "assembly", "check"))
    parser.add_argument("--bits", type=int, default=4, choices=range(1, 9))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zero", default="centre", choices=("centre", "zeros", "mins"))
    parser.add_argument(
        "--rows", type=int, default=1, choices=range(1, packed_integers.TOGETHER + 1)
    )
    parser.add_argument("--feature", choices=features.FEATURES)
    asked = parser.parse_args()
    here = features.feature()
    feature = asked.feature or here
    if feature is None or (asked.what in {"assembly", "check"} and feature != here):
        parser.error(f"this processor's programs are for: {here}")
    if COLUMNS % asked.group:
        parser.error(f"--group {asked.group} does not divide {COLUMNS}")
    problem, codes, parameters = weight(asked.bits, asked.group, asked.zero)
    if packed_integers.blocks_of(problem, feature) is None:
        parser.error(f"groups of {asked.group} fill no vectors: the reference multiplies them")
    made_for = form(problem, parameters, feature, asked.rows)
    if asked.what == "form":
        print(made_for)
    elif asked.what == "code":
        print(code(made_for))
    elif asked.what == "assembly":
        print(assembly(made_for))
    else:
        packed = packed_integers.prepare(codes, parameters, problem)
        for name, value in packed.items():
            print(f"{name}: {value.dtype} {list(value.shape)}")
        x = torch.randn(asked.rows, COLUMNS).bfloat16()
        plain = fallback.prepare(codes, parameters, problem)
        wanted = fallback.product(x, fallback.decode_rows(plain, problem, slice(None)))
        found = packed_integers.matmul(x, packed, problem)
        print(
            f"relative error: {float((found.double() - wanted).norm() / wanted.norm()):.1e} (bfloat16)"
        )


if __name__ == "__main__":
    main()
