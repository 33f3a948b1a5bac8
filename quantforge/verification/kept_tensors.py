"""Comparison of a tensor that is stored as it is with the source's: equal but for its type, and for factors."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures.match import Role
from quantforge.verification.findings import Report
from quantforge.verification.folded import Factors
from quantforge.verification.opening import Artifact, Original

FOLDED = 2.0**-7  # relative, of a tensor that was multiplied with a factor, both stored in 16 bits
TINY = 2.0**-23  # what a gain loses that some files store less 1
FOLDED_SNR = 30.0  # decibels, of a tensor whose factors were fitted,
TUNED_SNR = 10.0  # and of one whose matrix has learned other scales, which move the fit


def changed(name: str, found: Tensor, target: Tensor, factors: Factors) -> str | None:
    """Say how a tensor differs from the source's beyond its type and its factors, None where it does not.

    Args:
        name: canonical.
        found: as it is stored.
        target: the source's, float32.
        factors: of its block.
    """
    module = name.rpartition(".")[0]
    if module in factors.norms and name.endswith(".weight"):
        return None  # its quotient with the source is the factor that its readers are checked with
    if found.shape != target.shape:
        return f"{list(found.shape)}, the source has {list(target.shape)}"
    folded = module in factors.norms or factors.touches(module)
    if module in factors.norms:
        target = target * factors.norms[module]
    error = (found.float() - target).abs()
    if module in factors.fitted:
        signal, noise = float(target.square().sum()), float(error.square().sum())
        far = noise * 10 ** ((TUNED_SNR if factors.slack else FOLDED_SNR) / 10) > signal
        return "differs from the source, beyond its factors" if far else None
    wrong = error > TINY
    if folded:
        wrong &= error > FOLDED * target.abs()
    else:
        wrong &= ~_is_cast(found, target)
    if not bool(wrong.any()):
        return None
    place = (error * wrong).flatten().argmax()
    return (f"{int(wrong.sum())} of {target.numel()} values differ from the source, e.g. "
            f"{float(found.flatten()[place]):.5g} for {float(target.flatten()[place]):.5g}")  # fmt: skip


def check_absent(report: Report, artifact: Artifact, source: Original) -> None:
    """Report tensors of the source that an artifact does not have."""
    matched = artifact.matched
    head = f"{matched.architecture.head}.weight" if matched.architecture else "lm_head.weight"
    for name, tensor in source.matched.by_name.items():
        if name not in matched.by_name and tensor.role is not Role.FOREIGN:
            check, text = "incomplete", "the source has it, the artifact does not"
            if name == head and matched.tied:
                check, text = (
                    "configuration",
                    "tie_word_embeddings is true, the source has a head of its own",
                )
            report.add(check, name, text)


def _is_cast(found: Tensor, target: Tensor) -> Tensor:
    """Mark where ``found`` is ``target`` in its own type, perhaps by way of another type of 16 bits."""
    equal = found == target.to(found.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        equal |= found == target.to(dtype).to(found.dtype)
    return equal
