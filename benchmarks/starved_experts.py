"""Divergence of experts that saw 0, 1 or few calibration tokens, against plain rounding's with the same tokens.

    python benchmarks/starved_experts.py --calibration cal.txt --evaluation eval.txt --out PREFIX

Of a trained mixture only the experts are rounded. Their statistics see the first N of the tokens that the router sends
to each; all tokens pass on to the next layer, as ever. Divergence is that of `eval`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantforge import api
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings

KEPT = ("re:.*self_attn.*", "re:.*shared_expert.*")


def main() -> None:
    """Round, evaluate, and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo-moe"))
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", default=["int4:g128:sym", "int3:g128:sym"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = Settings(threads=options.threads)
    runs = [
        (scheme, count, method)
        for scheme in options.schemes
        for count in options.tokens
        for method in ("rtn", "gptq")
    ]
    with tempfile.TemporaryDirectory() as name:
        places = []
        for number, (scheme, count, method) in enumerate(runs):
            recipe = build_recipe(
                None, method=method, scheme=scheme, ignore=KEPT, calibration=str(options.calibration),
                samples=options.samples, length=options.length,
            )  # fmt: skip
            places.append(Path(name) / str(number))
            with starved(count):
                api.quantize(options.model, recipe, places[-1], settings)
        measured = api.evaluate(
            options.model, places, settings,
            text=str(options.evaluation), windows=options.windows, speed=False,
        )  # fmt: skip
    found = {run: float(row["kl_mean"]) for run, row in zip(runs, measured.rows[1:], strict=True)}
    lines = ["| scheme | tokens of each expert | rtn | gptq | ratio |", "|---|---|---|---|---|"]
    for scheme, count, method in runs:
        if method == "gptq":
            plain, ours = found[scheme, count, "rtn"], found[scheme, count, "gptq"]
            lines.append(f"| {scheme} | {count} | {plain:.5f} | {ours:.5f} | {ours / plain:.3f} |")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": sys.argv[1:], "runs": [[*run, kl] for run, kl in found.items()]}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


@contextmanager
def starved(count: int) -> Iterator[None]:
    """Let statistics see so many tokens of each expert; what the experts return stays that for all."""
    whole = ExpertStatistics.compute

    def of(self: ExpertStatistics, number: int, *, add: bool) -> dict[str, Any]:
        tokens = self._tokens
        sent, weights = tokens.routed_to(number)
        if add:
            self._experts.run(number, sent, weights, {}, add=True)
        tokens.routed_to = lambda _: (sent[:count], weights[:count])  # type: ignore[method-assign]
        try:
            return whole(self, number, add=False)
        finally:
            del tokens.routed_to

    ExpertStatistics.compute = of  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExpertStatistics.compute = whole  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
