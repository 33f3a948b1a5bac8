"""Run the tests that compare generated tokens once per CPU instruction set, as on older processors.

    python scripts/instruction_sets.py
    python scripts/instruction_sets.py --sets avx2 avx512 -- tests/unit/runtime -x

What follows ``--`` is passed to pytest instead of ``-m tokens``. For each set, environment variables limit oneDNN,
torch, MKL (on Intel processors) and our own compiled kernels to it. Sets that this processor lacks are left out. The
last set, ``all``, has no limit. Prints ``set | passed | failed``; exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from quantforge_kernels.cpu.instruction_sets import LIMIT_VARIABLE, SWITCH_VARIABLE

ROOT = Path(__file__).parents[1]
ONEDNN, ATEN, MKL = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"
OLD = {ATEN: "avx2", MKL: "AVX2", LIMIT_VARIABLE: "avx2"}
WIDE = {ATEN: "avx512", MKL: "AVX512", LIMIT_VARIABLE: "avx512vnni"}
# By name of the set: the flags of /proc/cpuinfo that it needs, and the environment variables that limit code to it.
SETS: dict[str, tuple[set[str], dict[str, str]]] = {
    "sse41": (
        {"sse4_1"},
        {ONEDNN: "SSE41", ATEN: "default", MKL: "SSE4_2", SWITCH_VARIABLE: "off"},
    ),
    "avx2": ({"avx2"}, {ONEDNN: "AVX2", **OLD}),
    "avx2_vnni": ({"avx_vnni"}, {ONEDNN: "AVX2_VNNI", **OLD}),
    "avx512": ({"avx512bw"}, {ONEDNN: "AVX512_CORE", **WIDE, LIMIT_VARIABLE: "avx512bw"}),
    "avx512_vnni": ({"avx512_vnni"}, {ONEDNN: "AVX512_CORE_VNNI", **WIDE}),
    "avx512_bf16": ({"avx512_bf16"}, {ONEDNN: "AVX512_CORE_BF16", **WIDE}),
    "avx512_fp16": ({"avx512_fp16"}, {ONEDNN: "AVX512_CORE_FP16", **WIDE}),
    "amx": ({"amx_tile", "amx_bf16"}, {ONEDNN: "AVX512_CORE_AMX", **WIDE}),
    "all": (set(), {}),
}
LIMITS = (ONEDNN, ATEN, MKL, LIMIT_VARIABLE, SWITCH_VARIABLE)


def flags() -> set[str]:
    """Return the CPU flags of this machine, as /proc/cpuinfo lists them for its first processor."""
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(line[1].split()) if line else set()


def tested(limits: dict[str, str], arguments: list[str]) -> tuple[int, int, list[str]]:
    """Run pytest with these environment variables; return the numbers passed and failed, and the lines of failures.

    Raises:
        SystemExit: pytest ran no test, or did not finish.
    """
    kept = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *arguments],
        cwd=ROOT, env=kept | limits, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in {0, 1}:
        raise SystemExit(done.stdout + done.stderr)
    lines = re.findall(r"^((?:FAILED|ERROR) .*)$", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    return int(passed[1]) if passed else 0, len(lines), lines


def main() -> None:
    """Parse the options, run the tests for one set after the other, and print the table."""
    available = [name for name, (needed, _) in SETS.items() if needed <= flags()]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog=f"sets of this processor: {available}"
    )
    parser.add_argument("--sets", nargs="+", choices=available, default=available)
    parser.add_argument("pytest", nargs="*", default=["-m", "tokens"])
    options = parser.parse_args()
    print("| set | passed | failed |\n|---|---|---|", flush=True)
    failures: list[str] = []
    for name in options.sets:
        passed, failed, lines = tested(SETS[name][1], options.pytest)
        print(f"| {name} | {passed} | {failed} |", flush=True)
        failures += [f"{name}: {line}" for line in lines]
    print("\n".join(["", *failures]) if failures else "", end="")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
