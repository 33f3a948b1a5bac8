"""Checkpoints of NVIDIA's Model Optimizer (``quant_method: modelopt``): NVFP4, fp8 and MXFP8.

For a linear ``P`` ``[out, in]``; which of them it is, its tensors say:

====================  ========  ====================  ===============================================
``P.weight``          U8        ``[out, in/2]``       NVFP4: two e2m1 elements, the even one in the low nibble
``P.weight_scale``    F8_E4M3   ``[out, in/16]``
``P.weight_scale_2``  F32       one number            what the scales are multiplied by
``P.weight``          F8_E4M3   ``[out, in]``         fp8 or MXFP8
``P.weight_scale``    float     one number, ``[out]``, ``[out, 1]`` or a grid of tiles of 128 by 128
``P.weight_scale``    U8        ``[out, in/32]``      MXFP8: the exponent, plus 127
====================  ========  ====================  ===============================================

A weight is ``element * (scale * scale_2)``, the step rounded to float32 once. Ranges of inputs and of the KV cache
matter to engines alone. Weights that were scaled against their inputs (AWQ's ``pre_quant_scale``) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError
from quantforge.files.reader import Checkpoint
from quantforge.formats.decoded import EncodedWeight
from quantforge.formats.read_checks import matrix_shape, require_scales
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    import torch

_WEIGHT_SUFFIX, _SCALE_SUFFIX, _SECOND_SCALE_SUFFIX = ".weight", ".weight_scale", ".weight_scale_2"
_ENGINE_ONLY_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".input_quantizer._amax")
_PRE_SCALE_SUFFIX = ".pre_quant_scale"
_TILE = 128
_STRIP = 1 << 21  # weights that are decoded at a time
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class _MatrixReader:
    """Reader that decodes rows of one weight.

    Attributes:
        module: whose weight it is.
        shape: of the weight.
        high: rows that share a scale; 0: all of them.
        wide: columns that share a scale.
        two_per_byte: whether a byte holds two elements.
    """

    module: str
    shape: tuple[int, int]
    high: int
    wide: int
    two_per_byte: bool

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return rows ``first:last`` in float32."""
        import torch

        columns = self.shape[1]
        steps = None if self.high else self._steps(checkpoint, 0, 1)
        weight = torch.empty((last - first, columns), dtype=torch.float32)
        rows_per_strip = max(1, _STRIP // columns)
        for start in range(first, last, rows_per_strip):
            stop = min(start + rows_per_strip, last)
            values = self._values(checkpoint.read_rows(self.module + _WEIGHT_SUFFIX, start, stop))
            strip = self._steps(checkpoint, start, stop) if steps is None else steps
            weight[start - first : stop - first] = values.mul_(
                _broadcast_scales(strip, self.wide, columns)
            )
        return weight

    def _values(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        from quantforge.packers.fp4 import decode_e2m1
        from quantforge.packers.fp8 import to_float32

        if not self.two_per_byte:
            return to_float32(stored)
        return decode_e2m1(torch.stack((stored & 15, stored >> 4), 2).view(len(stored), -1))

    def _steps(self, checkpoint: Checkpoint, first: int, last: int) -> torch.Tensor:
        """Return the scales of rows ``first:last`` in float32, ``[rows, groups]`` or ``[1, 1]``."""
        import torch

        from quantforge.packers.fp4 import decode_e8m0

        name = self.module + _SCALE_SUFFIX
        if not self.high:
            return self._check_scales(checkpoint.read(name).float().reshape(1, 1))
        low, up = first // self.high, -(-last // self.high)
        scales = checkpoint.read_rows(name, low, up).reshape(up - low, -1)
        if scales.dtype == torch.uint8:
            steps = decode_e8m0(scales).masked_fill_(scales == 255, torch.nan)
        else:
            steps = scales.float()
        second = self.module + _SECOND_SCALE_SUFFIX
        if second in checkpoint.entries:
            steps = steps * checkpoint.read(second).float().reshape(1, 1)
        steps = self._check_scales(steps)
        return steps[torch.arange(first, last) // self.high - low] if self.high > 1 else steps

    def _check_scales(self, steps: torch.Tensor) -> torch.Tensor:
        if not bool(steps.isfinite().all()):
            raise InputError(
                f"{self.module}{_SCALE_SUFFIX}: a scale is not finite",
                "the checkpoint is damaged: fetch it again",
                tensor=self.module + _SCALE_SUFFIX,
                fault=Fault.NOT_FINITE,
            )
        return steps


def _broadcast_scales(steps: torch.Tensor, group_columns: int, columns: int) -> torch.Tensor:
    """Return scales expanded to broadcast over the columns."""
    return steps if steps.shape[1] == 1 else steps.repeat_interleave(group_columns, 1)[:, :columns]


def find_encoded_weights(
    headers: Mapping[str, StoredTensor],
) -> tuple[list[EncodedWeight], list[str]]:
    """Return the encoded weights of a checkpoint, and the names of tensors that only engines need.

    Raises:
        InputError: a scale is missing or of a shape that is not known, or a weight was scaled against its input.
    """
    folded = [name for name in headers if name.endswith(_PRE_SCALE_SUFFIX)]
    if folded:
        raise InputError(
            f"{folded[0]}: the weights were scaled against their inputs",
            "quantize the model that this one was made from",
            tensor=folded[0],
        )
    require_scales(headers, "_scale")
    modules = [name.removesuffix(_SCALE_SUFFIX) for name in headers if name.endswith(_SCALE_SUFFIX)]
    engine_only = [name for name in headers if name.endswith(_ENGINE_ONLY_SUFFIXES)]
    return [_encoded_weight(module, headers) for module in modules], engine_only


def _encoded_weight(module: str, headers: Mapping[str, StoredTensor]) -> EncodedWeight:
    rows, columns = matrix_shape(headers, module + _WEIGHT_SUFFIX)
    codes, scale = headers[module + _WEIGHT_SUFFIX].dtype, headers[module + _SCALE_SUFFIX]
    nibbles = codes == "U8"
    columns *= 2 if nibbles else 1
    stored = [module + _WEIGHT_SUFFIX, module + _SCALE_SUFFIX]
    size = scale.shape
    if len(size) == 4 and size[1] == size[3] == 1:  # tiles as [rows, 1, columns, 1]
        size = size[::2]
    tiles = (-(-rows // _TILE), -(-columns // _TILE))
    encoding: tuple[int, int, str] | None = None
    if nibbles and scale.dtype == "F8_E4M3" and size == (rows, columns // 16):
        _check_second_scale(module, headers)
        stored.append(module + _SECOND_SCALE_SUFFIX)
        encoding = 1, 16, "nvfp4"
    elif codes == "F8_E4M3" and scale.dtype == "U8" and size == (rows, columns // 32):
        encoding = 1, 32, "mxfp8"
    elif codes == "F8_E4M3" and scale.dtype in _FLOATS:
        if size in {(), (1,), (1, 1)}:
            encoding = 0, columns, "fp8 (one scale)"
        elif size in {(rows,), (rows, 1)}:
            encoding = 1, columns, "fp8 (a scale for each row)"
        elif size == tiles:
            encoding = _TILE, _TILE, f"fp8 ({_TILE}x{_TILE} tiles)"
    if encoding is None:
        raise InputError(
            f"{module}: {codes} {list(headers[module + _WEIGHT_SUFFIX].shape)} under scales {scale.dtype}"
            f" {list(scale.shape)}"
            " is no layout that is read",
            "read are NVFP4, MXFP8, and fp8 with one scale, a scale for each row or for tiles of 128x128",
            tensor=module + _SCALE_SUFFIX,
        )
    high, group_columns, precision = encoding
    reader = _MatrixReader(module, (rows, columns), high, group_columns, nibbles)
    return EncodedWeight(module + _WEIGHT_SUFFIX, (rows, columns), tuple(stored), reader, precision)


def _check_second_scale(module: str, headers: Mapping[str, StoredTensor]) -> None:
    second = headers.get(module + _SECOND_SCALE_SUFFIX)
    if second is None or second.dtype != "F32" or any(size != 1 for size in second.shape):
        description = "missing" if second is None else f"{second.dtype} {list(second.shape)}"
        raise InputError(
            f"{module}{_SECOND_SCALE_SUFFIX}: {description}, expected one float32 number",
            "the checkpoint is damaged: fetch it again",
            tensor=module + _SECOND_SCALE_SUFFIX,
        )
