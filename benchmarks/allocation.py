"""Allocated mixtures against uniform widths: KL divergence at the same bytes, both rounded by our gptq.

    python benchmarks/allocation.py --model MODEL --calibration cal.txt --evaluation eval.txt [--targets 3.0,3.5]
                                    [--format gguf --mixtures Q2_K,Q3_K_M] [--tune 0] [--seeds 1] [--out FILE.json]

Errors are measured once for each seed of the calibration rows. Of a target are printed: bits per weight inside of
blocks, the divergence that was expected and the one that `evaluate` measures, and its ratio to the best of uniform
widths and, of GGUF, of llama.cpp's mixtures, whose logarithm is interpolated over the bits. The
embedding is no part of the bits; of GGUF, it is in Q6_K, and in what llama-quantize gives it in its mixtures.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gguf import GGUFReader

from quantforge import api
from quantforge.execution import candidate_errors
from quantforge.planning.allocation import ALL_LINEARS
from quantforge.recipe import Rule
from quantforge.settings import Settings


def main() -> None:
    """Measure every target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--evaluation", required=True)
    parser.add_argument("--format", default="compressed-tensors")
    parser.add_argument("--targets", default="3.0,3.5")
    parser.add_argument("--candidates", default="", help="default: as allocate's")
    parser.add_argument("--mixtures", default="", help="of llama-quantize, beside uniform types")
    parser.add_argument("--tune", type=int, help="epochs of all that are compared")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--windows", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {str(seed): of_seed(options, seed) for seed in range(options.seeds)}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def of_seed(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the figures of all targets and widths, with calibration rows of one seed."""
    settings = Settings(calibration=options.calibration, threads=options.threads, overwrite=True)
    asked: dict[str, Any] = {
        "calibration": options.calibration,
        "format": options.format,
        "seed": seed,
        "tune": options.tune,
        "candidates": [one for one in options.candidates.split(",") if one],
    }
    measured: list[Any] = []
    original = candidate_errors.candidate_errors

    def once(*arguments: Any) -> Any:
        if not measured:
            measured.append(original(*arguments))
        return measured[0]

    begun = time.perf_counter()
    with (
        patch.object(candidate_errors, "candidate_errors", once),
        tempfile.TemporaryDirectory() as folder,
    ):
        made = {}
        for target in options.targets.split(","):
            made[target] = api.allocate(options.model, f"{target}bpw", settings=settings, **asked)
            made.setdefault("seconds", time.perf_counter() - begun)
        seconds = made.pop("seconds")
        recipes = {f"{target} bits": one.recipe for target, one in made.items()}
        plain = next(iter(made.values()))
        for scheme in plain.uniform:
            every = Rule(ALL_LINEARS, scheme)
            recipes[scheme] = replace(plain.recipe, scheme=scheme, rules=(every,))
        mixtures = [one for one in options.mixtures.split(",") if one]
        for kind in mixtures:
            recipes[kind] = replace(plain.recipe, scheme=None, rules=(), type=kind)
        outs = {}
        times = {}
        for name, recipe in recipes.items():
            suffix = ".gguf" if options.format == "gguf" else ""
            out = Path(folder) / (name.replace(":", "-").replace(" ", "-") + suffix)
            begun = time.perf_counter()
            api.quantize(options.model, recipe, out, settings)
            times[name] = time.perf_counter() - begun
            outs[name] = out
        bits = {name: bits for name, (_, bits, _) in plain.uniform.items()}
        bits |= {name: in_blocks(outs[name]) for name in mixtures}
        report = api.evaluate(
            options.model, [*outs.values()], text=options.evaluation, windows=options.windows, length=512, speed=False,
        )  # fmt: skip
    kl = {name: row["kl_mean"] for name, row in zip(recipes, report.rows[1:], strict=True)}
    widths = frontier(sorted((bits[name], kl[name]) for name in bits))
    return {
        "allocate, s": seconds,
        "gptq, s": times[[*plain.uniform][1]],
        "uniform": {
            name: {"bits": bits, "expected": nats, "kl": kl[name]} for name, (_, bits, nats) in plain.uniform.items()
        },
        "mixtures": {name: {"bits": bits[name], "kl": kl[name]} for name in mixtures},
        "targets": {
            target: {
                "bits": one.bits, "of target": one.bits / float(target), "expected": one.nats,
                "kl": kl[f"{target} bits"],
                "ratio": kl[f"{target} bits"] / between(widths, one.bits),
            }
            for target, one in made.items()
        },
    }  # fmt: skip


def in_blocks(file: Path) -> float:
    """Return the bits per weight of the matrices in the blocks of a GGUF file."""
    tensors = [
        one
        for one in GGUFReader(file).tensors
        if one.name.startswith("blk.") and len(one.shape) > 1
    ]
    return (
        8 * sum(int(one.n_bytes) for one in tensors) / sum(int(one.n_elements) for one in tensors)
    )


def frontier(widths: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return what no other one beats with as few bits."""
    return [
        one
        for place, one in enumerate(widths)
        if all(one[1] < other[1] for other in widths[:place])
    ]


def between(widths: list[tuple[float, float]], bits: float) -> float:
    """Return the divergence of uniform widths at so many bits, its logarithm interpolated."""
    above = next(place for place, one in enumerate(widths) if one[0] >= bits)
    (x0, y0), (x1, y1) = widths[max(above, 1) - 1 : max(above, 1) + 1]
    return math.exp(math.log(y0) + (bits - x0) / (x1 - x0) * (math.log(y1) - math.log(y0)))


if __name__ == "__main__":
    main()
