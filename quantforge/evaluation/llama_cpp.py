"""A GGUF file in the engine that it is for: llama.cpp, through the ``xllamacpp`` wheel (optional).

The engine answers one question at a time: which token follows these, and with which log-probability. The probability of
a *given* token is asked for by forcing it: a bias on its logit decides what is sampled, and the probabilities that are
reported are those before any bias. Perplexity follows from one such question per token, with the prompt cached; it is
slow, and it is the engine's own arithmetic (which quantizes activations), so that it stands beside our perplexity and
does not replace it.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, UsageError
from quantforge.progress import report_step

if TYPE_CHECKING:
    from quantforge.evaluation.text_windows import Windows

_FORCING = 1000.0
_EVERY = 1 << 20


class LlamaCpp:
    """One loaded file.

    Args:
        path: the file (of numbered files the first).
        length: tokens of the context.
        threads: of the engine.

    Raises:
        UsageError: the wheel is not installed.
        InputError: the engine does not load the file.
    """

    def __init__(self, path: Path, length: int, threads: int = 1) -> None:
        check_installed()
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx = length + 8  # the engine stops a little before the context is full
        settings.n_parallel = 1
        settings.cpuparams.n_threads = threads
        settings.warmup = False
        settings.verbosity = -1
        try:
            self._server = xllamacpp.Server(settings)
        except RuntimeError as error:
            raise InputError(
                f"{path}: llama.cpp does not load it: {error}", file=str(path)
            ) from error
        self._letter = self.tokenize("a")[-1]  # a whole character: always reported
        # Ended before its loop has begun, a server waits for that loop for ever: an answer shows that it has.
        self._forced([self._letter], self._letter, 1)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids that the engine's own tokenizer gives a text."""
        found: list[int] = self._post("/tokenize", {"content": text, "add_special": special})[
            "tokens"
        ]
        return found

    def top(self, ids: Sequence[int], count: int) -> dict[int, float]:
        """Return the ``count`` likeliest next tokens with their log-probabilities, in nats."""
        (answer,) = self._forced(ids, self._letter, count)
        return {item["id"]: item["logprob"] for item in answer["top_logprobs"]}

    def nll(self, ids: Sequence[int]) -> list[float]:
        """Return the negative log-likelihood of every token but the first, in nats.

        Raises:
            InputError: the engine refuses the tokens, or gives one no probability.
        """
        return [self._nll(ids[:place], ids[place]) for place in range(1, len(ids))]

    def _nll(self, prompt: Sequence[int], token: int) -> float:
        answers = self._forced(prompt, token, 1)
        # What ends the text, or is part of a character, is not reported: it is among the others then.
        found = answers[0]["logprob"] if answers else self.top(prompt, _EVERY).get(token, math.nan)
        if not math.isfinite(found):
            raise InputError(f"llama.cpp gives token {token} no probability", "the file is damaged")
        return -float(found)

    def _forced(self, prompt: Sequence[int], token: int, count: int) -> list[dict[str, Any]]:
        """Return the answer to a prompt when the engine is forced to sample ``token``.

        It has the log-probabilities, as they are without the force, of that token and of the ``count`` likeliest.
        """
        answer = self._server.handle_completions(
            {
                "prompt": list(prompt),
                "logit_bias": [[token, _FORCING]],
                "n_predict": 1,
                "n_probs": count,
                "temperature": 0,
                "cache_prompt": True,
            }
        )
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices:
            raise InputError(f"llama.cpp refuses the tokens: {str(answer)[:200]}")
        found: list[dict[str, Any]] = (choices[0].get("logprobs") or {}).get("content", [])
        return found

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.loads(response.read())
        return found


def check_installed() -> None:
    """Refuse to go on without the wheel; nothing of it is imported.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "--engine llama.cpp needs the package xllamacpp",
            "pip install 'quantforge[llamacpp]'",
        )


def perplexity_in_engine(path: Path, windows: Windows) -> float:
    """Return the perplexity of the same windows as llama.cpp computes it; errors as `LlamaCpp` and its `nll`."""
    import torch

    engine = LlamaCpp(path, windows.ids.shape[1], torch.get_num_threads())
    total = 0.0
    for number, window in enumerate(windows.ids.tolist()):
        total += math.fsum(engine.nll(window))
        report_step("windows in llama.cpp", number + 1, len(windows.ids))
    return math.exp(total / windows.targets.numel())
