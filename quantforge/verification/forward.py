"""One forward pass of source and artifact: logits are finite, and near those of the source.

The text is the one for evaluation that ships with the program, cut by the tokenizer of the source; without a source,
or where its tokenizer cannot be read, tokens are spread over the vocabulary by a fixed rule, so that no tokenizer of a
stranger has to run. No window of tokens is longer than the sliding window of the source's attention, because a format
may not store that (GGUF, an event of the export). The pass of the source also shows what its linears read (`inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantforge.architectures import text_config
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation.divergence import Divergence, Reference, score, score_reference
from quantforge.evaluation.perplexity import Estimate
from quantforge.evaluation.windows import Windows, cut
from quantforge.formats.opening import open_model
from quantforge.runtime.load import load
from quantforge.runtime.text_side import tokenizer_of
from quantforge.verification.findings import Report
from quantforge.verification.inputs import Inputs, listening
from quantforge.verification.numbers import Numbers
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.predicted import with_noise
from quantforge_calibration.sources import builtin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOWS, LENGTH = 8, 64
CHARACTERS = 64 * WINDOWS * LENGTH  # of text: far more than the tokens take
AS_EXPECTED = 1.6  # times the divergence that is predicted from the errors of the tensors,
ERRORS = 3.0  # and so many standard errors over windows more
LEAST = 1e-5  # nats per token: what arithmetic in another order may do
PLAIN_LIMIT = 0.2


@dataclass(frozen=True, slots=True)
class Observed:
    """Result of one pass of the source: the tokens, what its linears read, and what it computed."""

    windows: Windows
    inputs: Inputs
    reference: Reference


def observe(
    report: Report, source: Original, device: str, *, cache: bool = False
) -> Observed | None:
    """Run the source once; where that cannot be done, skip the check ``logits`` and return None.

    ``cache``: note the ranges of keys and values as well.
    """
    path = source.checkpoint.path
    windows = _windows(path)
    inputs = Inputs()
    try:
        model = source.load(device).model
        with listening(inputs, model, source.matched, cache=cache):
            reference = score_reference(model, windows)
    except (RefusedError, InputError) as error:  # says nothing of the artifact
        report.skip(error.message, "logits")
        return None
    declared = source.matched.architecture
    inputs.add(declared.head if declared else "lm_head", reference.states.read(0, len(windows.ids)))
    return Observed(windows, inputs, reference)


def check_alone(report: Report, device: str) -> None:
    """Run the artifact: nothing that it computes may be infinite or NaN."""
    try:
        logits = load(report.path, device).model(_spread(report.path).ids.to(device)).logits
    except RefusedError as error:
        report.skip(error.message, "logits")
        return
    except InputError as error:
        report.add("logits", error.tensor or report.path.name, error.message)
        return
    if not bool(torch.isfinite(logits).all()):
        report.add("logits", report.path.name, "logits are not finite")


def check_divergence(
    report: Report,
    artifact: Artifact,
    source: Original,
    numbers: Numbers,
    observed: Observed,
    device: str,
) -> None:
    """Check that the artifact's KL divergence from the source is near that of the source with noise (`with_noise`).

    Fills ``report.figures``; ``numbers`` has checked all tensors.
    """
    try:
        found = _divergence(load(report.path, device).model, observed)
        expected = None
        if artifact.layouts:
            caches = observed.inputs.caches
            noisy = with_noise(artifact, source, numbers.factors, numbers.coherence, caches, device)
            expected = _divergence(noisy, observed)
    except RefusedError as error:
        report.skip(error.message, "logits")
        return
    except InputError as error:
        report.add("logits", error.tensor or report.path.name, error.message)
        return
    report.figures = {
        "tokens": found.kl.numel(),
        "kl_mean": found.mean.mean,
        "kl_error": found.mean.error,
        "top1_agreement": found.agreement.mean,
    }
    limit = PLAIN_LIMIT
    if expected is not None:
        report.figures["kl_predicted"] = expected.mean.mean
        limit = AS_EXPECTED * expected.mean.mean + LEAST
    beyond = Estimate.of(
        (found.kl - (AS_EXPECTED * expected.kl if expected else limit)).double().mean(1)
    )
    if found.mean.mean > limit and beyond.mean > ERRORS * beyond.error:
        what = "of a copy" if expected is None else "that the errors of its tensors predict"
        text = (f"{found.mean.mean:.3g} nats per token from the source's, {what}: "
                f"at most {limit:.3g}")  # fmt: skip
        report.add("logits", report.path.name, text)


def _divergence(model: PreTrainedModel, observed: Observed) -> Divergence:
    found = score(model, observed.windows, observed.reference).divergence
    assert found is not None
    return found


def _windows(path: Path) -> Windows:
    """Return windows of the text, or spread tokens where the tokenizer of ``path`` gives none that fit."""
    spread = _spread(path)
    count, length = spread.ids.shape
    try:
        text = "\n".join(builtin("evaluation"))[:CHARACTERS]
        windows = cut(tokenizer_of(path), text, count, length)
    except InputError:
        return spread
    fits = len(windows.ids) > 1 and int(windows.ids.max()) < _vocabulary(path)
    return windows if fits else spread


def _vocabulary(path: Path) -> int:
    return int(text_config(open_model(path).config).get("vocab_size", 0))


def _spread(path: Path) -> Windows:
    """Return tokens ``[windows, length]`` spread evenly over the vocabulary, in an order that mixes them."""
    length = LENGTH
    slides = text_config(open_model(path).config).get("sliding_window")
    if isinstance(slides, int) and 2 <= slides < length:
        length = slides
    count = WINDOWS * LENGTH // length
    steps = torch.arange(count * length) * 2654435761 % 4294967296
    return Windows((steps * _vocabulary(path) // 4294967296).view(count, length), None)
