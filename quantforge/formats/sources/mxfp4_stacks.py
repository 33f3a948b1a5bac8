"""Experts in MXFP4 as gpt-oss is published (``quant_method: mxfp4``): elements of 4 bits under powers of two.

For stacked experts ``P`` ``[experts, in, out]``:

============  ====  ============================  ==================================================
``P_blocks``  U8    ``[experts, out, groups, 16]``  two e2m1 elements of a row, the even one in the low nibble
``P_scales``  U8    ``[experts, out, groups]``      the exponent of 32 elements, plus 127
============  ====  ============================  ==================================================

Rows of the files run along *in*, while the model holds ``[in, out]``: what is decoded is turned, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError
from quantforge.files.reader import Checkpoint
from quantforge.formats.decoded import Encoded
from quantforge.formats.read_checks import require
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    import torch

_BLOCKS, _SCALES = "_blocks", "_scales"
_OCTETS, _GROUP, _NO_NUMBER = 16, 32, 255
_DAMAGED = "the checkpoint is damaged: fetch it again"


@dataclass(frozen=True, slots=True)
class _Experts:
    """Reader of the experts of one stack."""

    name: str

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return experts ``first:last`` in float32, ``[experts, in, out]``."""
        import torch

        _, rows, groups = checkpoint.entries[self.name + _SCALES].shape
        stack = torch.empty((last - first, groups * _GROUP, rows), dtype=torch.float32)
        for expert in range(first, last):
            stack[expert - first] = self._matrix(checkpoint, expert).T
        return stack

    def _matrix(self, checkpoint: Checkpoint, expert: int) -> torch.Tensor:
        """Return the weight of an expert as the files have it, ``[out, in]``."""
        import torch

        from quantforge.packers.fp4 import power_of_two, values_e2m1

        octets = checkpoint.read_rows(self.name + _BLOCKS, expert, expert + 1)[0]
        exponents = checkpoint.read_rows(self.name + _SCALES, expert, expert + 1)[0]
        if bool((exponents == _NO_NUMBER).any()):
            row, group = (exponents == _NO_NUMBER).nonzero()[0].tolist()
            name = self.name + _SCALES
            raise InputError(
                f"{name}: exponent {_NO_NUMBER} of expert {expert}, row {row}, group {group} is no number",
                _DAMAGED,
                tensor=name,
                fault=Fault.NOT_FINITE,
            )
        codes = torch.stack((octets & 15, octets >> 4), -1).view(len(octets), -1)
        values = values_e2m1(codes).view(*exponents.shape, _GROUP)
        return values.mul_(power_of_two(exponents).unsqueeze(-1)).view(len(octets), -1)


def weights(headers: Mapping[str, StoredTensor]) -> tuple[list[Encoded], list[str]]:
    """Return the stacks of a checkpoint, and no tensors that are left out.

    Raises:
        InputError: blocks without exponents or the other way round, or of shapes that do not belong together.
    """
    ends = (_BLOCKS, _SCALES)
    names = {name.removesuffix(end) for name in headers for end in ends if name.endswith(end)}
    return [_stack(name, headers) for name in sorted(names)], []


def _stack(name: str, headers: Mapping[str, StoredTensor]) -> Encoded:
    blocks = headers.get(name + _BLOCKS)
    if blocks is None:
        raise InputError(f"{name}{_BLOCKS}: missing", _DAMAGED, tensor=name + _BLOCKS)
    if len(blocks.shape) != 4 or blocks.shape[3] != _OCTETS:
        raise InputError(
            f"{blocks.name}: {list(blocks.shape)}, expected [experts, rows, groups, {_OCTETS}]",
            _DAMAGED,
            tensor=blocks.name,
        )
    experts, rows, groups, _ = blocks.shape
    require(
        headers,
        [
            StoredTensor(name + _BLOCKS, "U8", blocks.shape),
            StoredTensor(name + _SCALES, "U8", (experts, rows, groups)),
        ],
        _DAMAGED,
    )
    shape = (experts, groups * _GROUP, rows)
    return Encoded(name, shape, (name + _BLOCKS, name + _SCALES), _Experts(name), "mxfp4")
