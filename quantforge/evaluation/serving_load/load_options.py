"""Options and findings of a bench, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantforge.evaluation.serving_load.latency_figures import LoadFigures, Slo
from quantforge.evaluation.serving_load.stream_of_requests import RequestStream
from quantforge.runtime.speculation.draft_options import NO_DRAFT, DraftOptions

SCHEMA = "quantforge.bench/1"
BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a bench: what is sent, and to what.

    Attributes:
        stream: requests that are drawn.
        trace: file of requests in their place.
        text: whose tokens the prompts are: a source as for ``--calibration``.
        slo: limits, for the goodput.
        price: of an hour, for the cost.
        rows: requests that are computed at a time.
        token_budget: tokens of a step.
        batching: see `EngineOptions`.
        chunked_prefill: see `EngineOptions`.
        prefix_cache: see `EngineOptions`.
        cache: kind of the KV cache, see `quantforge.architectures.cache_kinds`.
        drafts: who guesses tokens, see `DraftOptions`.
        url: of a server that is measured in place of a model here.
        served_name: of the model at the server.
    """

    stream: RequestStream = field(default_factory=RequestStream)
    trace: Path | None = None
    text: str = BUILTIN
    slo: Slo | None = None
    price: float | None = None
    rows: int = 16
    token_budget: int = 512
    batching: str = "continuous"
    chunked_prefill: bool = True
    prefix_cache: bool = True
    cache: str = "16bit"
    drafts: DraftOptions = NO_DRAFT
    url: str = ""
    served_name: str = ""


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One model or server under load.

    Attributes:
        name: of it.
        figures: of the requests.
        engine: counts of the engine; None of a server.
        wasted: mean share of reserved places in the cache that were not used; None of a server.
    """

    name: str
    figures: LoadFigures
    engine: dict[str, Any] | None
    wasted: float | None


@dataclass(frozen=True, slots=True)
class LoadFound:
    """Findings of a bench.

    Attributes:
        rows: one for each model or server.
        options: what was asked for.
    """

    rows: list[LoadRow]
    options: LoadOptions

    def document(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        stated = asdict(self.options)
        stated["trace"] = None if self.options.trace is None else self.options.trace.name
        return {
            "schema": SCHEMA,
            "options": stated,
            "rows": [asdict(row) for row in self.rows],
        }
