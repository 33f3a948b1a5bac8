"""A model as it is served: its name, its text side, the engine that computes it, and what the server counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quantforge.http_api.engine_thread import EngineThread
from quantforge.http_api.server_limits import ServerLimits
from quantforge.http_api.serving_metrics import ServingMetrics
from quantforge.http_api.token_texts import TokenTexts
from quantforge.runtime.serving.engine import ServingEngine
from quantforge.runtime.text_side import TextSide
from quantforge_kernels.kv import PAGE


class ServedModel:
    """A model behind an HTTP interface.

    Args:
        name: by which requests ask for it.
        side: its tokenizer and chat template.
        engine: computes it.
        rows: answers that the engine computes at a time.
        limits: of the server.
        begin: is called on the engine's thread before anything else.

    Attributes:
        engine: on its thread.
        rows: answers that it computes at a time.
        room: most tokens of a prompt and its answer.
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
        limits: ServerLimits | None = None,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.side, self.limits = name, side, limits or ServerLimits()
        self.most = rows + self.limits.waiting
        self.engine = EngineThread(engine, self.most, begin)
        self.rows, self.room = rows, engine.room
        self.cache_tokens = PAGE * engine.cache.pool.pages
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
