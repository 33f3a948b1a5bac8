"""How an engine is set up: room, budget of a step, and a switch for each technique."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.errors import UsageError, either, nearest
from quantforge_kernels.kv import PAGE

BATCHING = ("continuous", "static")
ADMISSION = ("prompt", "whole")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Room and switches of an engine.

    Attributes:
        rows: most requests that are computed at a time.
        tokens: most tokens of a request, old and new; None: the positions of the model.
        pages: of the cache, `quantforge_kernels.kv.PAGE` tokens each; None: enough for every row to be full.
        cache: kind of the cache, see `quantforge.architectures.cache_kinds`.
        token_budget: most tokens of a step; running requests take theirs first, prompts share the rest.
        batching: "continuous": requests join and leave at every step. "static": a batch is filled once, and computed
            until the last of its requests is finished.
        chunked_prefill: cut prompts to what is left of the budget; otherwise each is computed in one step, whatever
            its length.
        chunk: most tokens of one prompt in a step, where prompts are cut.
        admission: "prompt": a request begins when there are pages for its prompt, and may have to give them back.
            "whole": when there are pages for all of its new tokens too.
        recorded: steps that only decode run as recorded programs or CUDA graphs, see `decoding_steps`.
        prefix_cache: begin with the pages of others that began with the same tokens.

    Raises:
        UsageError: a value that makes no sense.
    """

    rows: int = 16
    tokens: int | None = None
    pages: int | None = None
    cache: str = ""
    token_budget: int = 512
    batching: str = "continuous"
    chunked_prefill: bool = True
    chunk: int = 96
    admission: str = "prompt"
    recorded: bool = True
    prefix_cache: bool = False

    @property
    def ahead(self) -> int:
        """Return the most tokens of a row that a step writes, where rows share no pages; 0: layers hold all tokens."""
        return self.chunk if self.chunked_prefill and not self.prefix_cache else 0

    def __post_init__(self) -> None:
        for name, known in (("batching", BATCHING), ("admission", ADMISSION)):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} = {value!r}: {either(known)}", nearest(value, known))
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
