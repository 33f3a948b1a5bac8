"""Request bodies of OpenAI's API: the accepted values of each field, and the fields that are refused.

The description of a field is the rule quoted when a value is refused. Types are strict: ``"5"`` is not 5. ``null``
means that the field is omitted. An unknown field could change the completion, so it is refused by name, unless it only
identifies the caller or has a value without effect.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantforge.errors import nearest_hint
from quantforge.runtime.generation_options import (
    BIAS_RANGE,
    MAX_LOGPROBS,
    SAMPLING_RANGES,
    Sampling,
)
from quantforge.serving.api_error import ApiError, source_error_as_refusal
from quantforge_calibration.conversations import Conversation, check_names
from quantforge_files import strict_json

MAX_COMPLETIONS, MAX_BIASES, MAX_STOPS, MAX_STOP_CHARACTERS = 128, 1024, 64, 1024
FLAG = "true or false"
PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"
CONTENT = 'a string, or a list of parts {"type": "text", "text": ...},'
STOP = f"a string or a list of up to {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARACTERS} characters each,"

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
PromptList = Annotated[list[str | TokenIds], Field(min_length=1, fail_fast=True)]
BiasKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS_RANGE.minimum, le=BIAS_RANGE.maximum)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Prompt = str | list[int] | Conversation


def _integer_field(default: int | None, minimum: int, maximum: int | None = None) -> Any:
    """Declare an integer field with its range."""
    upper_text = "on" if maximum is None else f"to {maximum}"
    rule = f"a whole number from {minimum} {upper_text}"
    return Field(default, ge=minimum, le=maximum, description=rule)


def _sampling_field(name: str, default: float | None = None) -> Any:
    """Declare a field for an option of `Sampling` with the range defined there."""
    limits = SAMPLING_RANGES[name]
    maximum = int(limits.maximum) if limits.integer_only else limits.maximum
    exclusive_minimum, minimum = (
        (limits.minimum, None) if limits.exclusive_minimum else (None, limits.minimum)
    )
    return Field(default, gt=exclusive_minimum, ge=minimum, le=maximum, description=limits.rule)


class _StrictObject(BaseModel):
    """Object with strictly checked fields and types.

    Attributes:
        neutral: values of unknown fields that have no effect.
        ignored: unknown fields that are ignored.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    neutral: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, data: Any) -> Any:
        """Drop the fields that have no effect."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if cls._has_effect(name, value)}

    @classmethod
    def _has_effect(cls, name: str, value: Any) -> bool:
        """Return whether a field could change the response."""
        if value is None or name in cls.ignored:
            return False
        neutral = cls.neutral.get(name)
        is_neutral = type(value) is type(neutral) and value == neutral  # 0 is not False
        return name in cls.model_fields or not (is_neutral or value in ([], ""))


class StreamOptions(_StrictObject):
    """Options of a stream."""

    neutral: ClassVar[Mapping[str, Any]] = {"include_obfuscation": False}
    include_usage: bool = Field(default=False, description=FLAG)


class CommonBody(_StrictObject):
    """Fields common to both kinds of requests; see `Sampling` for those that control sampling."""

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
    n: int = _integer_field(1, 1, MAX_COMPLETIONS)
    temperature: float = _sampling_field("temperature", 1.0)  # OpenAI's default
    top_p: float | None = _sampling_field("top_p")
    top_k: int | None = _sampling_field("top_k")
    min_p: float | None = _sampling_field("min_p")
    seed: int | None = _sampling_field("seed")
    repetition_penalty: float | None = _sampling_field("repetition_penalty")
    frequency_penalty: float | None = _sampling_field("frequency_penalty")
    presence_penalty: float | None = _sampling_field("presence_penalty")
    logit_bias: dict[BiasKey, Bias] = Field(
        {}, max_length=MAX_BIASES, description=f"up to {MAX_BIASES} {BIAS_RANGE.rule}"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(
        [], description=STOP
    )
    include_stop_str_in_output: bool = Field(default=False, description=FLAG)
    ignore_eos: bool = Field(default=False, description=FLAG)
    stream: bool = Field(default=False, description=FLAG)
    stream_options: StreamOptions = Field(default=StreamOptions(), description="an object")

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> Sampling:
        """Return the sampling options, with a random seed if none is given."""
        options = self.model_dump(include={*SAMPLING_RANGES} - {"logprobs"}, exclude_none=True)
        options.setdefault("seed", secrets.randbits(62))
        bias = {int(token): number for token, number in self.logit_bias.items()}
        return Sampling(**options, logit_bias=bias)


class CompletionBody(CommonBody):
    """Body of ``/v1/completions``: texts or token ids to continue."""

    prompt: str | TokenIds | PromptList = Field(description=PROMPT)
    max_tokens: int = _integer_field(16, 0)  # OpenAI's default
    logprobs: int | None = _integer_field(None, 0, MAX_LOGPROBS)
    echo: bool = Field(default=False, description=FLAG)

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        count = len(self.prompts)
        if count * self.n > MAX_COMPLETIONS:
            raise ApiError(
                f"{count} prompts with n = {self.n} ask for over {MAX_COMPLETIONS} completions; send several requests",
                param="n" if self.n > 1 else "prompt",
                code="too_many_answers",
            )
        if not self.max_tokens and not self.echo:
            raise _invalid_value("max_tokens", "max_tokens is 0; that needs echo")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts, each of which gets ``n`` completions."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def top_logprobs_count(self) -> int | None:
        """Return for how many of the most likely tokens to send log-probabilities; None sends none at all."""
        return self.logprobs


class TextPart(_StrictObject):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class Message(_StrictObject):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="one of system, developer, user, assistant"
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = Field(description=CONTENT)

    @property
    def template_message(self) -> dict[str, str]:
        """Return the message for chat templates, with the role ``developer`` mapped to ``system``."""
        content = self.content
        text = (
            content
            if isinstance(content, str)
            else "".join(content_part.text for content_part in content)
        )
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
    max_tokens: int | None = _integer_field(None, 1)
    max_completion_tokens: int | None = _integer_field(None, 1)
    logprobs: bool = Field(default=False, description=FLAG)
    top_logprobs: int | None = _integer_field(None, 0, MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        max_completion_tokens = self.max_completion_tokens
        self.max_tokens = max_completion_tokens if self.max_tokens is None else self.max_tokens
        if max_completion_tokens not in (None, self.max_tokens):
            raise _invalid_value(
                "max_tokens", "max_tokens and max_completion_tokens differ; send one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid_value("top_logprobs", 'top_logprobs needs "logprobs": true')
        with source_error_as_refusal("chat_template_kwargs", "invalid_value"):
            check_names("the body", self.chat_template_kwargs)
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return the conversation as the only prompt."""
        turns = [message.template_message for message in self.messages]
        return [Conversation(turns, documents=self.documents, kwargs=self.chat_template_kwargs)]

    @property
    def top_logprobs_count(self) -> int | None:
        """Return for how many of the most likely tokens to send log-probabilities; None sends none at all."""
        return self.top_logprobs or 0 if self.logprobs else None


