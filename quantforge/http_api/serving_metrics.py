"""Figures of a server in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from quantforge.runtime.serving.counters import Counters

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Observed seconds, by upper bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Yield samples."""
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServingMetrics:
    """Counts of requests over HTTP.

    Attributes:
        requests: by path and status.
        prompt_tokens: of requests that were accepted.
        disconnected: requests whose client went away.
        first_token, answer: seconds from a request to its first token, and to its end.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = 0
        self.disconnected = 0
        self.first_token = Histogram()
        self.answer = Histogram()

    def text(self, engine: Counters) -> str:
        """Return the figures with those of the engine."""
        return "".join(f"{line}\n" for line in self._lines(engine))

    def _lines(self, engine: Counters) -> Iterator[str]:
        requests = {
            f'{{path="{path}",status="{status}"}}': count
            for (path, status), count in sorted(self.requests.items())
        }
        finished = {
            f'{{reason="{reason}"}}': count for reason, count in sorted(engine.finished.items())
        }
        for name, about, samples in (
            ("requests", "Requests over HTTP.", requests),
            ("disconnected_requests", "Requests whose client went away.", self.disconnected),
            ("prompt_tokens", "Tokens of prompts that were accepted.", self.prompt_tokens),
            ("computed_tokens", "Tokens that went through the model.", engine.computed_tokens),
            ("generated_tokens", "Tokens that were chosen.", engine.new_tokens),
            ("finished_answers", "Answers that ended, by reason.", finished),
            ("preemptions", "Answers that had to give back their pages.", engine.preemptions),
            ("guessed_tokens", "Tokens that a draft guessed.", engine.speculation.guessed),
            ("accepted_guesses", "Guesses that were right.", engine.speculation.accepted),
            ("engine_steps", "Steps of the engine.", engine.steps),
            ("engine_step_seconds", "Seconds spent in steps.", engine.step_seconds),
            (
                "engine_scheduling_seconds",
                "Seconds of steps without the model.",
                engine.scheduling_seconds,
            ),
        ):
            yield from _described(f"quantforge_{name}_total", about, "counter", samples)
        for name, about, value in (
            ("answers_running", "Answers that are computed.", engine.running),
            ("answers_waiting", "Answers that wait.", engine.waiting),
            ("cache_pages", "Pages of the cache.", engine.pages),
            ("cache_pages_free", "Pages that nobody holds.", engine.pages_free),
            (
                "cache_reserved_tokens",
                "Places in the pages of running answers.",
                engine.reserved_tokens,
            ),
            ("cache_used_tokens", "Those of them that are in use.", engine.used_tokens),
        ):
            yield from _described(f"quantforge_{name}", about, "gauge", value)
        for name, about, histogram in (
            ("time_to_first_token_seconds", "From a request to its first token.", self.first_token),
            ("request_seconds", "From a request to the end of its answers.", self.answer),
        ):
            full = f"quantforge_{name}"
            yield f"# HELP {full} {about}"
            yield f"# TYPE {full} histogram"
            yield from histogram.lines(full)


def _described(
    name: str, about: str, kind: str, samples: float | Mapping[str, int]
) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    if isinstance(samples, Mapping):
        yield from (f"{name}{labels} {value}" for labels, value in samples.items())
    else:
        yield f"{name} {samples}"
