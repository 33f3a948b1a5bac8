"""Packed weights as an ``LM`` of lm-evaluation-harness: requests in the library's terms, answered by our runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quantforge.errors import UsageError
from quantforge.evaluation.requests import NEW_TOKENS, Answers, Continuation
from quantforge.runtime.sampling import Sampling

_T = TypeVar("_T")


class OwnError(BaseException):
    """Carrier of an error of ours through the library, which catches an ``Exception``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def continuation_of(arguments: Mapping[str, Any]) -> Continuation:
    """Read the arguments of a request to generate, in the library's names.

    Raises:
        UsageError: one of them is not known here, so that it would change nothing.
    """
    given = dict(arguments)
    until = given.pop("until", [])
    most = int(given.pop("max_gen_toks", None) or given.pop("max_new_tokens", None) or NEW_TOKENS)
    drawn = bool(given.pop("do_sample", given.get("temperature", 0) > 0))
    sampling = Sampling(
        temperature=float(given.pop("temperature", 1.0 if drawn else 0.0)) if drawn else 0.0,
        top_k=int(given.pop("top_k", 0)),
        top_p=float(given.pop("top_p", 1.0)),
        repetition_penalty=float(given.pop("repetition_penalty", 1.0)),
        seed=int(given.pop("seed", 0)),
    )
    given.pop("temperature", None)
    if given:
        raise UsageError(
            f"generation arguments {', '.join(sorted(given))}", "leave them out of the task"
        )
    return Continuation((until,) if isinstance(until, str) else tuple(until), most, sampling)


def _ours(call: Callable[..., _T], *arguments: Any) -> _T:
    try:
        return call(*arguments)
    except Exception as error:
        raise OwnError(error) from error


def language_model(answers: Answers) -> Any:
    """Return an ``lm_eval.api.model.LM``; the library is imported here only."""
    from lm_eval.api.model import LM

    class QuantForge(LM):  # type: ignore[misc]
        """Model of the library that passes requests on."""

        def loglikelihood(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[tuple[float, bool]]:
            return _ours(answers.continuations, [request.args for request in requests])

        def loglikelihood_rolling(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[float]:
            return _ours(answers.texts, [request.args[0] for request in requests])

        def generate_until(
            self,
            requests: Sequence[Any],
            disable_tqdm: bool = False,  # noqa: ARG002
        ) -> list[str]:
            asked = [(request.args[0], continuation_of(request.args[1])) for request in requests]
            return [_ours(answers.go_on, *request) for request in asked]

    return QuantForge()
