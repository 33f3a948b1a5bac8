"""How long a thread spins at the end of a product until the others have finished theirs, before it sleeps.

The OpenMP library that torch brings (GNU's) spins 300000 times by default, milliseconds in which a thread that somebody
else's process has displaced cannot come back to finish: with two threads on two busy cores that is most of the time.
Large products lose nothing by sleeping soon. A decoded token consists of many small ones, and would wait for the system
to wake its threads, so that this is not for verbs that decode. The library reads the number when torch is imported.
"""

from __future__ import annotations

import os
import sys

SPINS = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
TIMES = "2000"


def wait_briefly() -> None:
    """Let threads sleep after a short wait, unless the environment says how they wait or torch is there already."""
    if "torch" not in sys.modules and not {SPINS, POLICY} & os.environ.keys():
        os.environ[SPINS] = TIMES
