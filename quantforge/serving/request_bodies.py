"""Bodies of requests as OpenAI's API has them: what each field may be, and which fields are refused.

The description of a field is the rule that the refusal of a value quotes. Types are strict: ``"5"`` is not 5. ``null``
means that the field is left out. A field that is not declared could change the completion, so it is refused by name,
unless it only says who asks or its value asks for nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from reprlib import repr as shortened
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantforge.errors import nearest
from quantforge.runtime.generation_options import (
    BIAS_RANGE,
    MAX_LOGPROBS,
    SAMPLING_RANGES,
    Sampling,
)
from quantforge.serving.api_error import ApiError, refusing
from quantforge_calibration.conversations import Conversation, check_names
from quantforge_files import strict_json

MOST_COMPLETIONS, MOST_BIASES, MOST_STOPS, MOST_STOP_CHARACTERS = 128, 1024, 64, 1024
FLAG = "true or false"
PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"
CONTENT = 'a string, or a list of parts {"type": "text", "text": ...},'
STOP = f"a string or a list of up to {MOST_STOPS} strings, of 1 to {MOST_STOP_CHARACTERS} characters each,"

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Several = Annotated[list[str | TokenIds], Field(min_length=1, fail_fast=True)]
BiasKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS_RANGE.minimum, le=BIAS_RANGE.maximum)]
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Prompt = str | list[int] | Conversation


def _whole(default: int | None, least: int, most: int | None = None) -> Any:
    """Return a field for a whole number."""
    to = "on" if most is None else f"to {most}"
    rule = f"a whole number from {least} {to}"
    return Field(default, ge=least, le=most, description=rule)


def _sampled(name: str, default: float | None = None) -> Any:
    """Return a field for an option of `Sampling`, with the range that it has there."""
    limits = SAMPLING_RANGES[name]
    most = int(limits.maximum) if limits.integer_only else limits.maximum
    above, least = (limits.minimum, None) if limits.exclusive_minimum else (None, limits.minimum)
    return Field(default, gt=above, ge=least, le=most, description=limits.rule)


class _Object(BaseModel):
    """An object of exactly the declared fields and types.

    Attributes:
        neutral: values of fields that are not declared, which ask for nothing.
        ignored: fields that mean nothing here.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    neutral: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """Leave out the fields that ask for nothing."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if cls._asks(name, value)}

    @classmethod
    def _asks(cls, name: str, value: Any) -> bool:
        if value is None or name in cls.ignored:
            return False
        neutral = cls.neutral.get(name)
        same = type(value) is type(neutral) and value == neutral  # 0 is not False
        return name in cls.model_fields or not (same or value in ([], ""))


class StreamOptions(_Object):
    """What a stream has beside the pieces of completions."""

    neutral: ClassVar[Mapping[str, Any]] = {"include_obfuscation": False}
    include_usage: bool = Field(default=False, description=FLAG)


class CommonBody(_Object):
    """Fields of both kinds of requests; `Sampling` describes those with which tokens are chosen."""

    neutral: ClassVar[Mapping[str, Any]] = {
        "best_of": 1,
        "function_call": "none",
        "functions": [],
        "length_penalty": 1.0,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "store": False,
        "suffix": "",
        "tool_choice": "none",
        "tools": [],
        "use_beam_search": False,
    }
    # Who asks, and how servers of others may keep or route it.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "service_tier",
        }
    )

    model: str = Field(description="the name of the model, which /v1/models lists,")
    n: int = _whole(1, 1, MOST_COMPLETIONS)
    temperature: float = _sampled("temperature", 1.0)  # OpenAI's default
    top_p: float | None = _sampled("top_p")
    top_k: int | None = _sampled("top_k")
    min_p: float | None = _sampled("min_p")
    seed: int | None = _sampled("seed")
    repetition_penalty: float | None = _sampled("repetition_penalty")
    frequency_penalty: float | None = _sampled("frequency_penalty")
    presence_penalty: float | None = _sampled("presence_penalty")
    logit_bias: dict[BiasKey, Bias] = Field(
        {}, max_length=MOST_BIASES, description=f"up to {MOST_BIASES} {BIAS_RANGE.rule}"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] = Field(
        [], description=STOP
    )
    include_stop_str_in_output: bool = Field(default=False, description=FLAG)
    ignore_eos: bool = Field(default=False, description=FLAG)
    stream: bool = Field(default=False, description=FLAG)
    stream_options: StreamOptions = Field(default=StreamOptions(), description="an object")

    @property
    def stops(self) -> list[str]:
        """Return the strings that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> Sampling:
        """Return how tokens are chosen; without a seed, nobody knows the next one."""
        given = self.model_dump(include={*SAMPLING_RANGES} - {"logprobs"}, exclude_none=True)
        given.setdefault("seed", secrets.randbits(62))
        bias = {int(token): number for token, number in self.logit_bias.items()}
        return Sampling(**given, logit_bias=bias)


