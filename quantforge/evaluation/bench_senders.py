"""Send a stream of requests in real time, to an engine in this process or to an OpenAI-compatible server.

A server is asked by its completions API with streaming. Prompts are sent as tokens, so that they are the same as in
this process. ``ignore_eos``, which vLLM, SGLang and llama.cpp accept beyond the API, asks for answers of full length.
An event of the stream may hold several tokens: the count comes from ``usage`` where the server sends it, and the tokens
of an event share its time. An event may also be empty: for a token without text (vLLM), or for no token, at the end
(llama.cpp).
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantforge.errors import InputError, UsageError
from quantforge.evaluation.bench_requests import ServedRequest, TimedRequest
from quantforge.runtime.batching.engine import EngineCounters, EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import (
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
)
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.speculation.decode import SpeculativeDecoder

WARM_TOKENS = 4
IDLE = 0.002  # seconds to sleep at most while no request is there
TIMEOUT = 600.0  # seconds of one request to a server
MOST_LINE = 1 << 22  # bytes of one event of a stream


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Times of a stream that was served, with the counts of the engine.

    Attributes:
        served: in the order of the requests.
        counters: at the end.
        wasted: mean share of reserved places in the cache that were not used, over the steps.
    """

    served: list[ServedRequest]
    counters: EngineCounters
    wasted: float


def serve_in_process(
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
        follow: called with the number of finished requests.
        speculative: drafts tokens; None decodes without drafts.

    Raises:
        InputError: a request that can never fit, or logits that are not finite.
    """
    _warm_up(decoder, requests, options, speculative)
    engine = ServingEngine(decoder, options, speculative)
    served = {str(place): ServedRequest(one.at, len(one.ids)) for place, one in enumerate(requests)}
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


def send_to_server(
    url: str,
    model: str,
    requests: Sequence[TimedRequest],
    follow: Callable[[int], object] = lambda _: None,
) -> list[ServedRequest]:
    """Send a stream to a server; requests that fail record why.

    Args:
        url: up to ``/v1``, e.g. ``http://127.0.0.1:8000/v1``.
        model: its name at the server; "" for the only one that the server lists.
        requests: in the order in which they come.
        follow: is called with the number of finished requests.

    Raises:
        UsageError: not an HTTP address, or aiohttp is not installed.
        InputError: the server does not answer, or does not have the model.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: no http address", "http://127.0.0.1:8000/v1")
    try:
        import aiohttp  # noqa: F401 (needed only to measure a server)
    except ImportError as error:
        raise UsageError("--url needs aiohttp", "pip install 'quantforge[bench]'") from error
    return asyncio.run(_Sender(url.rstrip("/"), model, follow).send(requests))


class _Sender:
    def __init__(self, url: str, model: str, follow: Callable[[int], object]) -> None:
        self._url, self._model, self._follow = url, model, follow
        self._finished = 0
        self._begin = 0.0

    async def send(self, requests: Sequence[TimedRequest]) -> list[ServedRequest]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        # A server may close a connection that it has kept just as the next request goes out on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=MOST_LINE
        ) as session:
            self._model = await self._named(session)
            warm = TimedRequest(0.0, requests[0].ids, min(4, requests[0].new_tokens))
            first = ServedRequest(0.0, len(warm.ids))
            await self._one(session, warm, first)
            if first.error:
                raise InputError(
                    f"{self._url}: {first.error}", "the server has to offer /v1/completions"
                )
            self._finished, self._begin = 0, time.perf_counter()
            served = [ServedRequest(one.at, len(one.ids)) for one in requests]
            await asyncio.gather(
                *(self._one(session, *pair) for pair in zip(requests, served, strict=True))
            )
        return served

    async def _named(self, session: Any) -> str:
        """Return the name of the model, which the server has to list."""
        import aiohttp

        try:
            async with session.get(f"{self._url}/models") as answer:
                listed = [str(one["id"]) for one in (await answer.json())["data"]]
        except (aiohttp.ClientConnectionError, OSError, TimeoutError) as error:
            raise InputError(
                _unreached(self._url, error), "start the server, or give its address up to /v1"
            ) from error
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            own = self._url.endswith("/v1")
            raise InputError(
                f"{self._url}/models: what answers there lists no models as OpenAI's API does",
                "the address of a server up to /v1" if own else f"--url {self._url}/v1",
            ) from error
        if self._model and self._model not in listed:
            raise InputError(
                f"{self._url} has no model {self._model!r}, it lists {', '.join(listed[:5])}", ""
            )
        if not self._model and len(listed) != 1:
            raise InputError(f"{self._url} lists {len(listed)} models", "name one: --served-name")
        return self._model or listed[0]

    async def _one(self, session: Any, request: TimedRequest, waited: ServedRequest) -> None:
        import aiohttp

        await asyncio.sleep(max(0.0, self._begin + request.at - time.perf_counter()))
        body = {
            "model": self._model,
            "prompt": list(request.ids),
            "max_tokens": request.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            async with session.post(f"{self._url}/completions", json=body) as answer:
                if answer.status != 200:
                    waited.error = f"status {answer.status}: {(await answer.text()):.120}"
                else:
                    await self._read(answer.content, waited)
        except (aiohttp.ClientConnectionError, OSError, TimeoutError) as error:
            waited.error = _unreached(self._url, error)
        except (aiohttp.ClientError, ValueError, AttributeError, KeyError, TypeError):
            waited.error = "its stream is not that of OpenAI's API, or broke off"
        self._finished += 1
        self._follow(self._finished)

    async def _read(self, content: Any, waited: ServedRequest) -> None:
        """Note when the tokens of a stream come."""
        pieces: list[tuple[float, bool]] = []
        tokens = 0
        async for line in content:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if event.get("error"):
                waited.error = f"{event['error']!s:.120}"
                return
            if choices := event.get("choices"):
                shown = any(one.get("text") for one in choices)
                pieces.append((time.perf_counter() - self._begin, shown))
            usage = event.get("usage")
            if usage:
                tokens = int(usage["completion_tokens"])
        waited.times = _times(pieces, tokens)


def _unreached(url: str, error: Exception) -> str:
    """Say why a server was not reached."""
    import aiohttp

    if isinstance(error, TimeoutError):
        return f"{url} does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED:
        return f"nothing listens at {url}"
    if isinstance(error, OSError) and error.strerror:
        return f"{url}: {error.strerror}"
    return f"{url} closed the connection"


def _times(pieces: Sequence[tuple[float, bool]], tokens: int) -> list[float]:
    """Return a time for each token, of pieces with their time and whether they show text.

    A token that is no text, as one that ends it, comes in an empty piece, and so does a mere note of the end: there are
    too many pieces then, and those without text are left out.
    """
    whole = [at for at, _ in pieces]
    if len(whole) <= tokens:
        return spread(whole, tokens)
    shown = [at for at, text in pieces if text] or whole[:tokens]
    return spread(shown, tokens or len(shown))


def spread(pieces: Sequence[float], tokens: int) -> list[float]:
    """Return a time for each token: that of its piece; pieces have the same number, the last ones one more."""
    if not pieces or tokens <= len(pieces):
        return list(pieces)
    each, more = divmod(tokens, len(pieces))
    counts = [each + (place >= len(pieces) - more) for place in range(len(pieces))]
    return [at for at, count in zip(pieces, counts, strict=True) for _ in range(count)]
