"""Measure the perplexity of a GGUF file in llama.cpp itself, through the optional ``xllamacpp`` wheel.

The engine answers one question at a time: which token comes next, and with which log-probability. To get the
probability of a *given* token, a bias on its logit forces the engine to sample it; the probabilities that the engine
reports are those before the bias. Perplexity follows from one such request per token, with the prompt cached. This is
slow, and uses the engine's own arithmetic (which quantizes activations), so it is reported in addition to QuantForge's
own perplexity.
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

_FORCING_BIAS = 1000.0
_ALL_TOKENS = 1 << 20


class LlamaCpp:
    """A GGUF file loaded in llama.cpp.

    Args:
        path: the file; for a split file, its first part.
        length: context length in tokens.
        threads: number of threads of the engine.

    Raises:
        UsageError: the ``xllamacpp`` wheel is not installed.
        InputError: the engine cannot load the file.
    """

    def __init__(self, path: Path, length: int, threads: int = 1) -> None:
        check_installed()
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx = length + 8  # the engine stops slightly before the context is full
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
        self._probe_token = self.tokenize("a")[-1]  # a complete character, which is always reported
        # A server that is stopped before its loop has started hangs; a first completion shows that it has started.
        self._sample_forced([self._probe_token], self._probe_token, 1)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text with the engine's own tokenizer."""
        ids: list[int] = self._post("/tokenize", {"content": text, "add_special": special})[
            "tokens"
        ]
        return ids

    def top(self, ids: Sequence[int], count: int) -> dict[int, float]:
        """Return the ``count`` most likely next tokens with their log-probabilities in nats."""
        (entry,) = self._sample_forced(ids, self._probe_token, count)
        return {item["id"]: item["logprob"] for item in entry["top_logprobs"]}

    def nll(self, ids: Sequence[int]) -> list[float]:
        """Return the negative log-likelihood of every token but the first in nats.

        Raises:
            InputError: the engine rejects the tokens, or returns no probability for one.
        """
        return [self._nll(ids[:position], ids[position]) for position in range(1, len(ids))]

    def _nll(self, prompt: Sequence[int], token: int) -> float:
        """Return the negative log-likelihood of a token after a prompt."""
        reported = self._sample_forced(prompt, token, 1)
        # End tokens and partial characters are not reported as sampled; look them up among all candidates.
        log_probability = (
            reported[0]["logprob"]
            if reported
            else self.top(prompt, _ALL_TOKENS).get(token, math.nan)
        )
        if not math.isfinite(log_probability):
            raise InputError(f"llama.cpp gives token {token} no probability", "the file is damaged")
        return -float(log_probability)

    def _sample_forced(self, prompt: Sequence[int], token: int, count: int) -> list[dict[str, Any]]:
        """Force the engine to sample ``token`` after a prompt, and return the sampled tokens with their probabilities.

        Each entry has the log-probabilities without the bias: of the sampled token, and of the ``count`` most likely
        ones.
        """
        response = self._server.handle_completions(
            {
                "prompt": list(prompt),
                "logit_bias": [[token, _FORCING_BIAS]],
                "n_predict": 1,
                "n_probs": count,
                "temperature": 0,
                "cache_prompt": True,
            }
        )
        choices = response.get("choices") if isinstance(response, dict) else None
        if not choices:
            raise InputError(f"llama.cpp refuses the tokens: {str(response)[:200]}")
        content: list[dict[str, Any]] = (choices[0].get("logprobs") or {}).get("content", [])
        return content

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON request to the engine's HTTP server and return its JSON response."""
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer


def check_installed() -> None:
    """Check that the ``xllamacpp`` wheel is installed, without importing it.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "--engine llama.cpp needs the package xllamacpp",
            "pip install 'quantforge[llamacpp]'",
        )


def perplexity_in_engine(path: Path, windows: Windows) -> float:
    """Return the perplexity of the scored windows as computed by llama.cpp; raises as `LlamaCpp` and its `nll` do."""
    import torch

    engine = LlamaCpp(path, windows.ids.shape[1], torch.get_num_threads())
    total_nll = 0.0
    for number, window in enumerate(windows.ids.tolist()):
        total_nll += math.fsum(engine.nll(window))
        report_step("windows in llama.cpp", number + 1, len(windows.ids))
    return math.exp(total_nll / windows.targets.numel())
