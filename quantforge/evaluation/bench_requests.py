"""Requests of a bench: a seeded stream or a trace, what each had to wait for, and the figures of all.

One token rate says little about serving. A person waits for the first token (TTFT), then for each further one (TPOT),
and a machine is paid for by the hour; how these trade off shows only while requests come at their own times and
compete. So a seeded stream of them is made once and sent the same way to whatever is measured.

Arrivals are a Poisson process, all at once, or read from a trace. Prompts are runs of one text, so that their tokens
are those of language; a share of them begins with the same tokens, as after a common system prompt. The same options
give the same stream on any machine.

- TTFT: from the arrival of a request to its first token; queueing counts.
- TPOT: the mean time of its further tokens, (last - first) / (tokens - 1); None for a single token.
- end to end: from arrival to the last token.
- throughput: new tokens of all finished requests in a second, from the first arrival to the last token.
- goodput: requests in a second that kept all limits (`Slo`), over the same time (DistServe, arXiv 2401.09670).
- cost: price of an hour / tokens of an hour, for a million new tokens.
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

MOST_REQUESTS = 100_000
MOST_TOKENS = 1 << 20
LATEST = 1e9  # seconds
TRACE = 'a line for each request: {"at": 0.5, "prompt_tokens": 128, "new_tokens": 32}'
PERCENTILES = (50, 90, 99)
MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Whole numbers drawn evenly from ``least`` to ``most``.

    Raises:
        UsageError: not 1 <= least <= most.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST_TOKENS:
            raise UsageError(
                f"{self.least} to {self.most} tokens",
                "two numbers from 1 on, the smaller one first",
            )

    @classmethod
    def parse(cls, text: str, option: str) -> LengthRange:
        """Parse ``128`` or ``16..256``.

        Raises:
            UsageError: it is neither; ``option`` is named.
        """
        least, dots, most = text.partition("..")
        if not least.isdecimal() or (dots and not most.isdecimal()) or len(text) > 20:
            raise UsageError(f"{option} {text}: no lengths", "write 128, or 16..256 for a range")
        return cls(int(least), int(most if dots else least))


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request that comes at a time.

    Attributes:
        at: seconds after the begin.
        ids: tokens of its prompt.
        new_tokens: that are generated, whatever they are.
    """

    at: float
    ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Options of a stream.

    Attributes:
        requests: how many.
        rate: of them in a second, on average; None: all come at once.
        prompt, new: tokens of prompts and answers.
        shared: tokens at the begin of prompts that are the same.
        share: of the requests that begin so; 0 to 1.
        seed: of everything that is drawn.

    Raises:
        UsageError: a value out of its range.
    """

    requests: int = 32
    rate: float | None = None
    prompt: LengthRange = field(default_factory=lambda: LengthRange(64, 256))
    new: LengthRange = field(default_factory=lambda: LengthRange(16, 64))
    shared: int = 0
    share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise UsageError(f"{self.requests} requests", f"1 to {MOST_REQUESTS}")
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise UsageError(f"{self.rate:g} requests a second", "a number above 0")
        if not 0 <= self.share <= 1 or not 0 <= self.shared <= MOST_TOKENS:
            raise UsageError(
                f"{self.shared} shared tokens of a share of {self.share:g}", "a share is 0 to 1"
            )

    def draw(self, text: Sequence[int]) -> list[TimedRequest]:
        """Return the requests in the order in which they come; prompts are runs of the tokens ``text``.

        Raises:
            InputError: the text has no token.
        """
        draw = random.Random(self.seed)
        common = _run(text, draw, self.shared) if self.shared else ()
        at, found = 0.0, []
        for _ in range(self.requests):
            own = _run(text, draw, draw.randint(self.prompt.least, self.prompt.most))
            ids = common + own if draw.random() < self.share else own
            found.append(TimedRequest(at, ids, draw.randint(self.new.least, self.new.most)))
            at += draw.expovariate(self.rate) if self.rate is not None else 0.0
        return found


def read_trace(path: Path, text: Sequence[int], seed: int = 0) -> list[TimedRequest]:
    """Read a trace: lines of JSON with ``at`` (seconds), ``prompt_tokens`` and ``new_tokens``.

    Returns:
        The requests in the order in which they come; prompts are runs of the tokens ``text``.

    Raises:
        InputError: the file is missing, or a line is malformed; the line is named.
    """
    lines = FILES.text(path, TEXT, None).splitlines()
    draw, found = random.Random(seed), []
    for number, line in enumerate(lines, 1):
        if line.strip():
            at, prompt, new = _parse_trace_line(line, f"{path}:{number}")
            found.append(TimedRequest(at, _run(text, draw, prompt), new))
    if not found:
        raise InputError(f"--trace {path}: no request", TRACE)
    return sorted(found, key=lambda one: one.at)


def _parse_trace_line(line: str, where: str) -> tuple[float, int, int]:
    """Return seconds, tokens of the prompt and new tokens."""
    try:
        entry = json.loads(line)
        at, prompt, new = (entry[key] for key in ("at", "prompt_tokens", "new_tokens"))
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"--trace {where}: {line:.60}", TRACE) from error
    valid = type(at) in {int, float} and 0 <= at < LATEST
    if not valid or any(type(n) is not int or not 1 <= n <= MOST_TOKENS for n in (prompt, new)):
        raise InputError(f"--trace {where}: {line:.60}", TRACE)
    return float(at), prompt, new


def _run(text: Sequence[int], draw: random.Random, tokens: int) -> tuple[int, ...]:
    """Return so many tokens from some place of the text on, which begins again at its end."""
    if not text:
        raise InputError("the text of the prompts has no token", "give another --text")
    first = draw.randrange(len(text))
    return tuple(text[(first + place) % len(text)] for place in range(tokens))


@dataclass(slots=True)
class ServedRequest:
    """One request as it was served; times are seconds on one clock.

    Attributes:
        at: when it came.
        times: when each of its tokens came.
        prompt_tokens: of its prompt.
        error: why it failed, or "".
    """

    at: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Return the seconds to its first token."""
        return self.times[0] - self.at

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds of its further tokens, None if there is none."""
        steps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / steps if steps else None

    @property
    def end_to_end(self) -> float:
        """Return the seconds to its last token."""
        return self.times[-1] - self.at


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that a request has to keep; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Slo:
        """Parse ``ttft=500ms,tpot=50ms``.

        Raises:
            UsageError: no such figure, no time, or one twice; ``option`` is named.
        """
        hint = "ttft=500ms,tpot=50ms (also e2e; units ms and s)"
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in cls.__slots__ or name in found:
                raise UsageError(f"{option} {text}: {name!r}", hint)
            found[name] = _seconds(value, f"{option} {text}", hint)
        return cls(**found)

    def kept(self, one: ServedRequest) -> bool:
        """Return whether a finished request kept every limit."""
        pairs = ((self.ttft, one.ttft), (self.tpot, one.tpot), (self.e2e, one.end_to_end))
        return all(most is None or took is None or took <= most for most, took in pairs)


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """Figures of a stream that was served; times are seconds.

    Attributes:
        requests, failed: that were sent, and that have no answer.
        seconds: from the first arrival to the last token.
        prompt_tokens, new_tokens: of the finished requests.
        ttft, tpot, end_to_end: by percentile.
        tokens_per_second: new tokens.
        requests_per_second: that were finished.
        goodput: requests in a second that kept the limits, None without any.
        kept: share of the requests that kept the limits.
        cost: of a million new tokens, None without a price.
        errors: why requests failed, with counts.
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
    kept: float | None
    cost: float | None
    errors: dict[str, int]


