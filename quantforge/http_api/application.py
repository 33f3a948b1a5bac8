"""The ASGI application: paths and what answers there; every refusal is an error document."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quantforge.http_api.answer_endpoint import AnswerEndpoint
from quantforge.http_api.api_error import ApiError
from quantforge.http_api.client_link import ClientGoneError
from quantforge.http_api.json_response import JsonResponse, error_response
from quantforge.http_api.served_model import ServedModel
from quantforge.http_api.serving_metrics import MEDIA_TYPE

LOG = logging.getLogger(__name__)
GONE = 499  # as nginx notes it; nobody reads the response
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
Answer = Callable[[Request], Awaitable[ASGIApp]]


class Guarded:
    """An endpoint whose refusals, and our bugs, become error documents, and which is counted."""

    def __init__(self, model: ServedModel, path: str, answer: Answer) -> None:
        self._model, self._path, self._answer = model, path, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI calls it."""
        request = Request(scope, receive)
        try:
            response: ASGIApp = await self._answer(request)
        except ApiError as error:
            response = error_response(error)
        except (ClientDisconnect, ClientGoneError):
            self._model.metrics.disconnected += 1
            response = Response(status_code=GONE)
        except Exception:
            LOG.exception("a request to %s failed", self._path)
            response = error_response(
                ApiError("this is a bug of the server, whose log has the traceback", 500)
            )
        self._model.metrics.requests[self._path, getattr(response, "status_code", 200)] += 1
        try:
            await response(scope, receive, send)
        except ClientGoneError:
            self._model.metrics.disconnected += 1


class SmallEndpoints:
    """Endpoints that tell of the server itself."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def models(self, _request: Request) -> Response:
        """Return the list of models: one."""
        return JsonResponse({"object": "list", "data": [self._model.card()]})

    async def model(self, request: Request) -> Response:
        """Return the entry of a model."""
        name = request.path_params["name"]
        if name != self._model.name:
            raise ApiError(
                f"no model {name!a:.100} is served here; it is {self._model.name!a}",
                404,
                "model",
                "model_not_found",
            )
        return JsonResponse(self._model.card())

    async def health(self, _request: Request) -> Response:
        """Return whether requests are answered."""
        model = self._model
        if model.stopping or model.engine.broken:
            why = "the server is stopping" if model.stopping else "the engine has failed"
            raise ApiError(why, 503, code="stopping" if model.stopping else "engine_failed")
        return JsonResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        """Return the figures."""
        try:
            counters = await asyncio.wait_for(self._model.engine.counters(), 60)
        except TimeoutError:
            raise ApiError(
                "a step of the engine takes too long to be counted", 503, code="busy"
            ) from None
        return Response(self._model.metrics.text(counters), media_type=MEDIA_TYPE)


def application(model: ServedModel) -> Starlette:
    """Return the application that serves a model."""
    small = SmallEndpoints(model)
    routes: list[tuple[str, str, Answer]] = [
        ("/v1/completions", "POST", AnswerEndpoint.completions(model)),
        ("/v1/chat/completions", "POST", AnswerEndpoint.chats(model)),
        ("/v1/models", "GET", small.models),
        ("/v1/models/{name:path}", "GET", small.model),
        ("/health", "GET", small.health),
        ("/metrics", "GET", small.metrics),
    ]

    async def no_such(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        words = {
            404: f"no such path; there are {', '.join(PATHS)}",
            405: "another method is expected there",
        }
        model.metrics.requests["other", status] += 1
        headers = getattr(error, "headers", None) or {}
        what = f"{request.method} {request.url.path[:100]}"
        return error_response(
            ApiError(f"{what}: {words.get(status, 'refused')}", status, headers=headers)
        )

    return Starlette(
        routes=[
            Route(path, Guarded(model, path, answer), methods=[method])
            for path, method, answer in routes
        ],
        exception_handlers={HTTPException: no_such},
    )
