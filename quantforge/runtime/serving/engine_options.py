"""Options of an engine: its room, and the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.errors import UsageError
from quantforge_kernels.kv import PAGE


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        rows: most requests that are computed at a time.
        tokens: most tokens of a request, old and new; None: the positions of the model.
        pages: of the cache, `quantforge_kernels.kv.PAGE` tokens each; None: enough for every row to be full.
        cache: kind of the cache, see `quantforge.architectures.cache_kinds`.
        token_budget: most tokens of a step; running requests take theirs first, prompts share the rest.
        chunk: most tokens of one prompt in a step.

    Raises:
        UsageError: a value that makes no sense.
    """

    rows: int = 16
    tokens: int | None = None
    pages: int | None = None
    cache: str = ""
    token_budget: int = 512
    chunk: int = 96

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "pages", "token_budget", "chunk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(
                    f"{name} = {value!r}",
                    f"a whole number of at least 1 ({PAGE} tokens are a page)",
                )
        if self.token_budget < self.rows:
            raise UsageError(
                f"token_budget = {self.token_budget} is less than rows = {self.rows}",
                "every row that runs takes one token of each step",
            )
