"""Send a benchmark's requests in real time, to an engine in this process or to an OpenAI-compatible server.

A server is queried through its streaming completions API. Prompts are sent as token ids, so that they are the same as
in this process. ``ignore_eos``, an extension of the API that vLLM, SGLang and llama.cpp accept, requests answers of
full length. One event of the stream may hold several tokens: their number is taken from ``usage`` if the server sends
it, and the tokens of an event share its time. An event may also be empty: for a token without text (vLLM), or at the
end of the stream without any token (llama.cpp).
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

WARMUP_TOKENS = 4
MAX_IDLE_SECONDS = 0.002  # longest sleep while no request is due
REQUEST_TIMEOUT = 600.0  # seconds of one request to a server
MAX_EVENT_BYTES = 1 << 22  # bytes of one event of a stream


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Timings of all requests served by an in-process engine, with the engine's counters.

    Attributes:
        served: timings in the order of the requests.
        counters: counters of the engine at the end of the run.
        unused_cache_fraction: fraction of the reserved cache slots that was unused, averaged over the steps.
    """

    served: list[ServedRequest]
    counters: EngineCounters
    unused_cache_fraction: float


def serve_in_process(
    decoder: Decoder,
    requests: Sequence[TimedRequest],
    options: EngineOptions,
    on_finished: Callable[[int], object] = lambda _: None,
    speculative: SpeculativeDecoder | None = None,
) -> EngineRun:
    """Serve requests in real time with a new engine in this process, batching them as they arrive.

    Args:
        decoder: the model.
        requests: requests in order of arrival.
        options: options of the engine.
        on_finished: called with the number of finished requests.
        speculative: speculative decoder; None decodes without drafts.

    Raises:
        InputError: a request that can never fit, or logits that are not finite.
    """
    _warm_up(decoder, requests, options, speculative)
    engine = ServingEngine(decoder, options, speculative)
    served_requests = {
        str(index): ServedRequest(request.arrival, len(request.prompt_ids))
        for index, request in enumerate(requests)
    }
    sent = finished = 0
    reserved_tokens = used_tokens = 0
    start = time.perf_counter()
    while sent < len(requests) or not engine.idle:
        elapsed = time.perf_counter() - start
        while sent < len(requests) and requests[sent].arrival <= elapsed:
            request = requests[sent]
            engine.submit(GenerationRequest(str(sent), request.prompt_ids, request.new_tokens))
            sent += 1
        if engine.idle:
            time.sleep(min(MAX_IDLE_SECONDS, max(0.0, requests[sent].arrival - elapsed)))
            continue
        events = engine.step()
        elapsed = time.perf_counter() - start
        for event in events:
            if isinstance(event, NewToken):
                served_requests[event.id].token_times.append(elapsed)
            elif isinstance(event, Finished):
                if event.reason is FinishReason.ERROR:
                    raise InputError(f"request {event.id}: {event.error}", "")
                finished += 1
                on_finished(finished)
        counters = engine.counters
        reserved_tokens = reserved_tokens + counters.reserved_tokens
        used_tokens = used_tokens + counters.used_tokens
    unused_cache_fraction = (
        (reserved_tokens - used_tokens) / reserved_tokens if reserved_tokens else 0.0
    )
    return EngineRun(list(served_requests.values()), engine.counters, unused_cache_fraction)


def _warm_up(
    decoder: Decoder,
    requests: Sequence[TimedRequest],
    options: EngineOptions,
    speculative: SpeculativeDecoder | None,
) -> None:
    """Run a few requests on a separate engine, so that kernels are compiled before the measurement."""
    engine = ServingEngine(decoder, options, speculative)
    for index, request in enumerate(requests[: options.rows]):
        new_tokens = min(WARMUP_TOKENS, request.new_tokens)
        engine.submit(GenerationRequest(str(index), request.prompt_ids, new_tokens))
    while not engine.idle:
        engine.step()


