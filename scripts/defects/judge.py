"""Whether a defect counts: the divergence from the source grows, or a loader reads something else.

`verify` is not asked. The divergence is that of real text: growth is the mean over windows of the difference to the
healthy artifact, and has to be more than 3 of its standard errors and 10 % of the artifact's own divergence. What
loaders read is asked of transformers, tokenizers and gguf-py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import quantforge
from scripts.defects import loaders
from scripts.defects.artifacts import ROOT, Healthy
from scripts.defects.files import Copy

TEXT = ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"
OWN_TEXT = ROOT / "calibration" / "quantforge_calibration" / "corpus" / "evaluation"
WINDOWS, LENGTH = 16, 64
ERRORS, SHARE = 3.0, 0.1


@dataclass(frozen=True)
class Verdict:
    """Why a defect counts, empty if it is harmless; divergences before and after, and the error of the growth."""

    reason: str
    before: float = math.nan
    after: float = math.nan
    error: float = math.nan

    @property
    def counts(self) -> bool:
        """Whether it is no harmless one."""
        return bool(self.reason)


@cache
def text() -> str:
    """Real text."""
    if TEXT.exists():
        return TEXT.read_text()[:200_000]
    return "\n".join(path.read_text() for path in sorted(OWN_TEXT.rglob("*.txt")))[:200_000]


@cache
def windows(source: Path) -> torch.Tensor:
    """Token ids ``[WINDOWS, LENGTH]`` of the text, from places far apart."""
    from tokenizers import Tokenizer

    ids = (
        Tokenizer.from_file(str(source / "tokenizer.json"))
        .encode(text(), add_special_tokens=False)
        .ids
    )
    step = len(ids) // WINDOWS
    return torch.tensor([ids[n * step : n * step + LENGTH] for n in range(WINDOWS)])


@torch.inference_mode()
def _log_probabilities(path: Path, ids: torch.Tensor) -> torch.Tensor:
    model = quantforge.load(path).model
    return model(ids, use_cache=False).logits.float().log_softmax(-1)


@cache
def _of_source(source: Path) -> torch.Tensor:
    return _log_probabilities(source, windows(source))


def divergence(path: Path, source: Path) -> torch.Tensor:
    """Mean KL divergence from the source of each window, in nats per token; errors as `load`."""
    expected = _of_source(source)
    found = _log_probabilities(path, windows(source))
    if found.shape != expected.shape:
        raise ValueError("another vocabulary")
    return (expected.exp() * (expected - found)).sum(-1).double().mean(-1)


@cache
def _healthy(path: Path, source: Path) -> torch.Tensor:
    return divergence(path, source)


def judge(copy: Copy, healthy: Healthy) -> Verdict:
    """Look at a damaged copy."""
    reason = loaders.difference(copy, healthy.path)
    if reason or not _computes(copy):
        return Verdict(reason)
    before = _healthy(healthy.path, healthy.source)
    try:
        after = divergence(copy.path, healthy.source)
    except quantforge.QuantForgeError as error:
        return Verdict(f"cannot be read: {error}"[:160])
    except Exception as error:  # whatever transformers raises where a configuration makes no sense
        return Verdict(f"cannot be run: {type(error).__name__}: {error}"[:160])
    growth = after - before
    mean, error = float(growth.mean()), float(growth.std() / WINDOWS**0.5)
    own = float(before.mean())
    if not math.isfinite(mean) or mean > max(ERRORS * error, SHARE * own):
        reason = f"divergence {own:.3g} to {float(after.mean()):.3g}"
    return Verdict(reason, own, float(after.mean()), error)


def _computes(copy: Copy) -> bool:
    """Whether what was changed can change what is computed."""
    return any(
        name.endswith((".safetensors", ".gguf", "config.json"))
        or "index.json" in name
        or "quant" in name
        for name in copy.changed
    )
