"""ggml's own quantizer: the entry point of the library in the xllamacpp wheel, which is what llama-quantize calls."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor

from quantforge.packers.ggml import GGML_TYPES


@cache
def _library() -> Any:
    (path,) = Path(xllamacpp.__file__).parent.glob("*.so")
    quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return quantize


def quantized(rows: Tensor, grid: str, importance: Tensor | None) -> Tensor:
    """Return ``rows`` ``[rows, columns]`` float32 as blocks, ``uint8 [rows, bytes]``; ``importance`` is of columns."""
    layout = GGML_TYPES[grid.upper()]
    raw = torch.empty(len(rows), layout.row_bytes(rows.shape[1]), dtype=torch.uint8)
    where = None if importance is None else importance.data_ptr()
    size = _library()(layout.number, rows.data_ptr(), raw.data_ptr(), 0, *rows.shape, where)
    assert size == raw.numel()
    return raw
