"""Whole files of llama-quantize and of ``export --scales reference``: tensors that differ, time of both commands.

    scripts/llama_cpp_tools
    python benchmarks/gguf_same.py --model MODEL [--imatrix FILE] [--types Q4_K_M ...] [--threads 1] --out PREFIX

llama-quantize begins with the model as a GGUF file of the numbers of the source (``--base BF16``), we with the model
itself. Both take the importance matrix, if there is one. Seconds are of whole processes, imports and compiling
included: wall clock, and processor time. Writes PREFIX.json and PREFIX.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L",
         "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip
REFUSED = "requires an imatrix"


def main() -> None:
    """Make both files of every type, compare them, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--imatrix")
    parser.add_argument("--base", default="F32")
    parser.add_argument("--tools", default=".venv-interop/llama.cpp/bin")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--work", help="a directory on a disk that has room")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        run([*ours(options), "--type", options.base, "-o", str(work / "base.gguf")])
        for kind in options.types:
            rows.append({"type": kind, **compared(options, kind, work)})
            print(rows[-1], file=sys.stderr, flush=True)
    versions = {name: version(name) for name in ("quantforge", "torch", "numba", "gguf")}
    content = {"versions": versions, "arguments": vars(options), "rows": rows}
    Path(f"{options.out}.json").write_text(json.dumps(content, indent=1) + "\n")
    Path(f"{options.out}.md").write_text(table(rows))


def ours(options: argparse.Namespace) -> list[str]:
    """Our command without type and output."""
    command = [str(Path(sys.executable).with_name("quantforge")), "export", options.model, "-q"]
    return [*command, "--format", "gguf", "--threads", options.threads, "--overwrite"]


def compared(options: argparse.Namespace, kind: str, work: Path) -> dict[str, Any]:
    """Make one type twice; returns seconds and the names of tensors that differ."""
    mine, theirs = work / "mine.gguf", work / "theirs.gguf"
    known = ["--imatrix", options.imatrix] if options.imatrix else []
    choices = ["--type", kind, "--scales", "reference", "-o", str(mine), *known]
    row: dict[str, Any] = {"ours": run([*ours(options), *choices])}
    tool = [str(Path(options.tools) / "llama-quantize"), *known, str(work / "base.gguf")]
    try:
        row["llama.cpp"] = run([*tool, str(theirs), kind, options.threads])
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        return row
    a, b = (
        {tensor.name: (tensor.tensor_type.name, tensor.data.view(numpy.uint8))
         for tensor in gguf.GGUFReader(path).tensors}
        for path in (mine, theirs)
    )  # fmt: skip
    row["tensors"] = len(b)
    row["different"] = sorted(
        name for name in a.keys() | b.keys()
        if name not in a or name not in b or a[name][0] != b[name][0] or not numpy.array_equal(a[name][1], b[name][1])
    )  # fmt: skip
    return row


def run(command: list[str]) -> dict[str, float]:
    """Run a command; returns its seconds. Raises `RuntimeError` with what it said when it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(ended.stdout + ended.stderr)[-2000:]}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 2), "processor": round(processor, 2)}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each type."""
    lines = [
        "| type | tensors | different | ours, wall s | processor s | llama-quantize, wall s | processor s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = f"{row['ours']['wall']:.1f} | {row['ours']['processor']:.1f}"
        if "llama.cpp" not in row:
            lines.append(
                f"| {row['type']} | llama-quantize refuses it without an imatrix | | {own} | | |"
            )
            continue
        peer = f"{row['llama.cpp']['wall']:.1f} | {row['llama.cpp']['processor']:.1f}"
        cells = f"{row['type']} | {row['tensors']} | {len(row['different'])}"
        lines.append(f"| {cells} | {own} | {peer} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
