"""The ladder: techniques added one at a time, each measured on the same requests, so that each one's part shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quantforge.architectures.cache_kinds import PLAIN, kinds_of
from quantforge.evaluation.serving_load.latency_figures import LoadFigures, Slo, Waited, figures
from quantforge.evaluation.serving_load.on_engine import serve_here
from quantforge.evaluation.serving_load.stream_of_requests import TimedRequest
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.serving.counters import Counters
from quantforge.runtime.serving.engine_options import EngineOptions
from quantforge.runtime.speculation.draft_choice import GuessedDecoder

UNCACHED_TOKENS = 8  # each reads the whole text again, so that a few of one request show it


@dataclass(frozen=True, slots=True)
class Rung:
    """A technique, and the figures with it and all before it.

    Attributes:
        name: the technique.
        figures: of the stream; of the rung without a cache, of a few tokens of its first request.
        wasted: mean share of reserved places in the cache that were not used; None where there is no engine.
        counters: of the engine, of the rung that guesses.
    """

    name: str
    figures: LoadFigures
    wasted: float | None
    counters: Counters | None = None


class LastRungs(NamedTuple):
    """Rungs behind those that every ladder has; None where there is no such rung.

    Attributes:
        rounded: the model with activations of 8 bits.
        guessed: words for who guesses, and the speculation of the model of the rung before.
    """

    rounded: Decoder | None = None
    guessed: tuple[str, GuessedDecoder] | None = None


NO_MORE = LastRungs()


def climb(
    plain: Decoder,
    packed: Decoder | None,
    requests: Sequence[TimedRequest],
    options: EngineOptions,
    tell: Callable[[str], object] = lambda _: None,
    last: LastRungs = NO_MORE,
    held_to: tuple[Slo | None, float | None] = (None, None),
) -> Iterator[Rung]:
    """Yield the rungs from the lowest one up.

    Args:
        plain: the model in 16 bits (or whatever there is).
        packed: its quantization, for the rungs from "quantized weights" on; None: there is no such rung.
        requests: are all there at the begin.
        options: room of the engine; its switches are the ladder's.
        tell: is told the name of each rung before it is measured.
        last: of the same model.
        held_to: limits for the goodput and the price of an hour, of all rungs that serve the whole stream.
    """
    requests = [replace(one, at=0.0) for one in requests]
    tell("no cache")
    yield Rung("no cache", figures([_uncached(plain, requests[0])], None, None), None)
    one_by_one = replace(
        options, rows=1, batching="static", chunked_prefill=False, cache="", admission="whole"
    )
    static = replace(one_by_one, rows=options.rows)
    continuous = replace(static, batching="continuous", admission=options.admission)
    chunked = replace(continuous, chunked_prefill=True)
    best = packed or plain
    steps: list[tuple[str, Decoder, EngineOptions]] = [
        ("cache, one request at a time", plain, one_by_one)
    ]
    if packed is not None:
        steps.append(("+ quantized weights", packed, one_by_one))
    steps += [
        ("+ static batches", best, static),
        ("+ continuous batching", best, continuous),
        ("+ chunked prompts", best, chunked),
    ]
    if options.prefix_cache:
        chunked = replace(chunked, prefix_cache=True)
        steps.append(("+ prefix cache", best, chunked))
    if kinds_of(options.cache or PLAIN) != ("", ""):
        steps.append((f"+ cache in {options.cache}", best, replace(chunked, cache=options.cache)))
    final = replace(chunked, cache=options.cache)
    if last.rounded is not None:
        steps.append(("+ activations of 8 bits", last.rounded, final))
    if last.guessed is not None:
        steps.append((f"+ speculation ({last.guessed[0]})", last.guessed[1].decoder, final))
    for name, decoder, chosen in steps:
        tell(name)
        drafting = last.guessed[1] if last.guessed and name is steps[-1][0] else None
        run = serve_here(decoder, requests, chosen, drafting=drafting)
        counters = run.counters if drafting else None
        yield Rung(name, figures(run.served, *held_to), run.wasted, counters)


@torch.inference_mode()
def _uncached(decoder: Decoder, request: TimedRequest) -> Waited:
    """Serve a few tokens of a request, computing the whole text for each of them."""
    waited = Waited(0.0, len(request.ids))
    ids = list(request.ids)
    begin = time.perf_counter()
    for _ in range(min(UNCACHED_TOKENS, request.new_tokens)):
        cache = decoder.cache(1, len(ids))
        cache.reserve(0, len(ids))
        hidden = decoder.hidden(torch.tensor([ids], device=decoder.device), cache)
        ids.append(int(decoder.logits(hidden[:, -1]).argmax(-1)))
        waited.times.append(time.perf_counter() - begin)
    return waited