class CompletionBody(CommonBody):
    """Body of ``/v1/completions``: texts or token ids to continue."""

    prompt: str | TokenIds | Several = Field(description=PROMPT)
    max_tokens: int = _whole(16, 0)  # OpenAI's default
    logprobs: int | None = _whole(None, 0, MAX_LOGPROBS)
    echo: bool = Field(default=False, description=FLAG)

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        count = len(self.prompts)
        if count * self.n > MOST_COMPLETIONS:
            raise ApiError(
                f"{count} prompts with n = {self.n} ask for over {MOST_COMPLETIONS} completions; send several requests",
                param="n" if self.n > 1 else "prompt",
                code="too_many_answers",
            )
        if not self.max_tokens and not self.echo:
            raise _invalid("max_tokens", "max_tokens is 0; that needs echo")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return what to complete, ``n`` times each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    @property
    def top(self) -> int | None:
        """Return of how many most likely tokens to send log-probabilities; None sends none at all."""
        return self.logprobs


class TextPart(_Object):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class Message(_Object):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="one of system, developer, user, assistant"
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = Field(description=CONTENT)

    @property
    def turn(self) -> dict[str, str]:
        """Return the message as chat templates know it: ``developer`` is the later name of ``system``."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(CommonBody):
    """Body of ``/v1/chat/completions``: a conversation to answer."""

    echo: ClassVar[bool] = False

    messages: list[Message] = Field(
        min_length=1, fail_fast=True, description='a list of {"role": ..., "content": ...}'
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description='a list of objects such as {"title": ..., "text": ...}'
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")
    max_tokens: int | None = _whole(None, 1)
    max_completion_tokens: int | None = _whole(None, 1)
    logprobs: bool = Field(default=False, description=FLAG)
    top_logprobs: int | None = _whole(None, 0, MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        later = self.max_completion_tokens
        self.max_tokens = later if self.max_tokens is None else self.max_tokens
        if later not in (None, self.max_tokens):
            raise _invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", 'top_logprobs needs "logprobs": true')
        with refusing("chat_template_kwargs", "invalid_value"):
            check_names("the body", self.chat_template_kwargs)
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return the conversation."""
        turns = [message.turn for message in self.messages]
        return [Conversation(turns, documents=self.documents, kwargs=self.chat_template_kwargs)]

    @property
    def top(self) -> int | None:
        """Return of how many most likely tokens to send log-probabilities; None sends none at all."""
        return self.top_logprobs or 0 if self.logprobs else None


Body = CompletionBody | ChatBody
DOUBLE_QUANT_GROUP = {
    "messages": Message.model_fields,
    "stream_options": StreamOptions.model_fields,
}


def parse_body(kind: type[Body], data: bytes, served: str) -> Body:
    """Return the body of a request for the model with the name ``served``.

    Raises:
        ApiError: not a JSON object with one meaning, a field or a value that is refused, or another model.
    """
    document = strict_json.parse(data, len(data), _not_json)
    if not isinstance(document, dict):
        _not_json("not a JSON object: send {...}")
    try:
        body = kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(kind, document, error) from None
    if body.model != served:
        raise ApiError(
            f"no model {body.model!a:.100} is served here; it is {served!a}",
            404,
            "model",
            "model_not_found",
        )
    return body


def _not_json(problem: str, hint: str = "") -> NoReturn:
    raise ApiError(f"request body: {problem}" + (f" ({hint})" if hint else ""), code="invalid_json")


def _invalid(name: str, message: str) -> ApiError:
    return ApiError(message, param=name, code="invalid_value")


def _refusal(kind: type[Body], document: Any, error: ValidationError) -> ApiError:
    """Return the refusal of the first error of a body; fields that are not declared come first."""
    errors = error.errors(include_url=False, include_context=False)
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    field, value, rule, fields = "", document, "", kind.model_fields
    place, inside = "", document
    for part in first["loc"]:
        if isinstance(part, int):
            place, inside = f"{place}[{part}]", inside[part]
        elif part in fields:
            place, inside = f"{place}.{part}".lstrip("."), inside.get(part)
            field, value, rule = place, inside, fields[part].description or ""
            fields = DOUBLE_QUANT_GROUP.get(part, {})
        elif fields:
            name = f"{place}.{part}".lstrip(".")[:60]
            hint = "leave it out" if part in kind.neutral else nearest(part[:60], fields)
            message = f"{name} is not supported here; {hint}"
            return ApiError(message, param=name, code="not_supported")
        else:  # a branch of a union, or a key of an object that is no body
            break
    if value is None:
        return ApiError(f"{field} is missing; {rule} is expected", param=field, code="missing")
    return _invalid(field, f"{field} is {shortened(value)}; {rule} is expected")
