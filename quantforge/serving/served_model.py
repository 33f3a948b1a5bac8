"""A model as it is served: its name, its tokenizer and chat template, the engine that computes it, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantforge.runtime.serving.engine import ServingEngine
from quantforge.runtime.text_side import TextSide
from quantforge.serving.documents import TokenTexts
from quantforge.serving.engine_thread import EngineThread
from quantforge.serving.metrics import ServingMetrics
from quantforge_kernels.kv import PAGE


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server: what it accepts from a client, and how long it works for one.

    Attributes:
        waiting: most completions that wait beside those that are computed; more are refused.
        body_bytes: of a request.
        seconds: from a request to the end of its completions.
        stopping_seconds: for completions that are not finished when the server is asked to stop.
    """

    waiting: int
    body_bytes: int
    seconds: float
    stopping_seconds: float = 5.0


class ServedModel:
    """A model behind an HTTP interface.

    Args:
        name: by which requests ask for it.
        side: its tokenizer and chat template.
        engine: computes it.
        rows: completions that the engine computes at a time.
        limits: of the server.
        prepare: is called on the engine's thread before anything else.

    Attributes:
        engine: on its thread.
        most: requests at a time.
        room: most tokens of a prompt and its completion.
        cache_tokens: that the cache has room for.
        stopping: no request is accepted any more.
        requests: over HTTP that are being answered.
    """

    def __init__(
        self,
        name: str,
        side: TextSide,
        engine: ServingEngine,
        rows: int,
        limits: ServerLimits,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.side, self.rows, self.limits = name, side, rows, limits
        self.most = rows + limits.waiting
        self.engine = EngineThread(engine, self.most, prepare)
        self.room, self.cache_tokens = engine.room, PAGE * engine.cache.pages
        self.texts = TokenTexts(side.tokenizer)
        self.metrics = ServingMetrics()
        self.stopping = False
        self.requests = 0
        self._created = int(time.time())

    def card(self) -> dict[str, Any]:
        """Return the entry of the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quantforge",
            "max_model_len": self.room,
        }
