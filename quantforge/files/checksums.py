"""Checksums of a file: whatever is read of it later is compared with what was digested, down to the last byte.

The time and size of a file say nothing of its bytes: whoever writes into it can set its time back. So the pass that
takes the SHA-256 of a file, for the manifest and the fingerprint of a run, keeps the state of the digest at every
boundary between its chunks. A chunk that is read later is digested from the state that is known before it, and has to
arrive at the next: no second table of digests, and one more pass of the digest over what is used.

Many reads are smaller than a chunk, and follow each other. The chunks that such reads were last answered from are kept
in memory, so that each is read and digested once; there are few of them, and none of a read that takes a chunk whole.
While a large one is used a thread reads the next, so that readers do not wait for it side by side.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from quantforge.files.opener import FILES, changed
from quantforge_files import system
from quantforge_files.roles import WEIGHTS

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNKS = 1024  # of a file, whose states take about half a megabyte
_LEAST, _MOST = 1 << 16, 1 << 22  # bytes of a chunk
_LARGE = 1 << 20  # bytes of a chunk from which on the next is read meanwhile
_KEPT = 8  # chunks in memory: threads read in several
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Checksums:
    """Size of a file, its SHA-256, and the state of the digest before every chunk."""

    size: int
    sha256: str
    _chunk: int = field(repr=False)
    _states: tuple[_Hash, ...] = field(repr=False)

    def read(self, descriptor: int, into: memoryview, start: int) -> bool:
        """Fill ``into`` with the bytes from ``start`` on; return whether they match the checksums."""
        end = start + len(into)
        if not len(into) or end > self.size:
            return not len(into)
        for chunk in range(start // self._chunk, -(-end // self._chunk)):
            first = chunk * self._chunk
            last = min(first + self._chunk, self.size)
            part = into[max(first - start, 0) : min(last, end) - start]
            if len(part) == last - first:
                if not self._filled(descriptor, chunk, part):
                    return False
                continue
            data = self._kept(descriptor, chunk)
            if not len(data):
                return False
            if chunk + 2 < len(self._states) and self._chunk >= _LARGE:
                self._ahead(descriptor, chunk)
            behind = max(start - first, 0)
            part[:] = data[behind : behind + len(part)]
        return True

    def _kept(self, descriptor: int, chunk: int) -> memoryview:
        """Return a chunk and keep it in memory; empty if it does not match its checksum."""
        kept = _place(self.sha256, chunk)
        with kept.lock:
            if not len(kept.data):
                start = chunk * self._chunk
                data = bytearray(min(self._chunk, self.size - start))
                if self._filled(descriptor, chunk, memoryview(data)):
                    kept.data = memoryview(data).toreadonly()
            return kept.data

    def _ahead(self, descriptor: int, chunk: int) -> None:
        """Read the next chunk in the background if the previous one was read too."""
        if (self.sha256, chunk - 1) not in _LAST or (self.sha256, chunk + 1) in _LAST:
            return
        _place(self.sha256, chunk + 1)  # others do not ask for it again
        own = os.dup(descriptor)

        def read() -> None:
            try:
                if (self.sha256, chunk + 1) in _LAST:  # else readers are far beyond it by now
                    self._kept(own, chunk + 1)
            finally:
                os.close(own)

        _READER.submit(read)

    def _filled(self, descriptor: int, chunk: int, into: memoryview) -> bool:
        """Read a whole chunk; return whether it matches its checksum."""
        state, start = self._states[chunk].copy(), chunk * self._chunk
        for done in range(0, len(into), _READ):
            part = into[done : done + _READ]
            if not system.fill(descriptor, part, start + done):
                return False
            state.update(part)
        return state.digest() == self._states[chunk + 1].digest()


class _InMemory:
    """A chunk in memory, empty until it is read; the reader holds the lock."""

    def __init__(self) -> None:
        self.lock, self.data = Lock(), memoryview(b"")


_LAST: OrderedDict[tuple[str, int], _InMemory] = OrderedDict()  # by the digest of the file
_LOCK = Lock()
_READER = ThreadPoolExecutor(1)  # begins its thread when it is needed


def _place(sha256: str, chunk: int) -> _InMemory:
    """Return the entry of a chunk in the cache, and mark it as most recently used."""
    with _LOCK:
        kept = _LAST.setdefault((sha256, chunk), _InMemory())
        _LAST.move_to_end((sha256, chunk))
        while len(_LAST) > _KEPT:
            _LAST.popitem(last=False)
    return kept


def take_checksums(path: Path, inside: Path | None) -> Checksums:
    """Digest a file.

    Raises:
        InputError: as `Opener.opened`.
        IntegrityError: it ended while it was read.
    """
    with FILES.opened(path, WEIGHTS, inside) as descriptor:
        size = os.fstat(descriptor).st_size
        chunk = min(-(-max(size // _CHUNKS, 1) // _LEAST) * _LEAST, _MOST)
        state, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ, chunk)))
        states = [state.copy()]
        for start in range(0, size, chunk):
            end = min(start + chunk, size)
            for place in range(start, end, len(buffer)):
                part = buffer[: end - place]
                if not system.fill(descriptor, part, place):
                    raise changed(path)
                state.update(part)
            states.append(state.copy())
    return Checksums(size, state.hexdigest(), chunk, tuple(states))
