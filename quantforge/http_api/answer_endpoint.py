"""An endpoint that answers: from a body to a document, or to a stream of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from quantforge.errors import InputError
from quantforge.http_api.answer_text import AnswerPiece
from quantforge.http_api.api_error import ApiError
from quantforge.http_api.asked_answers import AskedAnswers
from quantforge.http_api.chat_body import conversation
from quantforge.http_api.client_link import ClientLink
from quantforge.http_api.completion_body import completion
from quantforge.http_api.engine_thread import Told, full
from quantforge.http_api.event_stream import EventStream
from quantforge.http_api.json_body import check_type, parse_object, read_body
from quantforge.http_api.json_response import JsonResponse
from quantforge.http_api.live_answers import LiveAnswers
from quantforge.http_api.prompt_ids import prompt_ids
from quantforge.http_api.response_documents import (
    AnswerDocuments,
    ChatDocuments,
    CompletionDocuments,
    usage,
)
from quantforge.http_api.served_model import ServedModel
from quantforge.http_api.token_texts import TokenTexts
from quantforge.runtime.serving.generation_requests import NewToken

Parse = Callable[[Mapping[str, Any], str], AskedAnswers]
Documents = Callable[[str, str, TokenTexts], AnswerDocuments]
BODY_SECONDS = 60.0


class AnswerEndpoint:
    """Completions, or chats.

    Args:
        model: answers.
        parse: reads a body.
        documents: writes answers.
        prefix: of ids.
    """

    def __init__(self, model: ServedModel, parse: Parse, documents: Documents, prefix: str) -> None:
        self._model, self._parse, self._documents, self._prefix = model, parse, documents, prefix

    @classmethod
    def completions(cls, model: ServedModel) -> AnswerEndpoint:
        """Return ``/v1/completions``."""
        return cls(model, completion, CompletionDocuments, "cmpl")

    @classmethod
    def chats(cls, model: ServedModel) -> AnswerEndpoint:
        """Return ``/v1/chat/completions``."""
        return cls(model, conversation, ChatDocuments, "chatcmpl")

    async def __call__(self, request: Request) -> ASGIApp:
        """Answer a request.

        Raises:
            ApiError: it is refused.
            ClientGoneError: the client has gone.
        """
        model = self._model
        if model.stopping:
            raise ApiError("the server is stopping", 503, code="stopping")
        if model.requests >= model.most:
            raise full()
        begun = perf_counter()
        model.requests += 1
        try:
            asked = await self._asked(request)
            link = ClientLink(request.receive, model.limits.seconds)
            try:
                return await self._answer(asked, link, begun)
            except BaseException:
                link.close()
                raise
        finally:
            model.requests -= 1

    async def _asked(self, request: Request) -> AskedAnswers:
        check_type(dict(request.headers))
        stated, most = request.headers.get("content-length"), self._model.limits.body_bytes
        try:
            body = await asyncio.wait_for(read_body(request.stream(), stated, most), BODY_SECONDS)
        except TimeoutError:
            raise ApiError(
                f"the body was not there within {BODY_SECONDS:g} s", 408, code="timeout"
            ) from None
        return self._parse(parse_object(body), self._model.name)

    async def _answer(self, asked: AskedAnswers, link: ClientLink, begun: float) -> ASGIApp:
        model = self._model
        prompts = await link.within(asyncio.to_thread(prompt_ids, model.side, asked))
        id_ = f"{self._prefix}-{uuid.uuid4().hex}"
        answering = LiveAnswers(id_, model.side, asked, prompts, model.room)
        documents = self._documents(id_, model.name, model.texts)
        told = await link.within(model.engine.submit(answering.requests))
        model.metrics.prompt_tokens += answering.prompt_tokens
        pieces = self._pieces(answering, told, link, begun)
        if asked.stream:
            ids = [one.id for one in answering.requests]
            stream = _stream(asked, answering, documents, pieces)
            return EventStream(stream, link, lambda: model.engine.cancel(ids))
        answers = [_Whole() for _ in answering.requests]
        try:
            async for index, piece in pieces:
                answers[index].add(piece)
        finally:
            await pieces.aclose()
            link.close()
        document = documents.whole([one.piece() for one in answers])
        counted = usage(answering.prompt_tokens, answering.tokens)
        return JsonResponse({**document, "usage": counted})

    async def _pieces(
        self, answering: LiveAnswers, told: Told, link: ClientLink, begun: float
    ) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        """Yield numbers of answers with more of each; whatever ends it frees what the engine holds."""
        metrics, engine = self._model.metrics, self._model.engine
        first = True
        try:
            while not answering.done:
                happened = told.get_nowait() if not told.empty() else await link.within(told.get())
                if first and isinstance(happened, NewToken):
                    metrics.first_token.observe(perf_counter() - begun)
                    first = False
                try:
                    found = answering.take(happened)
                except InputError as error:
                    raise ApiError(
                        f"the answer has no text: {error.message}", 500, code="engine_error"
                    ) from error
                for index, piece in found:
                    if piece.reason is not None:
                        engine.cancel([answering.requests[index].id])
                    yield index, piece
            metrics.answer.observe(perf_counter() - begun)
        finally:
            engine.cancel(one.id for one in answering.requests)


async def _stream(
    asked: AskedAnswers,
    answering: LiveAnswers,
    documents: AnswerDocuments,
    pieces: AsyncGenerator[tuple[int, AnswerPiece], None],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the documents of a stream."""
    more: dict[str, Any] = {"usage": None} if asked.include_usage else {}
    opened: set[int] = set()
    try:
        async for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                opening = documents.opening(index)
                if opening is not None:
                    yield {**opening, **more}
            yield {**documents.chunk(index, piece), **more}
        if asked.include_usage:
            counted = usage(answering.prompt_tokens, answering.tokens)
            yield {**documents.head(), "usage": counted}
    finally:
        await pieces.aclose()


class _Whole:
    """An answer that is told at its end."""

    def __init__(self) -> None:
        self._pieces: list[AnswerPiece] = []

    def add(self, piece: AnswerPiece) -> None:
        self._pieces.append(piece)

    def piece(self) -> AnswerPiece:
        return AnswerPiece(
            "".join(one.text for one in self._pieces),
            tuple(scored for one in self._pieces for scored in one.scored),
            self._pieces[-1].reason if self._pieces else None,
        )