Body = CompletionBody | ChatBody
NESTED_FIELDS = {
    "messages": Message.model_fields,
    "stream_options": StreamOptions.model_fields,
}


def parse_body(body_type: type[Body], data: bytes, served_name: str) -> Body:
    """Parse and validate the body of a request.

    Args:
        body_type: type of the body.
        data: the body.
        served_name: name of the served model.

    Raises:
        ApiError: the body is not an unambiguous JSON object, a field or value is refused, or another model is
            requested.
    """
    document = strict_json.parse(data, len(data), _not_json)
    if not isinstance(document, dict):
        _not_json("not a JSON object: send {...}")
    try:
        body = body_type.model_validate(document)
    except ValidationError as error:
        raise _validation_refusal(body_type, document, error) from None
    if body.model != served_name:
        raise ApiError(
            f"no model {body.model!a:.100} is served here; it is {served_name!a}",
            404,
            "model",
            "model_not_found",
        )
    return body


def _not_json(problem: str, hint: str = "") -> NoReturn:
    """Raise the error for a body that is not valid JSON."""
    raise ApiError(f"request body: {problem}" + (f" ({hint})" if hint else ""), code="invalid_json")


def _invalid_value(name: str, message: str) -> ApiError:
    """Create the error for an invalid value of a field."""
    return ApiError(message, param=name, code="invalid_value")


def _validation_refusal(body_type: type[Body], document: Any, error: ValidationError) -> ApiError:
    """Create the error for the first validation error of a body; unknown fields take precedence."""
    errors = error.errors(include_url=False, include_context=False)
    first_error = min(errors, key=lambda entry: entry["type"] != "extra_forbidden")
    field, value, rule, fields = "", document, "", body_type.model_fields
    field_path, current_value = "", document
    for key in first_error["loc"]:
        if isinstance(key, int):
            field_path, current_value = f"{field_path}[{key}]", current_value[key]
        elif key in fields:
            field_path, current_value = f"{field_path}.{key}".lstrip("."), current_value.get(key)
            field, value, rule = field_path, current_value, fields[key].description or ""
            fields = NESTED_FIELDS.get(key, {})
        elif fields:
            name = f"{field_path}.{key}".lstrip(".")[:60]
            hint = "leave it out" if key in body_type.neutral else nearest_hint(key[:60], fields)
            message = f"{name} is not supported here; {hint}"
            return ApiError(message, param=name, code="not_supported")
        else:  # a branch of a union, or a key of an object that is no body
            break
    if value is None:
        return ApiError(f"{field} is missing; {rule} is expected", param=field, code="missing")
    return _invalid_value(field, f"{field} is {short_repr(value)}; {rule} is expected")
