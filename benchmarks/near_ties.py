"""Whether a request's greedy tokens depend on its neighbours, counted, and how fast steps of 16 are on a trained model.

    python benchmarks/near_ties.py MODEL [--threads 1] [--rounds 5] [--out FILE.json]

16 requests of 20 to 200 random tokens and 64 new ones, alone in turn and all at once, with each technique. Counted are
requests that got another token somewhere, with the distance of the two best logits where the first such one was chosen:
behind it texts differ anyway.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from runtime import DRAW, request, steps_per_second

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import Finished, GenerationRequest
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import prefill
from quantforge.runtime.load import load

TECHNIQUES: dict[str, dict[str, Any]] = {
    "16 at once": {},
    "and prompts whole": {"chunk": 300, "token_budget": 4800},
    "and chunks of 32": {"chunk": 32},
    "and in 40 pages": {"pages": 40},
}


def answers(decoder: Decoder, requests: list[GenerationRequest], **options: Any) -> dict[str, Any]:
    """New tokens by request."""
    engine = ServingEngine(decoder, EngineOptions(**{"rows": 16, "tokens": 300} | options))
    found: dict[str, Any] = {}
    for one in requests:
        engine.submit(one)
    while not engine.idle:
        found |= {one.id: one.tokens for one in engine.step() if isinstance(one, Finished)}
    return found


@torch.inference_mode()
def distance(decoder: Decoder, ids: list[int]) -> float:
    """Distance of the two best logits behind tokens."""
    best = (
        prefill(decoder, torch.tensor([ids]), decoder.cache(1, len(ids) + 1), 1)[0].topk(2).values
    )
    return float(best[0] - best[1])


def main() -> None:
    """Count, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    decoder = Decoder(load(options.model, dtype=torch.bfloat16).model)
    requests = [request(str(n), DRAW.randint(20, 200), 64) for n in range(16)]
    alone = answers(decoder, requests, rows=1)
    found: dict[str, Any] = {}
    for name, technique in TECHNIQUES.items():
        together, distances = answers(decoder, requests, **technique), []
        for one in requests:
            a, b = alone[one.id], together[one.id]
            if a != b:
                first = next(
                    n for n, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]
                )
                distances.append(round(distance(decoder, [*one.ids, *a[:first]]), 4))
        found[name] = {
            "requests": 16,
            "other tokens": len(distances),
            "distances": sorted(distances),
        }
    found["speed"] = steps_per_second(decoder, options.rounds)
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
