"""From options to a request: choices of a recipe, the policy on events, and numbers that are typed as texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from quantforge.architectures.cache_kinds import kinds_of
from quantforge.cli.choices import recipe_parameters
from quantforge.errors import UsageError
from quantforge.events import Policy
from quantforge.planning import quantities
from quantforge.plans import Serving


def takes_choices(**groups: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a verb options of `RECIPE`: those of ``groups[NAME]`` in place of parameter NAME.

    The verb gets them back under NAME as a mapping, None for those that were not typed.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
            parameters += recipe_parameters(groups[name]) if name in groups else [parameter]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

        @wraps(verb)
        def command(**values: Any) -> None:
            # A flag that was not typed is no choice.
            made = {
                key: {name: _chosen(values.pop(name)) for name in names}
                for key, names in groups.items()
            }
            verb(**values, **made)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _chosen(value: Any) -> Any:
    return None if value is False else value


def build_policy(strict: bool, allow: Sequence[str] | None) -> Policy:
    """Build the policy on events from ``--strict`` and ``--allow EVENT=N``.

    Raises:
        UsageError: no count, or no such event.
    """
    limits: dict[str, int] = {}
    for text in allow or []:
        kind, separator, count = text.partition("=")
        if not separator or not count.isdecimal():
            raise UsageError(
                f"--allow {text}: no count", "write --allow EVENT=N, e.g. --allow damping-raised=2"
            )
        limits[kind] = int(count)
    return Policy(strict, limits)


def percent(text: str, option: str) -> float:
    """Parse ``2%`` or ``0.02`` to 0.02.

    Raises:
        UsageError: it is no share, or a number from 1 on without ``%``, which may mean either; ``option`` is named.
    """
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise UsageError(f"{option} {text}: not a share", "write 2% or 0.02")
    if value >= 1 and not text.endswith("%"):
        raise UsageError(
            f"{option} {text}: {value:g}% or {value:.0%}?", f"write {value:g}% or {value / 100:g}"
        )
    return value


def serving_of(context: str | None, cache: str | None, engine: str | None = "any") -> Serving:
    """Return how a result is to be served.

    Args:
        context: tokens, as they are typed.
        cache: type of the cache.
        engine: whose command asks for them; None where nobody would.

    Raises:
        UsageError: one of them is not understood, or there is no engine.
    """
    given = {"--context": context, "--cache": cache}
    for option, text in given.items():
        if text is not None and engine is None:
            raise UsageError(f"{option} {text}: for which engine", "add --for ENGINE")
    if cache is not None:
        kinds_of(cache)
    tokens = None if context is None else quantities.tokens(context, "--context")
    return Serving(tokens, cache)
