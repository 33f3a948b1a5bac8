"""The engine: what chunks of prompts and pages bring, on a model of 1B shape.

    python benchmarks/runtime.py [--layers 16] [--threads 2] [--rounds 3] [--out FILE.json]
                                 [--parts gap,waste,scheduler,ladder]

The model is a random llama with the widths of Llama 3.2 1B (see `cpu_decode`) in int4 g128, its output layer int8 per
row. Speed does not depend on what weights mean. Parts:

- *gap*: longest time between two tokens of 4 running requests while a prompt of 2048 is computed, and the time to that
  prompt's first token; whole, and in chunks of several sizes.
- *waste*: places reserved and not used, of those reserved, over all steps; requests of 512 tokens on average. It does
  not depend on a model, and none is computed.
- *scheduler*: its share of the steps in which 64 requests decode; and steps per second of 16, recorded or not.
- *ladder*: 16 requests of 64 + 64 tokens, a technique more at each rung, tokens per second. One at a time is measured
  on two of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels" / "bench")]

from cpu_decode import llama_1b  # noqa: E402
from decode_8b import random_model  # noqa: E402

from quantforge.notation import parse  # noqa: E402
from quantforge.runtime.batching.engine import EngineOptions, ServingEngine  # noqa: E402
from quantforge.runtime.batching.generation_requests import GenerationRequest, NewToken  # noqa: E402
from quantforge.runtime.cache import CacheShape, PagedCache  # noqa: E402
from quantforge.runtime.decoder import Decoder  # noqa: E402
from quantforge.runtime.decoding import DecoderEngine, generate_tokens  # noqa: E402
from quantforge.runtime.generation_options import Sampling  # noqa: E402
from quantforge.runtime.linear import round_inputs  # noqa: E402

DRAW = random.Random(0)
OCTETS = "and activations of 8 bits"


def request(name: str, prompt: int, new: int, begin: tuple[int, ...] = ()) -> GenerationRequest:
    """A request of random tokens behind a given beginning."""
    return GenerationRequest(name, (*begin, *(DRAW.randrange(3, 2000) for _ in range(prompt))), new)


def throughput(decoder: Any, requests: list[GenerationRequest], **options: Any) -> float:
    """New tokens per second of an engine that gets all requests at once."""
    engine = ServingEngine(decoder, EngineOptions(**options))
    for one in requests:
        engine.submit(one)
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    return sum(one.new_tokens for one in requests) / (time.perf_counter() - began)


def first_token(engine: ServingEngine, one: GenerationRequest) -> float:
    """Seconds to the first token of a request that is alone; it is computed to its end."""
    began = time.perf_counter()
    engine.submit(one)
    found = None
    while not engine.idle:
        if engine.step() and found is None:
            found = time.perf_counter() - began
    assert found is not None
    return found


def gap(decoder: Decoder, rounds: int) -> dict[str, Any]:
    """Longest gaps and times to the first token; whole and chunks in turn."""
    chunks = (None, 64, 96, 128, 256)
    found: dict[int | None, list[tuple[float, float]]] = {chunk: [] for chunk in chunks}
    for _ in range(rounds):
        for chunk in chunks:
            found[chunk].append(one_gap(decoder, chunk))
    rows = {}
    for chunk, pairs in found.items():
        whole = found[None]
        rows["whole" if chunk is None else f"chunks of {chunk}"] = {
            "longest gap, s": median(longest for longest, _ in pairs),
            "first token of the prompt, s": median(first for _, first in pairs),
            "whole / this, gap": median(a[0] / b[0] for a, b in zip(whole, pairs, strict=True)),
            "this / whole, first token": median(
                b[1] / a[1] for a, b in zip(whole, pairs, strict=True)
            ),
        }
    return rows


def one_gap(decoder: Decoder, chunk: int | None) -> tuple[float, float]:
    """Longest gap of four running requests, and seconds to the first token of a prompt of 2048 that comes between."""
    whole = {} if chunk else {"token_budget": 2400}
    options = EngineOptions(rows=5, tokens=2400, pages=200, chunk=chunk or 2400, **whole)
    engine = ServingEngine(decoder, options)
    for name in "abcd":
        engine.submit(request(name, 32, 120))
    for _ in range(8):
        engine.step()
    engine.submit(request("long", 2048, 1))
    last = began = time.perf_counter()
    longest = first = 0.0
    while not first:
        told = [one.id for one in engine.step() if isinstance(one, NewToken)]
        now = time.perf_counter()
        first = now - began if "long" in told else 0.0
        if "a" in told:
            longest, last = max(longest, now - last), now
    return longest, first


class NoModel:
    """Decoder that computes nothing: its cache is filled all the same."""

    positions, vocabulary, device = 4096, 32000, torch.device("cpu")

    def cache(
        self,
        sequences: int,
        tokens: int,
        kind: str = "",
        pages: int | None = None,
        max_step_tokens: int = 0,
    ) -> PagedCache:
        """Make a cache of one number per token."""
        shape = CacheShape(1, 1, 2, kind, torch.float32)
        return PagedCache(
            shape, sequences, tokens, self.device, pages, max_step_tokens=max_step_tokens
        )

    def hidden_of_spans(self, ids: Any, spans: Any, cache: PagedCache) -> Any:
        """Advance the cache."""
        for span in spans:
            cache.advance(span.row, span.tokens)
        return torch.zeros(len(ids), 1)

    def logits(self, hidden: Any) -> Any:
        """Return logits of which all are alike."""
        return torch.zeros(len(hidden), 4)


def waste(*_: Any) -> dict[str, float]:
    """Share of reserved places that is not used, in pages, and where each request has its most tokens reserved."""
    options = EngineOptions(rows=16, tokens=1024)
    engine = ServingEngine(NoModel(), options)  # type: ignore[arg-type]
    lengths = {str(n): (DRAW.randint(128, 640), DRAW.randint(1, 255)) for n in range(200)}
    for name, (prompt, new) in lengths.items():
        engine.submit(request(name, prompt, new))
    reserved = used = rows = 0
    while not engine.idle:
        engine.step()
        counters = engine.counters
        reserved += counters.reserved_tokens
        used += counters.used_tokens
        rows += counters.running
    whole = sum(sum(pair) for pair in lengths.values()) / len(lengths)
    return {
        "mean tokens of a request": whole,
        "mean tokens in the cache": used / rows,
        "pages": 1 - used / reserved,
        "contiguous, 1024 tokens each": 1 - used / (rows * 1024),
    }


def scheduler(decoder: Decoder, rounds: int) -> dict[str, float]:
    """Share of the scheduler in steps of 64 requests; steps per second of 16."""
    engine = ServingEngine(decoder, EngineOptions(rows=64, tokens=256, pages=64 * 4))
    for number in range(64):
        engine.submit(request(str(number), 32, 60))
    while engine.counters.running < 64 or engine.counters.computed_tokens < 64 * 34:
        engine.step()
    before = engine.counters
    for _ in range(20):
        engine.step()
    after = engine.counters
    share = (after.scheduling_seconds - before.scheduling_seconds) / (
        after.step_seconds - before.step_seconds
    )
    found = {"scheduler's share, 64 requests": share}
    return found | steps_per_second(decoder, rounds)


def steps_per_second(decoder: Decoder, rounds: int) -> dict[str, float]:
    """Steps of 16 requests that decode, recorded and not in turn."""
    engines = {}
    for name in ("recorded", "not recorded"):
        engine = engines[name] = ServingEngine(decoder, EngineOptions(rows=16, tokens=512))
        if name == "not recorded":
            engine._decoding_steps = None
        for number in range(16):
            engine.submit(request(str(number), 32, 400))
        while engine.counters.computed_tokens < 16 * 34:
            engine.step()
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            for _ in range(10):
                engine.step()
            speeds[name].append(10 / (time.perf_counter() - began))
    pairs = zip(speeds["recorded"], speeds["not recorded"], strict=True)
    return {f"steps per second of 16, {name}": median(found) for name, found in speeds.items()} | {
        "recorded / not": median(a / b for a, b in pairs)
    }


def int4_model(layers: int) -> Any:
    """A random model of the widths of Llama 3.2 1B: int4 in groups of 128, the head in int8."""
    return random_model(
        llama_1b(layers), parse("int4:g128:sym:bf16"), "cpu", parse("int8:row:sym:bf16")
    )


def ladder(decoder: Decoder, rounds: int) -> dict[str, Any]:
    """Tokens per second of every rung."""
    dense = random_model(llama_1b(len(decoder.layers)), None, "cpu")
    requests = [request(str(n), 64, 64) for n in range(16)]
    batch = torch.tensor([one.ids for one in requests])

    def by_transformers(rows: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            dense.generate(
                batch[:rows], max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
            )
        return rows * 64 / (time.perf_counter() - began)

    plain = {"rows": 16, "tokens": 256}
    rounded = int4_model(len(decoder.layers))
    round_inputs(rounded, 8)
    octets = Decoder(rounded)
    rungs: dict[str, Callable[[], float]] = {
        "transformers' generate, bfloat16, one at a time": lambda: by_transformers(1),
        "transformers' generate, bfloat16, a batch of 16": lambda: by_transformers(16),
    }
    found: dict[str, Any] = {name: rung() for name, rung in rungs.items()}
    own = Decoder(dense)  # lays matrices together, which transformers then sees as views

    def alone(model: Decoder) -> float:
        began = time.perf_counter()
        for one in requests[:2]:
            list(generate_tokens(DecoderEngine(model), one.ids, 64, Sampling()))
        return 2 * 64 / (time.perf_counter() - began)

    steps: dict[str, Callable[[], float]] = {
        "own naive loop, 16 bits": lambda: alone(own),
        "int4 weights": lambda: alone(decoder),
        "16 at a time": lambda: throughput(decoder, requests, **plain),
        "and an int8 cache": lambda: throughput(decoder, requests, cache="int8", **plain),
        OCTETS: lambda: throughput(octets, requests, cache="int8", **plain),
    }
    # In turn, so that what slows the machine for a while does not fall on one rung.
    turns = [{name: rung() for name, rung in steps.items()} for _ in range(rounds)]
    found |= {name: median(turn[name] for turn in turns) for name in steps}
    last = found[OCTETS]
    for name in (*rungs, "own naive loop, 16 bits"):
        found[f"last rung / {name}"] = last / found[name]
    return found


PARTS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "gap": gap, "waste": waste, "scheduler": scheduler, "ladder": ladder,
}  # fmt: skip


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    decoder = Decoder(int4_model(options.layers))
    found: dict[str, Any] = {
        "layers": options.layers, "threads": options.threads, "rounds": options.rounds, "torch": torch.__version__,
        "python": platform.python_version(), "load": [round(load, 1) for load in os.getloadavg()],
    }  # fmt: skip
    for name in options.parts.split(","):
        found[name] = PARTS[name](decoder, options.rounds)
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        if options.out:  # what is measured is not lost with what follows
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
