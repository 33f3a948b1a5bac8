"""Stand-ins for what another operating system has; imports nothing of the product."""

from __future__ import annotations

import errno
import fcntl
import os

NON_BLOCKING = 7  # stands for msvcrt.LK_NBLCK


def locking(descriptor: int, mode: int, count: int) -> None:
    """Lock as msvcrt.locking does: one byte from the position on, EACCES where another has it."""
    assert (mode, count) == (NON_BLOCKING, 1)
    assert os.lseek(descriptor, 0, os.SEEK_CUR) >= 1 << 20  # behind what others read
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(errno.EACCES, "locked") from error
