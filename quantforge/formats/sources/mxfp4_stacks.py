"""MXFP4 experts as in gpt-oss (``quant_method: mxfp4``): 4-bit elements with power-of-two block scales.

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
from quantforge.formats.decoded import EncodedWeight
from quantforge.formats.read_checks import require_headers
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    import torch

_BLOCKS_SUFFIX, _SCALES_SUFFIX = "_blocks", "_scales"
_BYTES_PER_GROUP, _GROUP_SIZE, _NAN_EXPONENT = 16, 32, 255
_DAMAGED_HINT = "the checkpoint is damaged: fetch it again"


@dataclass(frozen=True, slots=True)
class _ExpertReader:
    """Reader that decodes one stack of experts."""

    name: str

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return experts ``first:last`` in float32, ``[experts, in, out]``."""
        import torch

        _, rows, groups = checkpoint.entries[self.name + _SCALES_SUFFIX].shape
        stack = torch.empty((last - first, groups * _GROUP_SIZE, rows), dtype=torch.float32)
        for expert in range(first, last):
            stack[expert - first] = self._matrix(checkpoint, expert).T
        return stack

    def _matrix(self, checkpoint: Checkpoint, expert: int) -> torch.Tensor:
        """Decode the weight of one expert as stored, ``[out, in]``."""
        import torch

        from quantforge.packers.fp4 import decode_e2m1, decode_e8m0

        octets = checkpoint.read_rows(self.name + _BLOCKS_SUFFIX, expert, expert + 1)[0]
        exponents = checkpoint.read_rows(self.name + _SCALES_SUFFIX, expert, expert + 1)[0]
        if bool((exponents == _NAN_EXPONENT).any()):
            row, group = (exponents == _NAN_EXPONENT).nonzero()[0].tolist()
            name = self.name + _SCALES_SUFFIX
            raise InputError(
                f"{name}: exponent {_NAN_EXPONENT} of expert {expert}, row {row}, group {group} is no number",
                _DAMAGED_HINT,
                tensor=name,
                fault=Fault.NOT_FINITE,
            )
        codes = torch.stack((octets & 15, octets >> 4), -1).view(len(octets), -1)
        values = decode_e2m1(codes).view(*exponents.shape, _GROUP_SIZE)
        return values.mul_(decode_e8m0(exponents).unsqueeze(-1)).view(len(octets), -1)


def find_encoded_weights(
    headers: Mapping[str, StoredTensor],
) -> tuple[list[EncodedWeight], list[str]]:
    """Return the encoded expert stacks of a checkpoint, and an empty list of tensors to leave out.

    Raises:
        InputError: blocks without exponents or the other way round, or of shapes that do not belong together.
    """
    ends = (_BLOCKS_SUFFIX, _SCALES_SUFFIX)
    names = {name.removesuffix(end) for name in headers for end in ends if name.endswith(end)}
    return [_encoded_stack(name, headers) for name in sorted(names)], []


def _encoded_stack(name: str, headers: Mapping[str, StoredTensor]) -> EncodedWeight:
    blocks = headers.get(name + _BLOCKS_SUFFIX)
    if blocks is None:
        raise InputError(
            f"{name}{_BLOCKS_SUFFIX}: missing", _DAMAGED_HINT, tensor=name + _BLOCKS_SUFFIX
        )
    if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES_PER_GROUP:
        raise InputError(
            f"{blocks.name}: {list(blocks.shape)}, expected [experts, rows, groups, {_BYTES_PER_GROUP}]",
            _DAMAGED_HINT,
            tensor=blocks.name,
        )
    experts, rows, groups, _ = blocks.shape
    require_headers(
        headers,
        [
            StoredTensor(name + _BLOCKS_SUFFIX, "U8", blocks.shape),
            StoredTensor(name + _SCALES_SUFFIX, "U8", (experts, rows, groups)),
        ],
        _DAMAGED_HINT,
    )
    shape = (experts, groups * _GROUP_SIZE, rows)
    return EncodedWeight(
        name, shape, (name + _BLOCKS_SUFFIX, name + _SCALES_SUFFIX), _ExpertReader(name), "mxfp4"
    )
