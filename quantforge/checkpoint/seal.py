"""A file as it was when it was digested: whatever is read of it later is compared with that, down to the last byte.

The time and size of a file say nothing of its bytes: whoever writes into it can set its time back. So the pass that
takes the SHA-256 of a file, for the manifest and the fingerprint of a run, keeps the state of the digest at every
boundary between its chunks. A run of bytes that is read later is digested again from the boundary before it to the one
behind it, starting from the state that is known there, and has to arrive at the next: no second table of digests, and
one more pass of the digest over what is used. A chunk is so large that a file has at most about `_CHUNKS` of them.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.files import FILES, changed
from quantforge_files import system
from quantforge_files.roles import WEIGHTS

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNKS = 1024  # their states take about half a megabyte
_LEAST = 1 << 16
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """Knowledge of a file: its size, its SHA-256, and the state of the digest before every chunk."""

    size: int
    sha256: str
    _chunk: int = field(repr=False)
    _states: tuple[_Hash, ...] = field(repr=False)

    def holds(self, descriptor: int, start: int, data: memoryview) -> bool:
        """Return whether ``data``, which was read at ``start``, are the bytes that the file had."""
        if not len(data):
            return True
        end = start + len(data)
        first, last = start // self._chunk, -(-end // self._chunk)
        before, after = first * self._chunk, min(last * self._chunk, self.size)
        state = self._states[first].copy()
        _add(state, descriptor, before, start)
        state.update(data)
        _add(state, descriptor, end, after)
        return state.digest() == self._states[last].digest()


def seal(path: Path, inside: Path | None) -> Seal:
    """Digest a file.

    Raises:
        InputError: as `Opener.opened`.
        IntegrityError: it ended while it was read.
    """
    with FILES.opened(path, WEIGHTS, inside) as descriptor:
        size = os.fstat(descriptor).st_size
        chunk = -(-max(size // _CHUNKS, 1) // _LEAST) * _LEAST
        state = hashlib.sha256()
        states = [state.copy()]
        for start in range(0, size, chunk):
            if not _add(state, descriptor, start, min(start + chunk, size)):
                raise changed(path)
            states.append(state.copy())
    return Seal(size, state.hexdigest(), chunk, tuple(states))


def _add(state: _Hash, descriptor: int, start: int, end: int) -> bool:
    """Digest bytes of a file; return whether all of them are there."""
    while start < end:
        data = system.read_at(descriptor, min(_READ, end - start), start)
        if not data:
            return False
        state.update(data)
        start += len(data)
    return True
