"""A served model and the routes of its HTTP interface: what each path answers, while its client is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantforge.runtime.batching.engine import ServingEngine
from quantforge.runtime.batching.generation_requests import NewToken
from quantforge.runtime.text_processing import TextProcessor
from quantforge.serving.api_error import ApiError
from quantforge.serving.completions import (
    ChatDocuments,
    Completion,
    CompletionDocuments,
    Piece,
    TokenTexts,
    join,
    start,
    usage,
)
from quantforge.serving.engine_thread import EngineThread, Events, full
from quantforge.serving.metrics import MEDIA_TYPE, ServingMetrics
from quantforge.serving.request_bodies import Body, ChatBody, CompletionBody, parse_body
from quantforge_calibration.source_error import SourceError
from quantforge_kernels.kv import PAGE_SIZE

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
BODY_SECONDS = 60.0
DISCARDED = 16  # times the largest body: read and thrown away, for clients that listen only after they have sent
LAST_SECONDS = 5.0  # to send the end of a stream to a client that does not read
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ServedModel:
    """A model behind an HTTP interface.

    Args:
        name: by which requests ask for it.
        side: its tokenizer and chat template.
        engine: computes it.
        rows: completions that the engine computes at a time.
        waiting: most completions that wait beside those; more are refused.
        body_bytes: most bytes of a request.
        seconds: most time from a request to the end of its completions.
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
        side: TextProcessor,
        engine: ServingEngine,
        rows: int,
        waiting: int,
        body_bytes: int,
        seconds: float,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.processor, self.rows = name, side, rows
        self.body_bytes, self.seconds = body_bytes, seconds
        self.most = rows + waiting
        self.engine = EngineThread(engine, self.most, prepare)
        self.room, self.cache_tokens = engine.max_request_tokens, PAGE_SIZE * engine.cache.pages
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


