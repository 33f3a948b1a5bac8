"""The memory that a report gives for a model excludes the kernel compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import runs

COMPILER = 60_000_000  # what LLVM alone takes is twice that

# In a process of its own, in which nothing has been compiled yet.
EVALUATE = """
import json, sys
from pathlib import Path
from tests.evaluations import evaluate_models, options
rows = evaluate_models(Path(sys.argv[1]), [Path(sys.argv[2])], options(speed=True)).rows
print(json.dumps([[row["peak_bytes"], list(row["kernels"])] for row in rows]))
"""


@pytest.mark.thorough
def test_reported_memory_excludes_the_kernel_compiler(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    runs.quantize(source, out, runs.recipe(scheme="int4:g32"))
    command = [sys.executable, "-c", EVALUATE, str(source), str(out)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    (plain, _), (packed, kernels) = json.loads(done.stdout.splitlines()[-1])
    assert packed is not None
    if "llvm-int" in kernels:
        assert packed < plain + COMPILER
