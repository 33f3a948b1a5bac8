"""A served decoder without a model, and a client that calls the application in this process, and may go away."""

from __future__ import annotations

import asyncio
import json
import string
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.text_processing import TextProcessor
from quantforge.serving.routes import ServedModel, application
from quantforge_calibration.chat import ChatTemplate
from quantforge_calibration.tokenizer import TextTokenizer
from tests.fake_decoder import VOCABULARY, FakeDecoder

LETTERS = (string.ascii_letters + string.digits)[: VOCABULARY - 1]
END = VOCABULARY - 1  # a token that ends texts
NAME = "fake"


def fake_text_processor(template: str | None = None) -> TextProcessor:
    """The text side of the decoder: a letter for each token."""
    vocabulary = {letter: place for place, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    chat = None if template is None else ChatTemplate({"default": template}, {})
    return TextProcessor(
        TextTokenizer(tokenizer, None, END, VOCABULARY), chat, frozenset({END}), 400
    )


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    return [LETTERS.index(letter) for letter in text]


def letters(tokens: list[int]) -> str:
    """The text of tokens."""
    return "".join(LETTERS[token] for token in tokens if token != END)


@dataclass
class Response:
    """A response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        parts = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        assert all(part == "[DONE]" for part in parts[-1:] if not part.startswith("{"))
        return [json.loads(part) for part in parts if part != "[DONE]"]

    def text(self, index: int = 0) -> str:
        """The text of an answer, whole or streamed."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return self.document["choices"][index]["text"]
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(choice["text"] for choice in choices if choice["index"] == index)


class Client:
    """Calls an application."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self._app = model, application(model)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None, *,
                   gone: float | None = None, gone_after: int | None = None) -> Response:  # fmt: skip
        """Send a body; be ``gone`` after seconds, or ``gone_after`` so many parts of the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._call("POST", path, data, headers, gone, gone_after)

    async def complete(self, **body: Any) -> Response:
        return await self.post("/v1/completions", {"model": NAME, "temperature": 0, **body})

    async def get(self, path: str) -> Response:
        return await self._call("GET", path, b"", None, None, None)

    async def _call(self, method, path, data, headers, gone, gone_after) -> Response:
        found, left, parts = Response(), asyncio.Event(), 0
        sent = {"content-type": "application/json", **(headers or {})}
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
                 "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
                 "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
                 "headers": [(name.encode(), value.encode()) for name, value in sent.items()]}  # fmt: skip
        body = [data[start : start + 65536] for start in range(0, len(data), 65536)] or [b""]

        async def receive():
            if body:
                part = body.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(body)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            nonlocal parts
            if left.is_set():
                return
            if message["type"] == "http.response.start":
                found.status = message["status"]
                found.headers = {
                    name.decode(): value.decode() for name, value in message["headers"]
                }
            else:
                found.body += message.get("body", b"")
                parts += 1
                if gone_after is not None and parts >= gone_after:
                    left.set()
            await asyncio.sleep(0)

        if gone is not None:
            asyncio.get_running_loop().call_later(gone, left.set)
        await asyncio.wait_for(self._app(scope, receive, send), 60)
        return found


@asynccontextmanager
async def serve_fake_decoder(
    decoder=None, *, template=None, waiting=64, body_bytes=4 << 20, seconds=600.0, **options
):
    """A client of a server that has given back every page when it ends."""
    options = {"rows": 4, "tokens": 300, "token_budget": 64, **options}
    engine = ServingEngine(decoder or FakeDecoder(), EngineOptions(**options))
    side = fake_text_processor(template)
    model = ServedModel(NAME, side, engine, options["rows"], waiting, body_bytes, seconds)
    model.engine.start()
    try:
        yield Client(model)
        for _ in range(500):
            counters = await model.engine.counters()
            if (
                not counters.running
                + counters.waiting
                + model.engine.open_requests
                + model.requests
            ):
                break
            await asyncio.sleep(0.01)
        assert counters.pages_free == counters.pages
        assert (model.engine.open_requests, model.requests) == (0, 0)
    finally:
        model.engine.stop()