def application(model: ServedModel) -> ASGIApp:
    """Return the application that serves a model; every refusal is an error document, every response is counted."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.card()]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model.name:
            message = f"no model {name!a:.100} is served here; it is {model.name!a}"
            raise ApiError(message, 404, "model", "model_not_found")
        return JSONResponse(model.card())

    async def health(_: Request) -> Response:
        if model.stopping:
            raise _stopping()
        if model.engine.broken:
            raise ApiError("the engine has failed", 503, code="engine_failed")
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(model.metrics.text(await model.engine.counters()), media_type=MEDIA_TYPE)

    async def refused(_: Request, error: Any) -> Response:
        return JSONResponse(error.document(), error.status, error.headers)

    async def no_route(request: Request, error: Any) -> Response:
        rules = {
            404: f"no such path; there are {', '.join(PATHS)}",
            405: "another method is expected there",
        }
        status, where = error.status_code, f"{request.method} {request.url.path[:100]}"
        message = f"{where}: {rules.get(status, error.detail)}"
        return await refused(request, ApiError(message, status, headers=error.headers or {}))

    async def failed(request: Request, _: Exception) -> Response:
        message = "this is a bug in the server, whose log has the traceback"
        return await refused(request, ApiError(message, 500))

    app = Starlette(
        routes=[
            Route(
                PATHS[0],
                CompletionEndpoint(model, CompletionBody, CompletionDocuments),
                methods=["POST"],
            ),
            Route(PATHS[1], CompletionEndpoint(model, ChatBody, ChatDocuments), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        # Starlette raises whatever `failed` answers, so that the log has it.
        exception_handlers={ApiError: refused, HTTPException: no_route, Exception: failed},
    )

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                model.metrics.requests[path, message["status"]] += 1
            await send(message)

        await app(scope, receive, count)

    return counted


class CompletionEndpoint:
    """A path whose requests are completed by the model.

    Args:
        model: the model.
        kind: of the bodies.
        documents: of the responses.
    """

    def __init__(
        self, model: ServedModel, kind: type[Body], documents: type[CompletionDocuments]
    ) -> None:
        self._model, self._kind, self._documents = model, kind, documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI calls it.

        Raises:
            ApiError: it is refused or has failed, and nothing was sent.
        """
        model = self._model
        if model.stopping:
            raise _stopping()
        if model.requests >= model.most:
            raise full()
        begun = perf_counter()
        model.requests += 1
        try:
            data = await read_body(Request(scope, receive), model.body_bytes)
            body = parse_body(self._kind, data, model.name)
            await while_connected(receive, self._respond(body, begun, scope, receive, send))
        except ClientDisconnect:
            model.metrics.disconnected += 1
        finally:
            model.requests -= 1

    async def _respond(
        self, body: Body, begun: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Compute the completions and send them, in time; the end frees whatever the engine holds of them."""
        model, seconds = self._model, self._model.seconds
        documents = self._documents(model.name, model.texts)
        completions: list[Completion] = []
        found: list[list[Piece]] = []
        started, last = False, b"data: [DONE]\n\n"
        try:
            async with asyncio.timeout(seconds):
                completions = await asyncio.to_thread(
                    start, documents.id, model.processor, body, model.room
                )
                events = model.engine.submit([one.request for one in completions])
                model.metrics.prompt_tokens += usage(completions, body.n)["prompt_tokens"]
                pieces = self._pieces(completions, events, begun)
                if body.stream:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
                    started = True
                    async for chunk in _chunks(body, documents, completions, pieces):
                        await send(_part(_event(chunk)))
                else:
                    found = [[] for _ in completions]
                    async for index, piece in pieces:
                        found[index].append(piece)
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else _too_late(seconds)
            if not started:
                raise refusal from None
            last = _event(refusal.document())
        finally:
            model.engine.cancel(one.request.id for one in completions)
        if started:
            with suppress(TimeoutError):
                await asyncio.wait_for(send(_part(last, more=False)), LAST_SECONDS)
        else:
            document = documents.whole([*map(join, found)])
            response = JSONResponse({**document, "usage": usage(completions, body.n)})
            await response(scope, receive, send)

    async def _pieces(
        self, completions: Sequence[Completion], events: Events, begun: float
    ) -> AsyncIterator[tuple[int, Piece]]:
        """Yield numbers of completions with the next piece of each, until all have ended."""
        metrics, engine = self._model.metrics, self._model.engine
        left = {one.request.id: one for one in completions}
        first = True
        while left:
            event = await events.get()
            completion = left.get(event.id)
            if completion is None:  # ended by a stop string
                continue
            if first and isinstance(event, NewToken):
                metrics.first_token.observe(perf_counter() - begun)
                first = False
            try:
                piece = completion.add(event)
            except SourceError as error:
                message = f"the completion has no text: {error.message}"
                raise ApiError(message, 500, code="engine_error") from error
            if piece.reason is not None:
                del left[event.id]
                engine.cancel([event.id])
            if piece != Piece():
                yield completion.index, piece
        metrics.completed.observe(perf_counter() - begun)


async def _chunks(
    body: Body,
    documents: CompletionDocuments,
    completions: Sequence[Completion],
    pieces: AsyncIterator[tuple[int, Piece]],
) -> AsyncIterator[dict[str, Any]]:
    """Yield the documents of a stream."""
    more = {"usage": None} if body.stream_options.include_usage else {}
    opened: set[int] = set()
    async for index, piece in pieces:
        opening = None if index in opened else documents.opening(index)
        opened.add(index)
        if opening is not None:
            yield {**opening, **more}
        yield {**documents.chunk((index, piece)), **more}
    if more:
        yield {**documents.chunk(), "usage": usage(completions, body.n)}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do work, which is cancelled when the client closes the connection.

    Raises:
        ClientDisconnect: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is not said to be JSON (a page in a browser may send other types to anybody, unasked), has more
            than ``most`` bytes, or does not come in time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        kind != "application/json"
        or request.headers.get("content-encoding", "identity") != "identity"
    ):
        raise ApiError(
            "send the body as it is, with the header 'Content-Type: application/json'",
            415,
            code="unsupported_media_type",
        )
    body, length = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                length += len(part)
                if length <= most:
                    body += part
                elif length > most * DISCARDED:
                    break
    except TimeoutError:
        message = f"the body was not there within {BODY_SECONDS:g} s"
        raise ApiError(message, 408, code="timeout") from None
    if length > most:
        raise ApiError(
            f"the body has more than {most} bytes; send less, or start the server with a larger --max-body",
            413,
            code="body_too_large",
        )
    return bytes(body)


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, allow_nan=False).encode() + b"\n\n"


def _part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _stopping() -> ApiError:
    return ApiError("the server is stopping", 503, code="stopping")


def _too_late(seconds: float) -> ApiError:
    return ApiError(
        f"the completion was not there within {seconds:g} s; ask for fewer tokens, or start the server with a larger "
        "--timeout",
        504,
        code="timeout",
    )
