"""Weights that a sparsifier has made zero, against the source: the pattern holds, and what stays is what it was.

Zeros that are chosen by magnitude follow from the source alone. By other scores every row has as many, and what stays
is equal. SparseGPT also moves what stays: each row still points where the source's does, and is about as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.match import MatchedTensor
from quantforge.errors import InputError
from quantforge.notation import parse_sparsity
from quantforge.quantizers import is_sparse
from quantforge.quantizers.masks import least
from quantforge.recipe import from_toml
from quantforge.scheme import Sparsity
from quantforge.verification.folded import Factors
from quantforge.verification.kept_tensors import changed

MOVES = "sparsegpt"
BY_SIZE = "magnitude"
COSINE, GAIN = (
    0.5,
    2.0,
)  # of what stays in a row; 0.91 and 1.29 at 2:4 on a trained mixture of experts


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros that a manifest states.

    Attributes:
        method: by which they were chosen.
        sparsity: their pattern.
        names: stored names of the tensors that have them.
    """

    method: str
    sparsity: Sparsity
    names: frozenset[str]


def stated_zeros(document: Mapping[str, Any] | None) -> Zeros | None:
    """Return the zeros of a result by its manifest, None where it states none.

    Raises:
        InputError: the manifest states a sparse method without a sparsity, or without its tensors.
    """
    method = (document or {}).get("method")
    if document is None or not isinstance(method, str) or not is_sparse(method):
        return None
    pattern = from_toml(str(document.get("recipe")), "the recipe of its manifest").sparsity
    tensors = document.get("tensors")
    if pattern is None or not isinstance(tensors, list):
        raise InputError(f"method {method} without a sparsity", "the manifest is damaged")
    names = [item["name"] for item in tensors if isinstance(item, dict) and "zeros" in item]
    return Zeros(method, parse_sparsity(pattern), frozenset(map(str, names)))


def differs(
    tensor: MatchedTensor, found: Tensor, target: Tensor, factors: Factors, zeros: Zeros | None
) -> str | None:
    """Say how a kept tensor ``[out, in]`` differs from the source's beyond stated zeros; None where it does not."""
    if zeros is None or tensor.stored.name not in zeros.names:
        return changed(tensor.name, found, target, factors)
    return wrong_zeros(zeros, found, target)


def wrong_zeros(zeros: Zeros, found: Tensor, target: Tensor) -> str | None:
    """Say what is wrong with a tensor that has zeros, None where nothing is.

    Args:
        zeros: as stated.
        found: as it is stored, ``[out, in]``.
        target: the source's, float32.
    """
    if found.shape != target.shape:
        return f"{list(found.shape)}, the source has {list(target.shape)}"
    pattern = zeros.sparsity
    gone = found == 0
    runs = gone.reshape(-1, pattern.run) if pattern.stay else gone
    short = runs.sum(1) < (pattern.run - pattern.stay if pattern.stay else pattern.zeros(gone.shape[1]))  # fmt: skip
    if bool(short.any()):
        return f"{int(short.sum())} of {len(short)} runs have fewer zeros than {pattern} asks for"
    if zeros.method == MOVES:
        return _moved(found.float(), target.masked_fill(gone, 0.0))
    if zeros.method == BY_SIZE:
        gone = least(target.abs(), pattern, pattern.zeros(target.shape[1]))
    return changed("", found, target.masked_fill(gone, 0.0), Factors())


def _moved(found: Tensor, stays: Tensor) -> str | None:
    """Say which row is another than the source's, as far as it stays."""
    product = (found * stays).sum(1)
    own, other = found.norm(dim=1), stays.norm(dim=1)
    bad = product < COSINE * own * other
    bad |= (own > GAIN * other) | (other > GAIN * own)
    if not bool(bad.any()):
        return None
    row = int(torch.nonzero(bad)[0])
    cosine = float(product[row] / (own[row] * other[row]).clamp(min=1e-30))
    return (f"{int(bad.sum())} of {len(bad)} rows are not the source's, e.g. row {row}: cosine {cosine:.3f}, "
            f"length {float(own[row]):.4g} for {float(other[row]):.4g}")  # fmt: skip
