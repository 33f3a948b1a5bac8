"""Rotate channels by Hadamard matrices: ``x -> x diag(signs) H / sqrt(size)``.

``H`` has entries 1 and -1 and orthogonal rows: Sylvester's matrix for powers of two, and for other sizes the product of
a Sylvester matrix and a Paley matrix of order ``q + 1`` (for a prime ``q`` that is 3 modulo 4) or ``2 (q + 1)`` (1
modulo 4). Nearly all model sizes are such a product. Random signs prevent a component common to all channels from
accumulating in one of them; they are derived from a hash of a seed, so that they are the same everywhere.

Products are sums of channels in float64, element by element: the bits of a row depend neither on threads nor on other
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from hashlib import shake_256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_PALEY = 1024  # largest Paley order: each output is a sum over all inputs
TILE = 1 << 18  # values rotated at a time


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix of ``size`` channels.

    Attributes:
        size: a size for which `has_hadamard` is true.
        signs: seed of the signs.
    """

    size: int
    signs: str

    def rotate_axis(self, value: Tensor, axis: int) -> None:
        """Rotate the channels along an axis in place, each run of ``size`` channels separately.

        Args:
            value: float32, contiguous; overwritten.
            axis: axis with ``k * size`` channels.
        """
        trailing_size = math.prod(value.shape[axis + 1 :])
        width = max(TILE // self.size, 1)
        if trailing_size == 1:
            lines = value.view(-1, self.size)
            for first in range(0, len(lines), width):
                tile = lines[first : first + width]
                tile.copy_(self._rotated(tile))
            return
        for run in value.view(-1, self.size, trailing_size):
            for first in range(0, trailing_size, width):
                tile = run[:, first : first + width]
                tile.copy_(self._rotated(tile.T).T)

    def _rotated(self, lines: Tensor) -> Tensor:
        """Return ``[lines, size]`` rotated, in float64."""
        import torch

        signs = torch.tensor(_signs(self.size, self.signs), dtype=torch.float64)
        return _product(lines.double() * signs).div_(self.size**0.5)


def has_hadamard(size: int) -> bool:
    """Return whether a Hadamard matrix of this size can be constructed."""
    return _paley_factor(size) is not None


def _product(x: Tensor) -> Tensor:
    """Return ``x H`` for float64 ``[rows, size]``."""
    import torch

    rows, size = x.shape
    small = _paley_factor(size)
    assert small is not None
    half = 1
    while half < size // small:
        pairs = x.reshape(rows, -1, 2, half)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        half *= 2
    if small == 1:
        return x.view(rows, size)
    x, signs = x.view(rows, small, -1), _paley_tensor(small)
    product = torch.zeros_like(x)
    for channel in range(small):
        product.addcmul_(x[:, channel : channel + 1], signs[channel].view(1, -1, 1))
    return product.view(rows, size)


def _paley_tensor(size: int) -> torch.Tensor:
    import torch

    return torch.tensor(_paley(size), dtype=torch.float64)


@cache
def _paley_factor(size: int) -> int | None:
    """Return the smallest Paley order (or 1) whose quotient is a power of two; None if there is none."""
    orders = [size >> shift for shift in range(size.bit_length()) if size % (1 << shift) == 0]
    factors = [order for order in orders if order == 1 or _is_paley(order)]
    return min(factors, default=None)


def _is_paley(order: int) -> bool:
    return order <= LARGEST_PALEY and (
        (order % 4 == 0 and _is_prime(order - 1)) or (order % 8 == 4 and _is_prime(order // 2 - 1))
    )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@cache
def _paley(order: int) -> tuple[tuple[int, ...], ...]:
    """Return a Hadamard matrix of order ``q + 1`` or ``2 (q + 1)``."""
    if _is_prime(order - 1):  # I + S, S skew
        q, sides = order - 1, (1, -1)
    else:  # each entry of a symmetric S becomes two by two
        q, sides = order // 2 - 1, (1, 1)
    squares = {number * number % q for number in range(1, q)}
    residue = [0 if step == 0 else 1 if step in squares else -1 for step in range(q)]
    matrix = [[0, *[sides[0]] * q]]
    matrix += [
        [sides[1], *(residue[(column - row) % q] for column in range(q))] for row in range(q)
    ]
    if order == q + 1:
        return tuple(
            tuple(entry + (row == column) for column, entry in enumerate(entries))
            for row, entries in enumerate(matrix)
        )
    off_diagonal, diagonal = ((1, 1), (1, -1)), ((1, -1), (-1, -1))
    return tuple(
        tuple(
            (diagonal if row == column else off_diagonal)[upper][left]
            * (1 if row == column else entry)
            for column, entry in enumerate(entries)
            for left in (0, 1)
        )
        for row, entries in enumerate(matrix)
        for upper in (0, 1)
    )


@cache
def _signs(size: int, seed: str) -> tuple[float, ...]:
    random_bytes = shake_256(seed.encode()).digest(-(-size // 8))
    return tuple(
        1.0 - 2.0 * (random_bytes[channel // 8] >> channel % 8 & 1) for channel in range(size)
    )
