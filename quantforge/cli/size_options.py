"""Options that ask for a size, of the verbs that look for a mixture of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer


def _within(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="Within a size", **more)


OPTIONS: Mapping[str, Any] = {
    "target": Annotated[
        str | None,
        _within("--target", metavar="SIZE",
                help="3.5bpw: bits per weight inside of blocks; 18GB or 17GiB: all weight files; 4GB/token: what "
                     "a token reads; 24GB@32k (24GB@8x32k): memory, with the cache of one (eight) "
                     "sequences of so many tokens."),
    ],
    "like": Annotated[
        str | None,
        _within("--like", metavar="FILE.gguf",
                help="In place of --target: as many bytes as this quantized form of the same model, made by anyone."),
    ],
    "candidates": Annotated[
        str | None,
        _within("--candidates", metavar="SCHEME,SCHEME",
                help="Schemes to choose from (default: usual widths that the format, and --for's engine, takes)."),
    ],
}  # fmt: skip
Size = Mapping[str, Any]  # what was typed, by the names of `OPTIONS`


def takes_size(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with the options of `OPTIONS` in place of its parameter ``size``, which gets what was typed."""
    parameters = [*inspect.signature(verb).parameters.values()]
    place = [one.name for one in parameters].index("size")
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters[place : place + 1] = [
        inspect.Parameter(name, kind, default=None, annotation=option)
        for name, option in OPTIONS.items()
    ]

    @wraps(verb)
    def command(**values: Any) -> None:
        size = {name: values.pop(name) for name in OPTIONS}
        names = [name for name in (size["candidates"] or "").split(",") if name]
        verb(**values, size={**size, "candidates": names})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command
