"""Compute percentiles of latencies, throughput, goodput and cost from the times of tokens.

- TTFT: from the arrival of a request to its first token; queueing counts.
- TPOT: the mean time of its further tokens, (last - first) / (tokens - 1); of a single token there is none.
- end to end: from arrival to the last token.
- throughput: new tokens of all finished requests in a second, from the first arrival to the last token.
- goodput: requests in a second that kept all limits (`Slo`), over the same time (DistServe, arXiv 2401.09670).
- cost: price of an hour / tokens of an hour, for a million new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantforge.errors import UsageError

PERCENTILES = (50, 90, 99)
MILLION, HOUR = 1e6, 3600.0


@dataclass(slots=True)
class Waited:
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

    def kept(self, one: Waited) -> bool:
        """Return whether a finished request kept every limit."""
        pairs = ((self.ttft, one.ttft), (self.tpot, one.tpot), (self.e2e, one.end_to_end))
        return all(most is None or took is None or took <= most for most, took in pairs)


@dataclass(frozen=True, slots=True)
class LoadFigures:
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


def figures(served: Sequence[Waited], slo: Slo | None, price: float | None) -> LoadFigures:
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
    return LoadFigures(
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
