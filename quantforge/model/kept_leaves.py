"""Tensors that single rows keep between blocks: in memory, or in an unnamed file with their places in their stead.

What blocks return beside the hidden states has any structure. So a structure is kept whole, and its tensors are
replaced by where they lie. Most blocks return what the one before did, in the same sizes: the room of what nobody
refers to any more is taken by the next tensor of its size.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quantforge.model.hidden_states import UnnamedFile


class KeptLeaves:
    """Room for the tensors of structures; safe on several threads.

    Args:
        directory: where the file is made once there is a tensor; None keeps tensors in memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: UnnamedFile | None = None
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets, by size

    def put(self, structure: Any) -> Any:
        """Return a structure with its tensors on the CPU, or on disk; errors as of `UnnamedFile`."""
        return tree_map(self._put, structure)

    def take(self, leaf: Any) -> Any:
        """Return a leaf of what `put` returned as it was, a tensor on the CPU."""
        return leaf.read() if isinstance(leaf, _OnDisk) else leaf

    def joined(self, device: torch.device, *leaves: Any) -> Any:
        """Return the same leaf of several rows, joined along the first axis where it is a tensor."""
        found = [self.take(leaf) for leaf in leaves]
        if not isinstance(found[0], Tensor):
            return found[0]
        return (torch.cat(found) if len(found) > 1 else found[0]).to(device)

    def close(self) -> None:
        """Release the file; what was put cannot be taken any more."""
        if self._file is not None:
            self._file.close()
        self._file, self._free, self._end = None, {}, 0

    def _put(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._directory is None or not leaf.numel():
            return leaf.detach().cpu()
        with self._lock:
            if self._file is None:
                self._file = UnnamedFile(self._directory)
            free = self._free.setdefault(leaf.nbytes, [])
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + leaf.nbytes)
        self._file.write_at(offset, leaf)
        return _OnDisk(self._file, offset, leaf, free)


class _OnDisk:
    """Place of a tensor in the file; where nothing refers to it any more, it is free."""

    def __init__(self, file: UnnamedFile, offset: int, tensor: Tensor, free: list[int]) -> None:
        self._file, self._offset, self._free = file, offset, free
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def read(self) -> Tensor:
        values = torch.empty(self._shape, dtype=self._dtype)
        self._file.read_into(self._offset, values)
        return values

    def __del__(self) -> None:
        self._free.append(self._offset)
