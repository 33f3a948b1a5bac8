"""Options of the server: its address, how much it computes at a time, and what it accepts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TypedDict

from quantforge.cache_kinds import parse_cache_kind
from quantforge.errors import UsageError
from quantforge.runtime.generation_options import ValueRange
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS, DraftOptions

PACKAGES = ("pydantic", "starlette", "uvicorn")
COUNT = ValueRange("a whole number from 1 on", 1, integer_only=True)
OPTION_RANGES = {
    "port": ValueRange(
        "a whole number from 0 to 65535 (0: a free one)", 0, 65535, integer_only=True
    ),
    "cache_gib": ValueRange("a number of GiB above 0", 0, 1e6, exclusive_minimum=True),
    "context": COUNT,
    "concurrent": COUNT,
    "waiting": ValueRange("a whole number from 0 on", integer_only=True),
    "max_body": COUNT,
    "timeout": ValueRange("a number of seconds", 0, 1e9),
}


class ServeOptions(TypedDict, total=False):
    """Where a server listens, how much it computes at a time, and what it accepts; see `DEFAULTS`."""

    host: str
    port: int  # 0 takes a free one
    served_name: str  # by which requests ask for the model; its directory or file when left out
    cache: str  # kind of the cache, see `quantforge.cache_kinds`; that of the model when left out
    cache_gib: float  # most memory of the cache
    draft: str  # who drafts tokens that the model then checks together; nobody when left out
    draft_tokens: int  # drafted tokens in a row, at most
    draft_tree: str  # drafted tokens after each token, place by place
    context: int  # most tokens of a prompt and its completion; what the model sees when left out
    concurrent: int  # completions that are computed at a time
    waiting: int  # completions that may wait; more are refused
    max_body: int  # MiB of a request
    timeout: float  # seconds from a request to the end of its completions


DEFAULTS: ServeOptions = {
    "host": "127.0.0.1",
    "port": 8000,
    "served_name": "",
    "cache": "",
    "cache_gib": 4.0,  # where all completions at their full length would take more
    "draft": "",
    "draft_tokens": DRAFT_TOKENS,
    "draft_tree": "",
    "concurrent": 16,
    "waiting": 64,
    "max_body": 4,
    "timeout": 600.0,
}


def complete_options(given_options: ServeOptions) -> ServeOptions:
    """Fill in the defaults of missing options and check all options that need no model; raises as `serve` does."""
    options: ServeOptions = {**DEFAULTS, **given_options}
    if options["cache"]:
        parse_cache_kind(options["cache"])
    draft_options(options)
    for name, value in options.items():
        if name in OPTION_RANGES:
            OPTION_RANGES[name].check(name, value)
    missing_packages = [name for name in PACKAGES if find_spec(name) is None]
    if missing_packages:
        raise UsageError(
            f"serving needs {' and '.join(missing_packages)}, not installed here",
            "pip install 'quantforge[serve]'",
        )
    return options


def draft_options(options: ServeOptions) -> DraftOptions:
    """Return the options of speculative decoding; raises as `DraftOptions` does."""
    return DraftOptions(options["draft"], options["draft_tokens"], options["draft_tree"])
