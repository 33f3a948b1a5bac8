"""Benchmark requests: seeded or recorded arrivals, the timing of each request, and latency and throughput figures.

One token rate says little about serving. A user waits for the first token (TTFT), then for each further one (TPOT), and
the machine is paid for by the hour. The trade-off between them shows only under load, when requests arrive at their own
times and compete. So one seeded stream of requests is generated and sent in the same way to every model or server.

Arrivals are a Poisson process, all at once, or read from a trace. Prompts are cut from one text, so that their tokens
are natural language; a fraction of them starts with the same tokens, as with a common system prompt. The same options
yield the same stream on any machine.

- TTFT: from the arrival of a request to its first token, including time in the queue.
- TPOT: mean time per token after the first, (last - first) / (tokens - 1); None for a single token.
- end to end: from arrival to the last token.
- throughput: new tokens of all finished requests per second, from the first arrival to the last token.
- goodput: requests per second that met all limits (`Slo`), over the same time (DistServe, arXiv 2401.09670).
- cost: price per hour / tokens per hour, for a million new tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantforge.errors import InputError, UsageError
from quantforge.files.opener import FILES
from quantforge_files.roles import TEXT

MAX_REQUESTS = 100_000
MAX_TOKENS = 1 << 20
MAX_ARRIVAL_SECONDS = 1e9
TRACE_HINT = 'a line for each request: {"at": 0.5, "prompt_tokens": 128, "new_tokens": 32}'
PERCENTILES = (50, 90, 99)
MILLION, SECONDS_PER_HOUR = 1e6, 3600.0


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Range of token counts, from which lengths are drawn uniformly, both ends included.

    Raises:
        UsageError: not 1 <= least <= most.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_TOKENS:
            raise UsageError(
                f"{self.least} to {self.most} tokens",
                "two numbers from 1 on, the smaller one first",
            )

    @classmethod
    def parse(cls, text: str, option: str) -> LengthRange:
        """Parse ``128`` or ``16..256``.

        Args:
            text: the value of the option.
            option: name of the option, for error messages.

        Raises:
            UsageError: the text is neither a number nor a range.
        """
        minimum, dots, maximum = text.partition("..")
        if not minimum.isdecimal() or (dots and not maximum.isdecimal()) or len(text) > 20:
            raise UsageError(f"{option} {text}: no lengths", "write 128, or 16..256 for a range")
        return cls(int(minimum), int(maximum if dots else minimum))


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request to send at a given time.

    Attributes:
        arrival: seconds after the start of the benchmark.
        prompt_ids: token ids of the prompt.
        new_tokens: number of tokens to generate; end-of-text tokens are ignored.
    """

    arrival: float
    prompt_ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Parameters of a random stream of requests.

    Attributes:
        requests: number of requests.
        rate: mean arrivals per second; None sends all requests at once.
        prompt: range of prompt lengths in tokens, without the shared prefix.
        new: range of the number of tokens to generate.
        shared: length of the shared prompt prefix in tokens.
        share: fraction of the requests that start with the shared prefix, 0 to 1.
        seed: seed of the random generator.

    Raises:
        UsageError: a value is out of its range.
    """

    requests: int = 32
    rate: float | None = None
    prompt: LengthRange = field(default_factory=lambda: LengthRange(64, 256))
    new: LengthRange = field(default_factory=lambda: LengthRange(16, 64))
    shared: int = 0
    share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise UsageError(f"{self.requests} requests", f"1 to {MAX_REQUESTS}")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise UsageError(f"{self.rate:g} requests a second", "a number above 0")
        if not 0 <= self.share <= 1 or not 0 <= self.shared <= MAX_TOKENS:
            raise UsageError(
                f"{self.shared} shared tokens of a share of {self.share:g}", "a share is 0 to 1"
            )

    def draw(self, text_ids: Sequence[int]) -> list[TimedRequest]:
        """Generate the requests in order of arrival, with prompts cut from the token ids of a text.

        Raises:
            InputError: the text has no tokens.
        """
        rng = random.Random(self.seed)
        shared_prefix = _cut_prompt(text_ids, rng, self.shared) if self.shared else ()
        arrival, requests = 0.0, []
        for _ in range(self.requests):
            prompt_ids = _cut_prompt(
                text_ids, rng, rng.randint(self.prompt.least, self.prompt.most)
            )
            if rng.random() < self.share:
                prompt_ids = shared_prefix + prompt_ids
            requests.append(
                TimedRequest(arrival, prompt_ids, rng.randint(self.new.least, self.new.most))
            )
            arrival += rng.expovariate(self.rate) if self.rate is not None else 0.0
        return requests


def read_trace(path: Path, text_ids: Sequence[int], seed: int = 0) -> list[TimedRequest]:
    """Read requests from a trace file: JSON lines with ``at`` (seconds), ``prompt_tokens`` and ``new_tokens``.

    Args:
        path: the trace file.
        text_ids: token ids of the text from which prompts are cut.
        seed: seed of the positions of the prompts in the text.

    Returns:
        The requests in order of arrival.

    Raises:
        InputError: the file is missing, or a line is malformed; the message names the line.
    """
    lines = FILES.text(path, TEXT, None).splitlines()
    rng, requests = random.Random(seed), []
    for number, line in enumerate(lines, 1):
        if line.strip():
            arrival, prompt_tokens, new_tokens = _parse_trace_line(line, f"{path}:{number}")
            requests.append(
                TimedRequest(arrival, _cut_prompt(text_ids, rng, prompt_tokens), new_tokens)
            )
    if not requests:
        raise InputError(f"--trace {path}: no request", TRACE_HINT)
    return sorted(requests, key=lambda request: request.arrival)


def _parse_trace_line(line: str, line_name: str) -> tuple[float, int, int]:
    """Parse one line of a trace; return the arrival in seconds, the prompt length and the number of new tokens."""
    try:
        entry = json.loads(line)
        arrival, prompt_tokens, new_tokens = (
            entry[key] for key in ("at", "prompt_tokens", "new_tokens")
        )
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"--trace {line_name}: {line:.60}", TRACE_HINT) from error
    valid = type(arrival) in {int, float} and 0 <= arrival < MAX_ARRIVAL_SECONDS
    if not valid or any(
        type(count) is not int or not 1 <= count <= MAX_TOKENS
        for count in (prompt_tokens, new_tokens)
    ):
        raise InputError(f"--trace {line_name}: {line:.60}", TRACE_HINT)
    return float(arrival), prompt_tokens, new_tokens


def _cut_prompt(text_ids: Sequence[int], rng: random.Random, count: int) -> tuple[int, ...]:
    """Return ``count`` consecutive token ids from a random position of the text, wrapping around at its end."""
    if not text_ids:
        raise InputError("the text of the prompts has no token", "give another --text")
    start = rng.randrange(len(text_ids))
    return tuple(text_ids[(start + index) % len(text_ids)] for index in range(count))


@dataclass(slots=True)
class ServedRequest:
    """Timing of one request; times are seconds on one clock.

    Attributes:
        arrival: when the request was due to be sent.
        prompt_tokens: length of the prompt.
        token_times: when each generated token was received.
        error: why the request failed, or "".
    """

    arrival: float
    prompt_tokens: int
    token_times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Return the time to the first token in seconds."""
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Return the mean time per token after the first in seconds, or None for a single token."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps else None

    @property
    def end_to_end(self) -> float:
        """Return the time to the last token in seconds."""
        return self.token_times[-1] - self.arrival


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective: limits in seconds that a request must meet; None means no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Slo:
        """Parse ``ttft=500ms,tpot=50ms``.

        Args:
            text: the value of the option.
            option: name of the option, for error messages.

        Raises:
            UsageError: an unknown or repeated metric, or a value that is not a time.
        """
        hint = "ttft=500ms,tpot=50ms (also e2e; units ms and s)"
        limits: dict[str, float] = {}
        for item in text.split(","):
            name, _, value = item.strip().partition("=")
            if name not in cls.__slots__ or name in limits:
                raise UsageError(f"{option} {text}: {name!r}", hint)
            limits[name] = _parse_seconds(value, f"{option} {text}", hint)
        return cls(**limits)

    def is_met(self, request: ServedRequest) -> bool:
        """Return whether a finished request met every limit."""
        limits = (
            (self.ttft, request.ttft),
            (self.tpot, request.tpot),
            (self.e2e, request.end_to_end),
        )
        return all(
            limit is None or seconds is None or seconds <= limit for limit, seconds in limits
        )


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """Latency, throughput and cost of a served stream of requests; times are seconds.

    Attributes:
        requests: number of requests sent.
        failed: number of requests that failed.
        seconds: from the first arrival to the last token.
        prompt_tokens: prompt tokens of the finished requests.
        new_tokens: generated tokens of the finished requests.
        ttft: time to first token by percentile.
        tpot: time per output token by percentile.
        end_to_end: total latency by percentile.
        tokens_per_second: generated tokens per second.
        requests_per_second: finished requests per second.
        goodput: requests per second that met all limits; None without limits.
        slo_attainment: fraction of the requests that met all limits; None without limits.
        cost: price of a million generated tokens; None without a price.
        errors: number of failed requests by reason.
    """

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    new_tokens: int
    ttft: dict[int, float]
    tpot: dict[int, float]
    end_to_end: dict[int, float]
    tokens_per_second: float
    requests_per_second: float
    goodput: float | None
    slo_attainment: float | None
    cost: float | None
    errors: dict[str, int]


