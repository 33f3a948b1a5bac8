"""Float32 weights from the bytes of any ggml type, bit for bit as ``gguf.quants.dequantize`` has them."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.notation import parse
from quantforge.packers.ggml import LAYOUTS
from quantforge.packers.ggml.block_layout import unpack

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS_AT_A_TIME = 4096  # of the types that gguf decodes


def decode_blocks(raw: Tensor, type_name: str) -> Tensor:
    """Decode ``raw`` uint8 ``[rows, row_bytes]`` of ggml's type ``type_name`` to float32 ``[rows, columns]``.

    Raises:
        KeyError: no such type in `LAYOUTS`.
        ValueError: blocks do not fill the rows.
    """
    layout = LAYOUTS[type_name]
    if raw.shape[-1] % layout.block_bytes:
        raise ValueError(f"{raw.shape[-1]} bytes are no whole number of {type_name} blocks")
    if type_name in _PLAIN:
        return raw.contiguous().view(_PLAIN[type_name]).float()
    if layout.grid is not None:
        return unpack(raw, parse(layout.grid)).decode()
    return _by_gguf(raw, type_name)


def _by_gguf(raw: Tensor, type_name: str) -> Tensor:
    """Decode types that are only ever read."""
    import gguf
    import numpy

    layout, kind = LAYOUTS[type_name], gguf.GGMLQuantizationType[type_name]
    blocks = raw.cpu().reshape(-1, layout.block_bytes)
    with numpy.errstate(all="ignore"):  # a NaN scale is for the caller to judge
        parts = [
            gguf.quants.dequantize(part.numpy(), kind)
            for part in torch.split(blocks, BLOCKS_AT_A_TIME)
        ]
    return torch.from_numpy(numpy.concatenate(parts)).reshape(len(raw), -1).to(raw.device)
