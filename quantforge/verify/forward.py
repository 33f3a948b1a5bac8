"""One forward pass of source and artifact: logits are finite, and near those of the source.

The text is the one for evaluation that ships with the program, cut by the tokenizer of the source; without a source,
or where its tokenizer cannot be read, tokens are spread over the vocabulary by a fixed rule, so that no tokenizer of a
stranger has to run. The pass of the source also shows what its linears read (`inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quantforge.architectures import text_config
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation.divergence import Reference, score, score_reference
from quantforge.evaluation.windows import Windows, cut, tokenizer_of
from quantforge.formats.opening import open_model
from quantforge.runtime.load import load
from quantforge.verify.artifact import Source
from quantforge.verify.findings import Report
from quantforge.verify.inputs import Inputs, listening
from quantforge_calibration.sources import builtin

WINDOWS, LENGTH = 8, 64
CHARACTERS = 64 * WINDOWS * LENGTH  # of text: far more than the tokens take
# Nats per token by the fewest bits of the artifact; far above what rounding alone does.
LIMITS = {2: float("inf"), 3: 6.0, 4: 2.5, 5: 1.5, 6: 1.0, 8: 0.7}
PLAIN_LIMIT = 0.2


@dataclass(frozen=True, slots=True)
class Observed:
    """What one pass of the source leaves: the tokens, what its linears read, and what it computed."""

    windows: Windows
    inputs: Inputs
    reference: Reference


def observe(report: Report, source: Source, device: str) -> Observed | None:
    """Run the source once; None, with a finding, where that cannot be done."""
    path = source.checkpoint.path
    windows = _windows(path)
    inputs = Inputs()
    try:
        model = load(path, device).model
        with listening(inputs, model, source.matched):
            reference = score_reference(model, windows)
    except (InputError, RefusedError) as error:
        report.add("logits", error.tensor or path.name, error.message)
        return None
    assert source.matched.architecture is not None
    head = source.matched.architecture.head
    inputs.add(head, reference.states.read(0, len(windows.ids)))
    return Observed(windows, inputs, reference)


def check_alone(report: Report, device: str) -> None:
    """Run the artifact: nothing that it computes may be infinite or no number."""
    try:
        logits = load(report.path, device).model(_spread(report.path).ids.to(device)).logits
    except (InputError, RefusedError) as error:
        report.add("logits", error.tensor or report.path.name, error.message)
        return
    if not bool(torch.isfinite(logits).all()):
        report.add("logits", report.path.name, "logits are not finite")


def check_divergence(report: Report, observed: Observed, device: str) -> None:
    """Run the artifact over the tokens that the source has computed."""
    try:
        scores = score(load(report.path, device).model, observed.windows, observed.reference)
    except (InputError, RefusedError) as error:
        report.add("logits", error.tensor or report.path.name, error.message)
        return
    assert scores.divergence is not None
    figures = {
        "tokens": scores.nll.numel(),
        "kl_mean": scores.divergence.mean.mean,
        "top1_agreement": scores.divergence.agreement.mean,
    }
    report.figures = figures
    limit = min((LIMITS.get(bits, LIMITS[3]) for bits in _bits(report)), default=PLAIN_LIMIT)
    if figures["kl_mean"] > limit:
        text = f"{figures['kl_mean']:.3g} nats per token from the source's, at most {limit:g}"
        report.add("logits", report.path.name, text)


def _bits(report: Report) -> set[int]:
    """The fewest bits of any tensor that was compared."""
    from quantforge.scheme import parse

    found = {parse(str(row["scheme"])).bits for row in report.tensors}
    return {min(found)} if found else set()


def _windows(path: Path) -> Windows:
    """Windows of the text, or spread tokens where the tokenizer of ``path`` gives none that fit."""
    spread = _spread(path)
    try:
        windows = cut(
            tokenizer_of(path), "\n".join(builtin("evaluation"))[:CHARACTERS], WINDOWS, LENGTH
        )
    except InputError:
        return spread
    fits = len(windows.ids) > 1 and int(windows.ids.max()) < _vocabulary(path)
    return windows if fits else spread


def _vocabulary(path: Path) -> int:
    return int(text_config(open_model(path).config).get("vocab_size", 0))


def _spread(path: Path) -> Windows:
    """Tokens ``[windows, length]`` spread evenly over the vocabulary, in an order that mixes them."""
    steps = torch.arange(WINDOWS * LENGTH) * 2654435761 % 4294967296
    return Windows((steps * _vocabulary(path) // 4294967296).view(WINDOWS, LENGTH), None)
