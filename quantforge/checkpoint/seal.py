"""A file as it was when it was digested: whatever is read of it later is compared with that, down to the last byte.

The time and size of a file say nothing of its bytes: whoever writes into it can set its time back. So the pass that
takes the SHA-256 of a file, for the manifest and the fingerprint of a run, keeps the state of the digest at every
boundary between its chunks. A run of bytes that is read later is digested again from the boundary before it to the one
behind it, starting from the state that is known there, and has to arrive at the next: no second table of digests, and
one more pass of the digest over what is used. A chunk is so large that a file has at most about `_CHUNKS` of them, and
of a large file many reads fall into one: of the chunks that were read last the states at `_PARTS` places are kept, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
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
_PARTS = 64  # of a chunk that was read
_KEPT = 8  # chunks of a file whose parts are known: threads read in several
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """Knowledge of a file: its size, its SHA-256, and the state of the digest before every chunk."""

    size: int
    sha256: str
    _chunk: int = field(repr=False)
    _states: tuple[_Hash, ...] = field(repr=False)
    _within: dict[int, dict[int, _Hash]] = field(default_factory=dict, repr=False, compare=False)

    def holds(self, descriptor: int, start: int, data: memoryview) -> bool:
        """Return whether ``data``, which was read at ``start``, are the bytes that the file had."""
        if not len(data):
            return True
        end = start + len(data)
        first, last = start // self._chunk, (end - 1) // self._chunk
        known = {chunk: self._within.get(chunk) for chunk in (first, last)}  # others read, too
        before, state = [item for item in self._places(first, known) if item[0] <= start][-1]
        after, wanted = next(item for item in self._places(last, known) if item[0] >= end)
        found: dict[int, dict[int, _Hash]] = {chunk: {} for chunk in known if not known[chunk]}
        parts = {place: chunk for chunk in found for place in self._parts(chunk)}
        state = state.copy()
        for place in sorted({*parts, after}):
            _add(state, descriptor, before, min(place, start))
            state.update(data[max(before - start, 0) : max(min(place, end) - start, 0)])
            _add(state, descriptor, max(before, end), place)
            before = place
            if place in parts:
                found[parts[place]][place] = state.copy()
        if state.digest() != wanted.digest():
            return False
        for chunk, states in found.items():
            if len(self._within) >= _KEPT:
                oldest = iter([*self._within])  # a copy: others write, too
                self._within.pop(next(oldest), None)
            self._within[chunk] = states
        return True

    def _places(
        self, chunk: int, known: Mapping[int, Mapping[int, _Hash] | None]
    ) -> Iterator[tuple[int, _Hash]]:
        """Yield the places in a chunk, its two ends among them, of which the state of the digest is known."""
        yield chunk * self._chunk, self._states[chunk]
        yield from (known[chunk] or {}).items()
        yield min((chunk + 1) * self._chunk, self.size), self._states[chunk + 1]

    def _parts(self, chunk: int) -> range:
        """Return the places inside of a chunk at which states are noted."""
        end = min((chunk + 1) * self._chunk, self.size)
        step = max(_LEAST, self._chunk // _PARTS)
        return range(chunk * self._chunk + step, end, step)


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
