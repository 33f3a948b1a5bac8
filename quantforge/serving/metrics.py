"""Metrics of the server in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from quantforge.runtime.batching.engine import EngineCounters

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKET_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Histogram of durations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKET_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(BUCKET_BOUNDS, seconds)] += 1
        self._sum += seconds

    def samples(self) -> dict[str, float]:
        """Return the samples by the suffix of their names."""
        total = 0
        samples: dict[str, float] = {}
        for bound, count in zip((*map(str, BUCKET_BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            samples[f'_bucket{{le="{bound}"}}'] = total
        return {**samples, "_sum": self._sum, "_count": total}


class ServingMetrics:
    """Counters of HTTP requests.

    Attributes:
        requests: number of requests by path and status.
        prompt_tokens: prompt tokens of accepted requests.
        disconnected: number of requests whose client disconnected.
        first_token: seconds from a request to its first token.
        completed: seconds from a request to its end.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.disconnected = 0
        self.first_token, self.completed = Histogram(), Histogram()

    def text(self, engine: EngineCounters) -> str:
        """Return the metrics of the server and of its engine."""
        requests = {
            f'{{path="{path}",status="{status}"}}': count
            for (path, status), count in sorted(self.requests.items())
        }
        finished = {
            f'{{reason="{reason}"}}': count for reason, count in sorted(engine.finished.items())
        }
        drafts = engine.speculation
        lines: list[str] = []

        def add(
            metric_type: str, name: str, help_text: str, samples: float | Mapping[str, float]
        ) -> None:
            full_name = f"quantforge_{name}"
            values = samples if isinstance(samples, Mapping) else {"": samples}
            lines.extend((f"# HELP {full_name} {help_text}", f"# TYPE {full_name} {metric_type}"))
            lines.extend(
                f"{full_name}{request_help} {value}" for request_help, value in values.items()
            )

        for name, help_text, samples in (
            ("requests", "Requests over HTTP.", requests),
            ("disconnected_requests", "Requests whose client went away.", self.disconnected),
            ("prompt_tokens", "Tokens of prompts that were accepted.", self.prompt_tokens),
            ("computed_tokens", "Tokens that went through the model.", engine.computed_tokens),
            ("generated_tokens", "Tokens that were chosen.", engine.new_tokens),
            ("finished_answers", "Completions that ended, by reason.", finished),
            ("preemptions", "Completions that gave back their pages.", engine.preemptions),
            ("guessed_tokens", "Tokens that were drafted.", drafts.drafted),
            ("accepted_guesses", "Drafted tokens that were right.", drafts.accepted),
            ("engine_steps", "Steps of the engine.", engine.steps),
            ("engine_step_seconds", "Seconds spent in steps.", engine.step_seconds),
            ("engine_scheduling_seconds", "Those without the model.", engine.scheduling_seconds),
        ):
            add("counter", f"{name}_total", help_text, samples)
        for name, help_text, value in (
            ("answers_running", "Completions that are computed.", engine.running),
            ("answers_waiting", "Completions that wait.", engine.waiting),
            ("cache_pages", "Pages of the cache.", engine.pages),
            ("cache_pages_free", "Pages that nobody holds.", engine.pages_free),
            ("cache_reserved_tokens", "Places in pages that are held.", engine.reserved_tokens),
            ("cache_used_tokens", "Those of them that are in use.", engine.used_tokens),
        ):
            add("gauge", name, help_text, value)
        ttft_help = "From a request to its first token."
        add("histogram", "time_to_first_token_seconds", ttft_help, self.first_token.samples())
        request_help = "From a request to the end of its completions."
        add("histogram", "request_seconds", request_help, self.completed.samples())
        return "\n".join((*lines, ""))
