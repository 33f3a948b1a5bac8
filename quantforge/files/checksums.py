"""Checksums of a file's chunks, against which everything read later is verified.

The time and size of a file say nothing about its bytes: a program that writes to it can restore the time. So the pass
that computes the SHA-256 of a file, for the manifest and the fingerprint of a run, keeps the state of the hash at every
chunk boundary. A chunk that is read later is hashed from the state before it, and must give the state after it. This
needs no second table of digests, and hashes only the chunks that are used once more.

Many reads are smaller than a chunk, and follow each other. The chunks that such reads used last are kept in memory, so
that each is read and hashed once; there are few of them, and none for reads of whole chunks. While a large chunk is
used, a thread reads the next one, so that readers do not wait for it.
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

from quantforge.files.opener import FILES, changed_error
from quantforge_files import system
from quantforge_files.roles import WEIGHTS

if TYPE_CHECKING:
    from hashlib import _Hash

_MAX_CHUNKS = 1024  # of a file, whose states take about half a megabyte
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1 << 16, 1 << 22  # bytes of a chunk
_PREFETCH_CHUNK_BYTES = 1 << 20  # bytes of a chunk from which on the next is read meanwhile
_MAX_CACHED_CHUNKS = 8  # chunks in memory: threads read in several
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checksums:
    """Size and SHA-256 of a file, and the state of the hash before every chunk."""

    size: int
    sha256: str
    _chunk_bytes: int = field(repr=False)
    _states: tuple[_Hash, ...] = field(repr=False)

    def read(self, descriptor: int, buffer: memoryview, start: int) -> bool:
        """Fill ``buffer`` with the bytes from offset ``start``; return whether they match the checksums."""
        end = start + len(buffer)
        if not len(buffer) or end > self.size:
            return not len(buffer)
        for chunk in range(start // self._chunk_bytes, -(-end // self._chunk_bytes)):
            chunk_start = chunk * self._chunk_bytes
            chunk_end = min(chunk_start + self._chunk_bytes, self.size)
            target = buffer[max(chunk_start - start, 0) : min(chunk_end, end) - start]
            if len(target) == chunk_end - chunk_start:
                if not self._read_chunk(descriptor, chunk, target):
                    return False
                continue
            data = self._read_cached(descriptor, chunk)
            if not len(data):
                return False
            if chunk + 2 < len(self._states) and self._chunk_bytes >= _PREFETCH_CHUNK_BYTES:
                self._prefetch_next(descriptor, chunk)
            num_skipped = max(start - chunk_start, 0)
            target[:] = data[num_skipped : num_skipped + len(target)]
        return True

    def _read_cached(self, descriptor: int, chunk: int) -> memoryview:
        """Return a chunk and keep it in memory; empty if it does not match its checksum."""
        cached = _cache_entry(self.sha256, chunk)
        with cached.lock:
            if not len(cached.data):
                start = chunk * self._chunk_bytes
                data = bytearray(min(self._chunk_bytes, self.size - start))
                if self._read_chunk(descriptor, chunk, memoryview(data)):
                    cached.data = memoryview(data).toreadonly()
            return cached.data

    def _prefetch_next(self, descriptor: int, chunk: int) -> None:
        """Read the next chunk in the background if the previous one was read too."""
        if (self.sha256, chunk - 1) not in _CACHE or (self.sha256, chunk + 1) in _CACHE:
            return
        _cache_entry(self.sha256, chunk + 1)  # others do not ask for it again
        own_descriptor = os.dup(descriptor)

        def read_chunk() -> None:
            try:
                if (self.sha256, chunk + 1) in _CACHE:  # else readers are far beyond it by now
                    self._read_cached(own_descriptor, chunk + 1)
            finally:
                os.close(own_descriptor)

        _PREFETCHER.submit(read_chunk)

    def _read_chunk(self, descriptor: int, chunk: int, buffer: memoryview) -> bool:
        """Read a whole chunk; return whether it matches its checksum."""
        state, start = self._states[chunk].copy(), chunk * self._chunk_bytes
        for offset in range(0, len(buffer), _READ_BYTES):
            piece = buffer[offset : offset + _READ_BYTES]
            if not system.read_into(descriptor, piece, start + offset):
                return False
            state.update(piece)
        return state.digest() == self._states[chunk + 1].digest()


class _CachedChunk:
    """A chunk in memory, empty until it is read; whoever reads it holds the lock."""

    def __init__(self) -> None:
        self.lock, self.data = Lock(), memoryview(b"")


_CACHE: OrderedDict[tuple[str, int], _CachedChunk] = OrderedDict()  # by the digest of the file
_CACHE_LOCK = Lock()
_PREFETCHER = ThreadPoolExecutor(1)  # begins its thread when it is needed


def _cache_entry(sha256: str, chunk: int) -> _CachedChunk:
    """Return the entry of a chunk in the cache, and mark it as most recently used."""
    with _CACHE_LOCK:
        entry = _CACHE.setdefault((sha256, chunk), _CachedChunk())
        _CACHE.move_to_end((sha256, chunk))
        while len(_CACHE) > _MAX_CACHED_CHUNKS:
            _CACHE.popitem(last=False)
    return entry


def compute_checksums(path: Path, model_dir: Path | None) -> Checksums:
    """Hash a file.

    Raises:
        InputError: as `Opener.open_checked`.
        IntegrityError: the file ended early.
    """
    with FILES.open_checked(path, WEIGHTS, model_dir) as descriptor:
        size = os.fstat(descriptor).st_size
        chunk_bytes = min(
            -(-max(size // _MAX_CHUNKS, 1) // _MIN_CHUNK_BYTES) * _MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES
        )
        state, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ_BYTES, chunk_bytes)))
        hash_states = [state.copy()]
        for start in range(0, size, chunk_bytes):
            end = min(start + chunk_bytes, size)
            for offset in range(start, end, len(buffer)):
                chunk = buffer[: end - offset]
                if not system.read_into(descriptor, chunk, offset):
                    raise changed_error(path)
                state.update(chunk)
            hash_states.append(state.copy())
    return Checksums(size, state.hexdigest(), chunk_bytes, tuple(hash_states))
