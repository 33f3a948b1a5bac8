"""Speculation on a trained model: what copies from the text gain, against what their acceptance and cost allow.

    python benchmarks/speculation.py MODEL [--tokens 200] [--rounds 7] [--threads 1] [--out FILE.json]

MODEL is any model that the own decoder computes; figures of ``docs/results/speculation.md`` are of the bundled one in
int4. Two tasks, both greedy or drawn with a seed, so that each side has the same tokens:

- *copying*: a text that stands in the prompt several times is continued by n-grams. For every number of drafted
  tokens k: the acceptance a, tokens per pass, the expected ``(1 - a^(k+1)) / (1 - a)``, the cost of a pass of k+1
  rows in plain steps, the speed-up over the plain loop, and its share of expected / cost.
- *trees*: real text is continued with the model in fewer bits as draft; for chains and trees of three places, how often
  one of the tokens drafted for a place is right, and tokens per pass.
- *without repeats*: text drawn at temperature 1, with as many drafted tokens as pay: the plain loop's time over theirs.

Sides take turns in every round; ratios are medians of the rounds' ratios. Both are timed behind the first tokens, so
that neither prompt nor the recording of the first pass counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quantforge.runtime.decoder import Decoder  # noqa: E402
from quantforge.runtime.decoding import DecodingStep, prefill  # noqa: E402
from quantforge.runtime.generation_options import Sampling  # noqa: E402
from quantforge.runtime.load import Loaded, load  # noqa: E402
from quantforge.runtime.speculation.decode import (  # noqa: E402
    SpeculativeCompletion,
    SpeculativeDecoder,
    speculative_decoder,
)
from quantforge.runtime.speculation.draft_options import (  # noqa: E402
    DraftOptions,
    count_tree_nodes,
    parse_tree_shape,
)
from quantforge.runtime.speculation.drafter import Drafter  # noqa: E402
from quantforge.runtime.speculation.ngrams import NgramDrafter  # noqa: E402
from quantforge.runtime.speculation.tree import DraftTree  # noqa: E402
from quantforge.runtime.speculation.verify_drafts import SpeculationCounts, expected_tokens  # noqa: E402
from quantforge.runtime.text_processing import load_text_processor  # noqa: E402

WIDTHS = (1, 2, 3, 4, 6, 8)
COPIES, PART = 4, 60
SKIPPED = 20


class NoDrafter(Drafter):
    """Drafter of the plain loop."""

    def draft(self, history: Sequence[int], most: int, sampler: object) -> DraftTree:  # noqa: ARG002
        """Return none."""
        return DraftTree()


def plain_of(decoder: Decoder) -> SpeculativeDecoder:
    """Return the plain loop of a model."""
    return SpeculativeDecoder(decoder, lambda _: NoDrafter(), 1)


def timed(text: SpeculativeCompletion) -> tuple[float, list[int]]:
    """Return the seconds of all tokens after the first `SKIPPED` ones, and all tokens."""
    chosen = iter(text)
    found = list(islice(chosen, SKIPPED))
    began = time.perf_counter()
    found += chosen
    return time.perf_counter() - began, [one.token for one in found]


@torch.inference_mode()
def pass_costs(decoder: Decoder, ids: Sequence[int], rounds: int) -> dict[int, float]:
    """Return the seconds of a pass of 1 and of k+1 rows behind a prompt, by k; sides take turns."""
    cache = decoder.cache(1, len(ids) + 16)
    prefill(decoder, torch.tensor([list(ids)]), cache, 16)
    steps = {k: (cache.view(k + 1), k + 1) for k in (0, *WIDTHS)}
    for view, _ in steps.values():
        view.select(cache, [0])
    run = {k: DecodingStep(decoder, view) for k, (view, _) in steps.items()}
    found: dict[int, list[float]] = {k: [] for k in steps}
    for _ in range(8 * rounds):
        for k, (view, rows) in steps.items():
            view.lengths.copy_(torch.arange(len(ids), len(ids) + rows))
            began = time.perf_counter()
            run[k](torch.tensor(ids[:rows]))
            found[k].append(time.perf_counter() - began)
    return {k: median(times[2:]) for k, times in found.items()}


def copying(decoder: Decoder, ids: list[int], tokens: int, rounds: int) -> list[dict[str, float]]:
    """Measure every number of drafted tokens on a text that is there already."""
    costs = pass_costs(decoder, ids, rounds)
    rows = []
    for k in WIDTHS:
        ratios, counts = [], SpeculationCounts()
        copies = SpeculativeDecoder(decoder, lambda _, k=k: NgramDrafter((1,) * k), k, fixed=True)
        for _ in range(rounds + 1):
            plain, one = timed(SpeculativeCompletion(plain_of(decoder), ids, tokens))
            text = SpeculativeCompletion(copies, ids, tokens)
            fast, two = timed(text)
            if one != two:
                raise SystemExit(f"{k} drafted tokens gave another text")
            ratios.append(plain / fast)
            counts = text.counts
        chance = counts.acceptance or 0.0
        cost = costs[k] / costs[0]
        speed = median(ratios[1:])
        rows.append({
            "drafted": k, "acceptance": chance, "tokens per pass": counts.tokens_per_pass or 0.0,
            "expected": expected_tokens(chance, k), "cost": cost, "speed-up": speed,
            "share": speed / (expected_tokens(chance, k) / cost),
        })  # fmt: skip
    return rows


@torch.inference_mode()
def parting(decoder: Decoder, ids: list[int], plain: list[int], found: list[int]) -> float:
    """Return how far apart the logits of two texts are where these part; 0 where they do not."""
    same = next(
        (k for k, (one, two) in enumerate(zip(plain, found, strict=True)) if one != two), None
    )
    if same is None:
        return 0.0
    text = torch.tensor([ids + plain[:same]])
    logits = prefill(decoder, text, decoder.cache(1, text.shape[1]), 0)[0]
    return abs(float(logits[plain[same]] - logits[found[same]]))


def trees(loaded: Loaded, text: list[list[int]], tokens: int) -> list[dict[str, str | float]]:
    """Count what comes of chains and trees; the texts are the plain loop's."""
    rows = []
    for draft in ("int2", "int3"):
        for shape in ("1x1x1", "2x1x1", "3x1x1", "3x2x1", "4x2x2"):
            drafted = speculative_decoder(loaded, DraftOptions(draft, tree=shape), lambda _: loaded)
            drafted, decoder = replace(drafted, fixed=True), drafted.decoder
            counts, same, gap = SpeculationCounts(), 0, 0.0
            for ids in text:
                plain = timed(SpeculativeCompletion(plain_of(decoder), ids, tokens))[1]
                one = SpeculativeCompletion(drafted, ids, tokens)
                one.counts = counts
                found = timed(one)[1]
                same += found == plain
                gap = max(gap, parting(decoder, ids, plain, found))
            rows.append({
                "draft": draft, "tree": shape, "drafted": count_tree_nodes(parse_tree_shape(shape)),
                "acceptance": counts.acceptance or 0.0, "tokens per pass": counts.tokens_per_pass or 0.0,
                "same texts": f"{same} of {len(text)}", "widest tie (nats)": gap,
            })  # fmt: skip
    return rows


