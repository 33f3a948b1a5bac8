"""One forward pass: logits are finite, and near those of the source.

The tokens are spread over the vocabulary by a fixed rule, so that no tokenizer of a stranger has to run and the figure
is the same every time. They are no text, and the divergence of them is no measure of quality: `eval` has that. It is
large when something is broken, which is all that is asked here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from quantforge.architectures import text_config
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation.divergence import score, score_reference
from quantforge.evaluation.windows import Windows
from quantforge.formats.opening import open_model
from quantforge.runtime.load import load
from quantforge.verify.findings import Report

WINDOWS, LENGTH = 2, 32
# Nats per token by the fewest bits of the artifact; far above what rounding alone does.
LIMITS = {2: float("inf"), 3: 6.0, 4: 2.5, 5: 1.5, 6: 1.0, 8: 0.7}
PLAIN_LIMIT = 0.2


def check_forward(report: Report, source: Path | None, device: str) -> None:
    """Run the artifact, and the source when there is one, over the same tokens."""
    windows = Windows(_tokens(source or report.path), None)
    try:
        if source is None:
            model = load(report.path, device).model
            logits = model(windows.ids.to(device)).logits
            if not bool(torch.isfinite(logits).all()):
                report.add("logits", report.path.name, "logits are not finite")
            return
        reference = score_reference(load(source, device).model, windows)
        scores = score(load(report.path, device).model, windows, reference)
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


def _tokens(path: Path) -> torch.Tensor:
    """Tokens ``[windows, length]`` spread evenly over the vocabulary, in an order that mixes them."""
    config = text_config(open_model(path).config)
    vocabulary = int(config.get("vocab_size", 0))
    steps = torch.arange(WINDOWS * LENGTH) * 2654435761 % 4294967296
    return (steps * vocabulary // 4294967296).view(WINDOWS, LENGTH)
