"""Serve a stream of requests with an engine in this process, in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantforge.errors import InputError
from quantforge.evaluation.serving_load.latency_figures import Waited
from quantforge.evaluation.serving_load.stream_of_requests import TimedRequest
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.serving.engine import Counters, EngineOptions, ServingEngine
from quantforge.runtime.serving.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
)
from quantforge.runtime.speculation.decode import SpeculativeDecoder

WARM_TOKENS = 4
IDLE = 0.002  # seconds to sleep at most while no request is there


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Times of a stream that was served, with the counts of the engine.

    Attributes:
        served: in the order of the requests.
        counters: at the end.
        wasted: mean share of reserved places in the cache that were not used, over the steps.
    """

    served: list[Waited]
    counters: Counters
    wasted: float


def serve_here(
    decoder: Decoder,
    requests: Sequence[TimedRequest],
    options: EngineOptions,
    follow: Callable[[int], object] = lambda _: None,
    speculative: SpeculativeDecoder | None = None,
) -> EngineRun:
    """Serve a stream on an engine of its own; requests that come together are one batch.

    Args:
        decoder: the model.
        requests: in the order in which they come.
        options: of the engine.
        follow: is told how many requests are finished.
        speculative: who drafts tokens, if anybody does.

    Raises:
        InputError: a request that can never fit, or logits that are no numbers.
    """
    _warm_up(decoder, requests, options, speculative)
    engine = ServingEngine(decoder, options, speculative)
    served = {str(place): Waited(one.at, len(one.ids)) for place, one in enumerate(requests)}
    sent = finished = 0
    reserved = used = 0
    begin = time.perf_counter()
    while sent < len(requests) or not engine.idle:
        now = time.perf_counter() - begin
        while sent < len(requests) and requests[sent].at <= now:
            one = requests[sent]
            engine.submit(GenerationRequest(str(sent), one.ids, one.new_tokens))
            sent += 1
        if engine.idle:
            time.sleep(min(IDLE, max(0.0, requests[sent].at - now)))
            continue
        happened = engine.step()
        now = time.perf_counter() - begin
        for event in happened:
            if isinstance(event, NewToken):
                served[event.id].times.append(now)
            elif isinstance(event, Finished):
                if event.reason is FinishReason.ERROR:
                    raise InputError(f"request {event.id}: {event.error}", "")
                finished += 1
                follow(finished)
        counts = engine.counters
        reserved, used = reserved + counts.reserved_tokens, used + counts.used_tokens
    wasted = (reserved - used) / reserved if reserved else 0.0
    return EngineRun(list(served.values()), engine.counters, wasted)


def _warm_up(
    decoder: Decoder,
    requests: Sequence[TimedRequest],
    options: EngineOptions,
    speculative: SpeculativeDecoder | None,
) -> None:
    """Let an engine compute what the stream will need, so that nothing is compiled while it is measured."""
    engine = ServingEngine(decoder, options, speculative)
    for place, one in enumerate(requests[: options.rows]):
        new = min(WARM_TOKENS, one.new_tokens)
        engine.submit(GenerationRequest(str(place), one.ids, new))
    while not engine.idle:
        engine.step()