def send_to_server(
    url: str,
    model: str,
    requests: Sequence[TimedRequest],
    on_finished: Callable[[int], object] = lambda _: None,
) -> list[ServedRequest]:
    """Send requests to a server at their arrival times; a failed request records its error.

    Args:
        url: base address up to ``/v1``, e.g. ``http://127.0.0.1:8000/v1``.
        model: name of the model on the server; "" if the server lists only one.
        requests: requests in order of arrival.
        on_finished: called with the number of finished requests.

    Raises:
        UsageError: not an HTTP address, or aiohttp is not installed.
        InputError: the server does not respond, or does not have the model.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: no http address", "http://127.0.0.1:8000/v1")
    try:
        import aiohttp  # noqa: F401 (needed only to measure a server)
    except ImportError as error:
        raise UsageError("--url needs aiohttp", "pip install 'quantforge[bench]'") from error
    return asyncio.run(_ServerClient(url.rstrip("/"), model, on_finished).send(requests))


class _ServerClient:
    """Client that sends the requests of a benchmark to one server."""

    def __init__(self, url: str, model: str, on_finished: Callable[[int], object]) -> None:
        self._url, self._model, self._on_finished = url, model, on_finished
        self._finished = 0
        self._start = 0.0

    async def send(self, requests: Sequence[TimedRequest]) -> list[ServedRequest]:
        """Send a warm-up request, then all requests at their arrival times; return their timings."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
        # A server may close a connection that it has kept just as the next request goes out on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=MAX_EVENT_BYTES
        ) as session:
            self._model = await self._resolve_model_name(session)
            warmup = TimedRequest(0.0, requests[0].prompt_ids, min(4, requests[0].new_tokens))
            warmup_result = ServedRequest(0.0, len(warmup.prompt_ids))
            await self._send_one(session, warmup, warmup_result)
            if warmup_result.error:
                raise InputError(
                    f"{self._url}: {warmup_result.error}", "the server has to offer /v1/completions"
                )
            self._finished, self._start = 0, time.perf_counter()
            served_requests = [
                ServedRequest(request.arrival, len(request.prompt_ids)) for request in requests
            ]
            await asyncio.gather(
                *(
                    self._send_one(session, *pair)
                    for pair in zip(requests, served_requests, strict=True)
                )
            )
        return served_requests

    async def _resolve_model_name(self, session: Any) -> str:
        """Return the name of the model to request, after checking that the server lists it."""
        import aiohttp

        try:
            async with session.get(f"{self._url}/models") as response:
                model_ids = [str(entry["id"]) for entry in (await response.json())["data"]]
        except (aiohttp.ClientConnectionError, OSError, TimeoutError) as error:
            raise InputError(
                _connection_error_message(self._url, error),
                "start the server, or give its address up to /v1",
            ) from error
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            has_version = self._url.endswith("/v1")
            raise InputError(
                f"{self._url}/models: what answers there lists no models as OpenAI's API does",
                "the address of a server up to /v1" if has_version else f"--url {self._url}/v1",
            ) from error
        if self._model and self._model not in model_ids:
            raise InputError(
                f"{self._url} has no model {self._model!r}, it lists {', '.join(model_ids[:5])}", ""
            )
        if not self._model and len(model_ids) != 1:
            raise InputError(
                f"{self._url} lists {len(model_ids)} models", "name one: --served-name"
            )
        return self._model or model_ids[0]

    async def _send_one(self, session: Any, request: TimedRequest, result: ServedRequest) -> None:
        """Wait for the arrival time of a request, send it, and record its token times or its error in ``result``."""
        import aiohttp

        await asyncio.sleep(max(0.0, self._start + request.arrival - time.perf_counter()))
        body = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            async with session.post(f"{self._url}/completions", json=body) as response:
                if response.status != 200:
                    result.error = f"status {response.status}: {(await response.text()):.120}"
                else:
                    await self._read_stream(response.content, result)
        except (aiohttp.ClientConnectionError, OSError, TimeoutError) as error:
            result.error = _connection_error_message(self._url, error)
        except (aiohttp.ClientError, ValueError, AttributeError, KeyError, TypeError):
            result.error = "its stream is not that of OpenAI's API, or broke off"
        self._finished += 1
        self._on_finished(self._finished)

    async def _read_stream(self, content: Any, served_request: ServedRequest) -> None:
        """Record the arrival time of every token of an event stream in ``served_request``."""
        events: list[tuple[float, bool]] = []
        tokens = 0
        async for line in content:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if event.get("error"):
                served_request.error = f"{event['error']!s:.120}"
                return
            if choices := event.get("choices"):
                has_text = any(choice.get("text") for choice in choices)
                events.append((time.perf_counter() - self._start, has_text))
            usage = event.get("usage")
            if usage:
                tokens = int(usage["completion_tokens"])
        served_request.token_times = _token_times(events, tokens)


def _connection_error_message(url: str, error: Exception) -> str:
    """Return a message that says why a server could not be reached."""
    import aiohttp

    if isinstance(error, TimeoutError):
        return f"{url} does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED:
        return f"nothing listens at {url}"
    if isinstance(error, OSError) and error.strerror:
        return f"{url}: {error.strerror}"
    return f"{url} closed the connection"


def _token_times(events: Sequence[tuple[float, bool]], tokens: int) -> list[float]:
    """Return a time for each token, given the time of every stream event and whether it has text.

    A token without text (such as an end token) arrives as an empty event, but so does a bare end-of-stream notice. If
    there are more events than tokens, the events without text are left out.
    """
    all_times = [seconds for seconds, _ in events]
    if len(all_times) <= tokens:
        return spread_over_tokens(all_times, tokens)
    text_times = [seconds for seconds, has_text in events if has_text] or all_times[:tokens]
    return spread_over_tokens(text_times, tokens or len(text_times))


def spread_over_tokens(event_times: Sequence[float], tokens: int) -> list[float]:
    """Return a time for each token: events hold equally many tokens, and the last ones one more."""
    if not event_times or tokens <= len(event_times):
        return list(event_times)
    per_event, remainder = divmod(tokens, len(event_times))
    counts = [
        per_event + (index >= len(event_times) - remainder) for index in range(len(event_times))
    ]
    return [
        seconds for seconds, count in zip(event_times, counts, strict=True) for _ in range(count)
    ]
