"""Draw a seeded stream of requests: arrivals, lengths of prompts, and lengths of answers.

Arrivals are a Poisson process, all at once, or read from a trace. Prompts are runs of one text, so that their tokens
are those of language; a share of them begins with the same tokens, as after a common system prompt. The same options
give the same stream on any machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError, UsageError
from quantforge_files.roles import TEXT

MOST_REQUESTS = 100_000
MOST_TOKENS = 1 << 20
LATEST = 1e9  # seconds
TRACE = 'a line for each request: {"at": 0.5, "prompt_tokens": 128, "new_tokens": 32}'


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
