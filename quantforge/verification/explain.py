"""Explanation of a matrix that is not what its name says: it is another one, or its rows are in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.verification.opening import Original

MATCHES = 0.7  # cosine from which a matrix is taken for the one that it resembles
ROWS = 512  # rows of each side that are compared
COLUMNS = 2048


class Explainer:
    """Comparison of a matrix that does not fit with the others that it might be."""

    def __init__(self, matched: Matched, source: Original) -> None:
        self._matched = matched
        self._source = source

    def explain(self, tensor: MatchedTensor, found: Tensor, target: Tensor) -> str:
        """Say what ``found`` is instead of ``target``, both ``[out, in]``."""
        for other in self._others(tensor):
            candidate = self._source.weight(other.name)
            if candidate is None or candidate.shape != found.shape:
                continue
            if _cosine(candidate, found) > MATCHES:
                return f"these are the weights of {other.stored.name}"
        if (share := _permuted(found, target)) > 0.5:
            return (
                f"the rows are in another order ({share:.0%} of them are another row of the source)"
            )
        if _cosine(target, -found) > MATCHES:
            return "the sign is turned"
        if found.shape[0] == found.shape[1] and _cosine(target, found.T) > MATCHES:
            return "the matrix is transposed"
        return "these are other weights"

    def _others(self, tensor: MatchedTensor) -> list[MatchedTensor]:
        """Return linears that may have been swapped: of the same block first, then the same one of others."""
        leaf = tensor.name.rpartition(f".{tensor.block}.")[2]
        linears = [t for t in self._matched.tensors if t.role is Role.LINEAR and t is not tensor]
        same_block = [t for t in linears if t.block == tensor.block]
        return same_block + [
            t for t in linears if t.name.endswith(f".{leaf}") and t.block != tensor.block
        ]


def _cosine(first: Tensor, second: Tensor) -> float:
    norm = float(first.norm()) * float(second.norm())
    return float((first * second).sum()) / norm if norm else 0.0


def _permuted(found: Tensor, target: Tensor) -> float:
    """Return the share of rows whose best match among the source's rows is good, and another row."""
    columns = slice(0, COLUMNS)
    directions = torch.nn.functional.normalize(target[:, columns], dim=1)
    rows = torch.nn.functional.normalize(found[:ROWS, columns], dim=1)
    best, place = (rows @ directions.T).max(dim=1)
    moved = (best > MATCHES) & (place != torch.arange(len(rows)))
    return float(moved.float().mean())
