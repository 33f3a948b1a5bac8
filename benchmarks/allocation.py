"""Allocated mixtures against uniform widths: KL divergence at the same bytes, both rounded by our gptq.

    python benchmarks/allocation.py --model MODEL --calibration cal.txt --evaluation eval.txt [--format gguf]
                                    [--targets 3.0,3.5] [--seeds 1] [--out FILE.json]

Errors are measured once for each seed of the calibration rows. Of a target are printed: bits per weight inside of
blocks, the divergence that was expected and the one that `evaluate` measures, and its ratio to that of uniform widths,
whose logarithm is interpolated over the bits.
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

from quantforge import verbs
from quantforge.execution import candidate_errors
from quantforge.recipe import Rule
from quantforge.settings import Settings
from quantforge.verbs.mixture_search import EVERY


def main() -> None:
    """Measure every target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--evaluation", required=True)
    parser.add_argument("--format", default="compressed-tensors")
    parser.add_argument("--targets", default="3.0,3.5")
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
            made[target] = verbs.allocate(options.model, f"{target}bpw", settings=settings, **asked)
            made.setdefault("seconds", time.perf_counter() - begun)
        seconds = made.pop("seconds")
        recipes = {f"{target} bits": one.recipe for target, one in made.items()}
        plain = next(iter(made.values()))
        for scheme in plain.uniform:
            every = Rule(EVERY, scheme)
            recipes[scheme] = replace(plain.recipe, scheme=scheme, rules=(every,))
        outs = {}
        times = {}
        for name, recipe in recipes.items():
            suffix = ".gguf" if options.format == "gguf" else ""
            out = Path(folder) / (name.replace(":", "-").replace(" ", "-") + suffix)
            begun = time.perf_counter()
            verbs.quantize(options.model, recipe, out, settings)
            times[name] = time.perf_counter() - begun
            outs[name] = out
        report = verbs.evaluate(
            options.model, [*outs.values()], text=options.evaluation, windows=options.windows, length=512, speed=False,
        )  # fmt: skip
    kl = {name: row["kl_mean"] for name, row in zip(recipes, report.rows[1:], strict=True)}
    widths = sorted((plain.uniform[name][1], kl[name]) for name in plain.uniform)
    return {
        "allocate, s": seconds,
        "gptq, s": times[[*plain.uniform][1]],
        "uniform": {
            name: {"bits": bits, "expected": nats, "kl": kl[name]} for name, (_, bits, nats) in plain.uniform.items()
        },
        "targets": {
            target: {
                "bits": one.bits, "of target": one.bits / float(target), "expected": one.nats,
                "kl": kl[f"{target} bits"],
                "ratio": kl[f"{target} bits"] / between(widths, one.bits),
            }
            for target, one in made.items()
        },
    }  # fmt: skip


def between(widths: list[tuple[float, float]], bits: float) -> float:
    """Return the divergence of uniform widths at so many bits, its logarithm interpolated."""
    above = next(place for place, one in enumerate(widths) if one[0] >= bits)
    (x0, y0), (x1, y1) = widths[max(above, 1) - 1 : max(above, 1) + 1]
    return math.exp(math.log(y0) + (bits - x0) / (x1 - x0) * (math.log(y1) - math.log(y0)))


if __name__ == "__main__":
    main()
