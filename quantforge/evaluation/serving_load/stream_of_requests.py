"""A seeded stream of requests: when each comes, how long its prompt is, and how much it asks for.

Arrivals are a Poisson process (gaps drawn from an exponential distribution), or all at once, or come from a trace. The
prompts are runs of one text, so that their tokens are those of language; a share of the requests begins with the same
tokens, as behind a common system prompt. The same options give the same stream anywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, UsageError

MOST_REQUESTS = 100_000
MOST_TOKENS = 1 << 20
LATEST = 1e9  # seconds


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

    def made(self, text: Sequence[int]) -> list[TimedRequest]:
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
        InputError: the file is missing, or a line is none; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--trace {path}: {error}", "a file of JSON lines") from error
    draw, found = random.Random(seed), []
    for number, line in enumerate(lines, 1):
        if line.strip():
            at, prompt, new = _traced(line, f"{path}:{number}")
            found.append(TimedRequest(at, _run(text, draw, prompt), new))
    if not found:
        raise InputError(f"--trace {path}: no request", TRACE)
    return sorted(found, key=lambda one: one.at)


TRACE = 'a line for each request: {"at": 0.5, "prompt_tokens": 128, "new_tokens": 32}'


def _traced(line: str, where: str) -> tuple[float, int, int]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--trace {where}: no JSON", TRACE) from error
    stated: dict[str, Any] = entry if isinstance(entry, dict) else {}
    at, prompt, new = (stated.get(key) for key in ("at", "prompt_tokens", "new_tokens"))
    good = isinstance(at, int | float) and type(at) is not bool and 0 <= at < LATEST
    for count in (prompt, new):
        good = good and type(count) is int and 1 <= count <= MOST_TOKENS
    if not good:
        raise InputError(f"--trace {where}: {line:.60}", TRACE)
    return float(stated["at"]), stated["prompt_tokens"], stated["new_tokens"]


def _run(text: Sequence[int], draw: random.Random, tokens: int) -> tuple[int, ...]:
    """Return so many tokens from some place of the text on, which begins again at its end."""
    if not text:
        raise InputError("the text of the prompts has no token", "give another --text")
    first = draw.randrange(len(text))
    return tuple(text[(first + place) % len(text)] for place in range(tokens))
