"""Checks of the values in a body: each takes the name of a field and its value, and says what is expected instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantforge.errors import UsageError
from quantforge.http_api.api_error import ApiError
from quantforge.runtime.sampling_options import BIAS, RANGES
from quantforge_calibration.conversations import RESERVED

Check = Callable[[str, Any], Any]


def escaped(text: str) -> str:
    """Return a text in ASCII."""
    return text.encode("ascii", "backslashreplace").decode()


def wrong(name: str, value: Any, rule: str, code: str = "invalid_value") -> ApiError:
    """Return the refusal of a value: its beginning, and the rule."""
    names: dict[type, str] = {
        list: "a list",
        dict: "an object",
    }  # which may be nested deeper than can be printed
    shown = names.get(type(value)) or escaped(repr(value))
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ApiError(f"{name} is {shown}; {rule} is expected", param=name, code=code)


def whole(least: int, most: int | None = None) -> Check:
    """Return a check for whole numbers."""
    rule = (
        f"a whole number from {least} on"
        if most is None
        else f"a whole number from {least} to {most}"
    )

    def check(name: str, value: Any) -> int:
        if type(value) is not int or value < least or (most is not None and value > most):
            raise wrong(name, value, rule)
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """Return true or false."""
    if type(value) is not bool:
        raise wrong(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            f"{name} holds half of a surrogate pair, which is no text",
            param=name,
            code="invalid_value",
        ) from error
    return value


def sampled(name: str, value: Any) -> Any:
    """Return a value of a rule of sampling, by the range that it has there."""
    try:
        RANGES[name].check(name, value)
    except UsageError as error:
        raise wrong(name, value, error.hint) from error
    return value


def bias(name: str, value: Any) -> dict[int, float]:
    """Return numbers by token id, from an object whose names are the ids."""
    if not isinstance(value, dict):
        raise wrong(name, value, BIAS.rule)
    if len(value) > MOST_BIASES:
        raise ApiError(
            f"{name} has {len(value)} tokens; at most {MOST_BIASES} are accepted",
            param=name,
            code="invalid_value",
        )
    found = {}
    for token, number in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise wrong(name, token, BIAS.rule)
        try:
            BIAS.check(name, number)
        except UsageError as error:
            raise wrong(f"{name}[{token}]", number, error.hint) from error
        found[int(token)] = number
    return found


MOST_BIASES = 1024
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024


def stops(name: str, value: Any) -> tuple[str, ...]:
    """Return strings that end a text, from one or a list."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise wrong(name, value, "a string or a list of strings")
    if len(found) > MOST_STOPS:
        raise ApiError(
            f"{name} has {len(found)} strings; at most {MOST_STOPS} are accepted",
            param=name,
            code="invalid_value",
        )
    for one in found:
        if not text(name, one):
            raise wrong(name, one, "a string that is not empty")
        if len(one) > MOST_STOP_CHARACTERS:
            raise ApiError(
                f"{name} has a string of {len(one)} characters; at most {MOST_STOP_CHARACTERS} are accepted",
                param=name,
                code="string_too_long",
            )
    return tuple(found)


def documents(name: str, value: Any) -> list[dict[str, Any]]:
    """Return documents that a chat template shows the model."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(name, value, 'a list of objects such as {"title": ..., "text": ...}')
    return value


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Return further variables of a chat template."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    if reserved := sorted(RESERVED & value.keys()):
        raise ApiError(
            f"{name}.{reserved[0]} is no variable of a chat template; leave it out",
            param=name,
            code="invalid_value",
        )
    return value


def stream_options(name: str, value: Any) -> bool:
    """Return whether a stream ends with the count of tokens, from the object that says so."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    for key, one in value.items():
        if key == "include_usage" or (key == "include_obfuscation" and not one):
            if one is not None:
                flag(f"{name}.{key}", one)
        else:
            raise ApiError(
                f"{name}.{key:.60} is not supported here", param=name, code="not_supported"
            )
    return bool(value.get("include_usage"))