def summarize(
    served_requests: Sequence[ServedRequest], slo: Slo | None, price_per_hour: float | None
) -> BenchFigures:
    """Compute latency, throughput and cost of a stream of requests.

    Args:
        served_requests: all requests of the stream.
        slo: limits for the goodput, or None.
        price_per_hour: price of the machine per hour in any currency, or None.
    """
    finished = [request for request in served_requests if request.token_times and not request.error]
    seconds = max((request.token_times[-1] for request in finished), default=0.0) - min(
        request.arrival for request in served_requests
    )
    new_tokens = sum(len(request.token_times) for request in finished)
    within_limits = [request for request in finished if slo is not None and slo.is_met(request)]
    errors: dict[str, int] = {}
    for request in served_requests:
        if request not in finished:
            reason = request.error or "no token came"
            errors[reason] = errors.get(reason, 0) + 1
    return BenchFigures(
        requests=len(served_requests),
        failed=len(served_requests) - len(finished),
        seconds=max(0.0, seconds),
        prompt_tokens=sum(request.prompt_tokens for request in finished),
        new_tokens=new_tokens,
        ttft=_percentiles([request.ttft for request in finished]),
        tpot=_percentiles([request.tpot for request in finished if request.tpot is not None]),
        end_to_end=_percentiles([request.end_to_end for request in finished]),
        tokens_per_second=new_tokens / seconds if finished else 0.0,
        requests_per_second=len(finished) / seconds if finished else 0.0,
        goodput=None if slo is None else len(within_limits) / seconds if finished else 0.0,
        slo_attainment=None if slo is None else len(within_limits) / len(served_requests),
        cost=None
        if price_per_hour is None or not finished
        else price_per_hour / (new_tokens / seconds * SECONDS_PER_HOUR) * MILLION,
        errors=errors,
    )


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return percentiles by the nearest-rank method, so that each is a measured value."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        percent: ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
        for percent in PERCENTILES
    }


def _parse_seconds(text: str, option: str, hint: str) -> float:
    """Parse a time such as ``500ms`` or ``2s``; raise `UsageError` with ``hint`` for anything else."""
    unit = next((unit for unit in ("ms", "s") if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * (1e-3 if unit == "ms" else 1)
    except ValueError:
        value = 0.0
    if not unit or not 0 < value < 1e6:
        raise UsageError(f"{option}: {text!r} is no time", hint)
    return value
