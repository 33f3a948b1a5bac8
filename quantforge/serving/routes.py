"""Served model and HTTP routes: what each path returns, as long as its client is connected."""

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
    TextPiece,
    TokenTexts,
    join_pieces,
    start_completions,
    usage,
)
from quantforge.serving.engine_thread import EngineThread, EventQueue, too_many_requests
from quantforge.serving.metrics import MEDIA_TYPE, ServingMetrics
from quantforge.serving.request_bodies import Body, ChatBody, CompletionBody, parse_body
from quantforge_calibration.source_error import SourceError
from quantforge_kernels.kv import PAGE_SIZE

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
BODY_SECONDS = 60.0
# So many times the largest body are discarded, for clients that read only after sending everything
MAX_DISCARD_FACTOR = 16
STREAM_END_SECONDS = 5.0  # time to send the end of a stream to a client that does not read
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class ServedModel:
    """A model behind an HTTP interface.

    Args:
        name: name of the model in requests.
        processor: tokenizer and chat template of the model.
        engine: engine that computes the model.
        rows: number of completions computed at a time.
        waiting: maximum number of completions that wait in addition; more are refused.
        body_bytes: maximum size of a request body.
        timeout_seconds: maximum time from a request to the end of its completions.
        prepare: called on the engine's thread before anything else.

    Attributes:
        engine: the engine on its thread.
        max_requests: maximum number of requests at a time.
        max_total_tokens: maximum number of tokens of a prompt with its completion.
        cache_tokens: number of tokens that the cache can hold.
        stopping: whether the server is stopping and refuses requests.
        requests: number of HTTP requests being answered.
    """

    def __init__(
        self,
        name: str,
        processor: TextProcessor,
        engine: ServingEngine,
        rows: int,
        waiting: int,
        body_bytes: int,
        timeout_seconds: float,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.processor, self.rows = name, processor, rows
        self.body_bytes, self.timeout_seconds = body_bytes, timeout_seconds
        self.max_requests = rows + waiting
        self.engine = EngineThread(engine, self.max_requests, prepare)
        self.max_total_tokens = engine.max_request_tokens
        self.cache_tokens = PAGE_SIZE * engine.cache.pages
        self.texts = TokenTexts(processor.tokenizer)
        self.metrics = ServingMetrics()
        self.stopping = False
        self.requests = 0
        self._created = int(time.time())

    def card(self) -> dict[str, Any]:
        """Return the entry of the model in the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quantforge",
            "max_model_len": self.max_total_tokens,
        }


def application(model: ServedModel) -> ASGIApp:
    """Create the ASGI application of a model; every error has an error document, every response is counted."""

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.card()]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model.name:
            message = f"no model {name!a:.100} is served here; it is {model.name!a}"
            raise ApiError(message, 404, "model", "model_not_found")
        return JSONResponse(model.card())

    async def health(_: Request) -> Response:
        if model.stopping:
            raise _stopping_error()
        if model.engine.has_failed:
            raise ApiError("the engine has failed", 503, code="engine_failed")
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(model.metrics.text(await model.engine.counters()), media_type=MEDIA_TYPE)

    async def error_response(_: Request, error: Any) -> Response:
        return JSONResponse(error.document(), error.status, error.headers)

    async def http_error_response(request: Request, error: Any) -> Response:
        rules = {
            404: f"no such path; there are {', '.join(PATHS)}",
            405: "another method is expected there",
        }
        status, request_line = error.status_code, f"{request.method} {request.url.path[:100]}"
        message = f"{request_line}: {rules.get(status, error.detail)}"
        return await error_response(request, ApiError(message, status, headers=error.headers or {}))

    async def internal_error_response(request: Request, _: Exception) -> Response:
        message = "this is a bug in the server, whose log has the traceback"
        return await error_response(request, ApiError(message, 500))

    app = Starlette(
        routes=[
            Route(
                PATHS[0],
                CompletionEndpoint(model, CompletionBody, CompletionDocuments),
                methods=["POST"],
            ),
            Route(PATHS[1], CompletionEndpoint(model, ChatBody, ChatDocuments), methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        # Starlette re-raises the exception after `internal_error_response`, so that it is logged.
        exception_handlers={
            ApiError: error_response,
            HTTPException: http_error_response,
            Exception: internal_error_response,
        },
    )

    async def counting_app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                model.metrics.requests[path, message["status"]] += 1
            await send(message)

        await app(scope, receive, count)

    return counting_app


class CompletionEndpoint:
    """ASGI endpoint of a path whose requests are completed by the model.

    Args:
        model: the model.
        body_type: type of the request bodies.
        documents: type of the response documents.
    """

    def __init__(
        self, model: ServedModel, body_type: type[Body], documents: type[CompletionDocuments]
    ) -> None:
        self._model, self._body_type, self._documents = model, body_type, documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            ApiError: it was refused or has failed before anything was sent.
        """
        model = self._model
        if model.stopping:
            raise _stopping_error()
        if model.requests >= model.max_requests:
            raise too_many_requests()
        start_time = perf_counter()
        model.requests += 1
        try:
            data = await read_body(Request(scope, receive), model.body_bytes)
            body = parse_body(self._body_type, data, model.name)
            await run_while_connected(
                receive, self._respond(body, start_time, scope, receive, send)
            )
        except ClientDisconnect:
            model.metrics.disconnected += 1
        finally:
            model.requests -= 1

    async def _respond(
        self, body: Body, start_time: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Compute the completions and send them within the time limit; finally release them in the engine."""
        model, seconds = self._model, self._model.timeout_seconds
        documents = self._documents(model.name, model.texts)
        completions: list[Completion] = []
        pieces_by_completion: list[list[TextPiece]] = []
        is_streaming, final_event = False, b"data: [DONE]\n\n"
        try:
            async with asyncio.timeout(seconds):
                completions = await asyncio.to_thread(
                    start_completions, documents.id, model.processor, body, model.max_total_tokens
                )
                events = model.engine.submit([completion.request for completion in completions])
                model.metrics.prompt_tokens += usage(completions, body.n)["prompt_tokens"]
                pieces = self._read_pieces(completions, events, start_time)
                if body.stream:
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                    )
                    is_streaming = True
                    async for chunk in _stream_documents(body, documents, completions, pieces):
                        await send(_body_message(_server_sent_event(chunk)))
                else:
                    pieces_by_completion = [[] for _ in completions]
                    async for index, piece in pieces:
                        pieces_by_completion[index].append(piece)
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else _timeout_error(seconds)
            if not is_streaming:
                raise refusal from None
            final_event = _server_sent_event(refusal.document())
        finally:
            model.engine.cancel(completion.request.id for completion in completions)
        if is_streaming:
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    send(_body_message(final_event, more=False)), STREAM_END_SECONDS
                )
        else:
            document = documents.complete([*map(join_pieces, pieces_by_completion)])
            response = JSONResponse({**document, "usage": usage(completions, body.n)})
            await response(scope, receive, send)

    async def _read_pieces(
        self, completions: Sequence[Completion], events: EventQueue, start_time: float
    ) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield the index of a completion with its next piece, until all completions have ended."""
        metrics, engine = self._model.metrics, self._model.engine
        running_completions = {completion.request.id: completion for completion in completions}
        awaiting_first_token = True
        while running_completions:
            event = await events.get()
            completion = running_completions.get(event.id)
            if completion is None:  # ended by a stop string
                continue
            if awaiting_first_token and isinstance(event, NewToken):
                metrics.first_token.observe(perf_counter() - start_time)
                awaiting_first_token = False
            try:
                piece = completion.add(event)
            except SourceError as error:
                message = f"the completion has no text: {error.message}"
                raise ApiError(message, 500, code="engine_error") from error
            if piece.reason is not None:
                del running_completions[event.id]
                engine.cancel([event.id])
            if piece != TextPiece():
                yield completion.index, piece
        metrics.completed.observe(perf_counter() - start_time)


async def _stream_documents(
    body: Body,
    documents: CompletionDocuments,
    completions: Sequence[Completion],
    pieces: AsyncIterator[tuple[int, TextPiece]],
) -> AsyncIterator[dict[str, Any]]:
    """Yield the documents of a stream."""
    usage_field = {"usage": None} if body.stream_options.include_usage else {}
    opened_choices: set[int] = set()
    async for index, piece in pieces:
        opening = None if index in opened_choices else documents.first_chunk(index)
        opened_choices.add(index)
        if opening is not None:
            yield {**opening, **usage_field}
        yield {**documents.chunk((index, piece)), **usage_field}
    if usage_field:
        yield {**documents.chunk(), "usage": usage(completions, body.n)}


async def run_while_connected(receive: Receive, response: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, and cancel it when the client closes the connection.

    Raises:
        ClientDisconnect: the client closed the connection.
    """
    task = asyncio.ensure_future(response)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request.

    Args:
        request: the request.
        max_bytes: maximum size of the body.

    Raises:
        ApiError: the content type is not JSON (browsers may send other types to any server without asking), the body is
            too large, or it does not arrive in time.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        content_type != "application/json"
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
            async for chunk in request.stream():
                length += len(chunk)
                if length <= max_bytes:
                    body += chunk
                elif length > max_bytes * MAX_DISCARD_FACTOR:
                    break
    except TimeoutError:
        message = f"the body was not there within {BODY_SECONDS:g} s"
        raise ApiError(message, 408, code="timeout") from None
    if length > max_bytes:
        raise ApiError(
            f"the body has more than {max_bytes} bytes; send less, or start the server with a larger --max-body",
            413,
            code="body_too_large",
        )
    return bytes(body)


def _server_sent_event(document: Mapping[str, Any]) -> bytes:
    """Encode a document as a server-sent event."""
    return b"data: " + json.dumps(document, allow_nan=False).encode() + b"\n\n"


def _body_message(data: bytes, *, more: bool = True) -> Message:
    """Create the ASGI message that sends a part of a response body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


def _stopping_error() -> ApiError:
    """Create the error for a request while the server is stopping."""
    return ApiError("the server is stopping", 503, code="stopping")


def _timeout_error(seconds: float) -> ApiError:
    """Create the error for a completion that took too long."""
    return ApiError(
        f"the completion was not there within {seconds:g} s; ask for fewer tokens, or start the server with a larger "
        "--timeout",
        504,
        code="timeout",
    )
