"""Codes of three values at 1.6 bits: ten digits of base 3 in 16 bits, twenty in a word.

Taking digits out of a number means dividing by powers of 3. Instead, half a word holds the number
``v < 3^10`` as a fraction, ``q = ceil(v 2^16 / 3^10)``, whose digits come out at the top:

    digit f, the highest first  =  ((q 3^f mod 2^16) 3) div 2^16

Two multiplications, by the upper and the lower half of a product, and no digit waits for another.
It is exact: rounding up adds less than ``2^-16`` to ``v / 3^10``, so less than ``3^9 2^-16 < 1 / 3``
to the fraction that the last digit is read from, which is a whole number of thirds.

Digit ``2 f`` of a word is digit ``f`` of its lower half, digit ``2 f + 1`` that of its upper half.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS = 20  # in a word of 32 bits
PER_HALF = 10


def words_of(columns: int) -> int:
    """Return the number of words that hold so many digits."""
    return -(-columns // DIGITS)


def in_words(codes: Tensor) -> Tensor:
    """Cut ``[..., columns]`` into ``[..., words, 20]``, filled up with zeros."""
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % DIGITS))
    return filled.view(*filled.shape[:-1], -1, DIGITS)


def to_words(digits: Tensor) -> Tensor:
    """Pack uint8 digits ``[..., 20]`` in {0, 1, 2} into int32 ``[...]``."""
    pairs = digits.reshape(*digits.shape[:-1], PER_HALF, 2)
    numbers = pairs.new_zeros((*pairs.shape[:-2], 2), dtype=torch.int64)
    for place in range(PER_HALF):
        numbers = 3 * numbers + pairs[..., place, :]
    lower, upper = (-(-(numbers << 16) // 3**PER_HALF)).unbind(-1)
    words: Tensor = lower | (upper << 16)
    return words.to(torch.int32)


def from_words(words: Tensor) -> Tensor:
    """Return the uint8 digits ``[..., 20]`` of `to_words`."""
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1)
    digits = []
    for _ in range(PER_HALF):
        halves = 3 * halves
        digits.append((halves >> 16).to(torch.uint8))
        halves &= 0xFFFF
    return torch.stack(digits, -2).flatten(-2)