def unrepeated(decoder: Decoder, ids: list[int], tokens: int, rounds: int) -> float:
    """Return the plain loop's time over that of a loop which drafts where it pays, on drawn text."""
    ratios = []
    copies = SpeculativeDecoder(decoder, lambda _: NgramDrafter((1,) * 8), 8)
    for seed in range(rounds + 1):
        drawn = Sampling(temperature=1.0, seed=seed)
        plain, one = timed(SpeculativeCompletion(plain_of(decoder), ids, tokens, drawn))
        fast, two = timed(SpeculativeCompletion(copies, ids, tokens, drawn))
        if one != two:
            raise SystemExit("drafted tokens gave another text")
        ratios.append(plain / fast)
    return median(ratios[1:])


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT / "quantforge/runtime/decoding.py",
        help="of the trees",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model, dtype=torch.bfloat16)
    decoder = Decoder(loaded.model)
    draw = random.Random(0)
    part = [draw.randrange(5, decoder.vocabulary) for _ in range(PART)]
    rows = copying(decoder, part * COPIES, options.tokens, options.rounds)
    free = unrepeated(decoder, part[:32], options.tokens, options.rounds)
    real = load_text_processor(options.model, loaded.config).tokenizer.encode(
        options.text.read_text()
    )
    pieces = [real[first : first + 64] for first in range(0, len(real), len(real) // 8)][:8]
    grown = trees(loaded, pieces, options.tokens)
    for table in (rows, grown):
        print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
        for row in table:
            words = (one if isinstance(one, str) else f"{one:.3g}" for one in row.values())
            print("| " + " | ".join(words) + " |")
        print()
    print(f"\nwithout repeats, plain / with drafts where they pay: {free:.3f}")
    if options.out is not None:
        found = {
            "copying": rows,
            "trees": grown,
            "without repeats": free,
            "threads": options.threads,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