def figures(served: Sequence[ServedRequest], slo: Slo | None, price: float | None) -> BenchFigures:
    """Return the figures of a stream.

    Args:
        served: all of its requests.
        slo: limits, for the goodput.
        price: of an hour, in any currency.
    """
    done = [one for one in served if one.times and not one.error]
    seconds = max((one.times[-1] for one in done), default=0.0) - min(one.at for one in served)
    tokens = sum(len(one.times) for one in done)
    kept = [one for one in done if slo is not None and slo.kept(one)]
    errors: dict[str, int] = {}
    for one in served:
        if one not in done:
            why = one.error or "no token came"
            errors[why] = errors.get(why, 0) + 1
    return BenchFigures(
        requests=len(served),
        failed=len(served) - len(done),
        seconds=max(0.0, seconds),
        prompt_tokens=sum(one.prompt_tokens for one in done),
        new_tokens=tokens,
        ttft=_percentiles([one.ttft for one in done]),
        tpot=_percentiles([one.tpot for one in done if one.tpot is not None]),
        end_to_end=_percentiles([one.end_to_end for one in done]),
        tokens_per_second=tokens / seconds if done else 0.0,
        requests_per_second=len(done) / seconds if done else 0.0,
        goodput=None if slo is None else len(kept) / seconds if done else 0.0,
        kept=None if slo is None else len(kept) / len(served),
        cost=None if price is None or not done else price / (tokens / seconds * HOUR) * MILLION,
        errors=errors,
    )


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return percentiles by the nearest rank: each is a value that occurred."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {one: ordered[max(0, math.ceil(one / 100 * len(ordered)) - 1)] for one in PERCENTILES}


def _seconds(text: str, what: str, hint: str) -> float:
    unit = next((unit for unit in ("ms", "s") if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * (1e-3 if unit == "ms" else 1)
    except ValueError:
        value = 0.0
    if not unit or not 0 < value < 1e6:
        raise UsageError(f"{what}: {text!r} is no time", hint)
    return value
