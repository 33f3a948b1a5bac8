"""KL divergence of GGUF files: llama.cpp's own quantizer and ours, both measured by llama.cpp.

    scripts/llama_cpp_tools
    python benchmarks/gguf_quality.py --model MODEL --calibration cal.txt --evaluation eval.txt --out PREFIX

One base (the model as F16) is scored once by llama-perplexity; every file is then compared with it by
``llama-perplexity --kl-divergence -c 512``. Importance is llama-imatrix's for llama-quantize, our own for us, from
the same text. Writes PREFIX.json after every file, and PREFIX.md; what PREFIX.json has already is not made again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

TYPES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_0", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
KLD = re.compile(r"Mean\s+KLD:\s*([-\d.]+)\s*±\s*([-\d.]+)")
BUILD = re.compile(r"build[^\n]*|version: [^\n]*")
TOOLS = Path(".venv-interop/llama.cpp/bin")
PEER = "llama.cpp imatrix"
OURS = {
    "importance": "--method rtn",
    "gptq": "--method gptq",  # at the default effort, which tunes for one epoch at 4 bits and fewer
    "gptq, untuned": "--method gptq --tune 0",
    "gptq --effort high": "--method gptq --effort high",
}
Row = dict[str, Any]


def main() -> None:
    """Make every file, compare it with the base, and write the table."""
    options = arguments()
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    record = Path(f"{options.out}.json")
    rows = json.loads(record.read_text())["rows"] if record.exists() else []
    known = {(row["type"], row["by"]) for row in rows}
    base, logits, importance = prepare(options, work)
    for kind in options.types:
        for name, make in ways(options, kind, base, importance):
            if name not in options.by or (kind, name) in known:
                continue
            rows.append({"type": kind, "by": name, **measured(options, make, work, logits)})
            print(rows[-1], file=sys.stderr, flush=True)
            content = {"versions": versions(options), "arguments": vars(options), "rows": rows}
            record.write_text(json.dumps(content, indent=1) + "\n")
    Path(f"{options.out}.md").write_text(table(rows))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("model", "calibration", "evaluation", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tools", default=str(TOOLS))
    parser.add_argument("--work", default=".venv-interop/gguf-quality")
    parser.add_argument("--samples", default="128", help="windows of 512 that both calibrate on")
    parser.add_argument("--chunks", default="80", help="windows of 512 that are compared")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--by", nargs="+", default=["llama.cpp", PEER, "importance", "gptq"])
    parser.add_argument(
        "--linears",
        action="store_true",
        help="keep the embedding in BF16, so that linears alone differ",
    )
    return parser.parse_args()


def prepare(options: argparse.Namespace, work: Path) -> tuple[Path, Path, Path]:
    """The base, its logits, and llama.cpp's importance."""
    base, logits, importance = work / "base.gguf", work / "base.logits", work / "imatrix.gguf"
    if not base.exists():
        ours(options, ["--type", "F16", "--method", "rtn", "--calibration", "none"], base)
    if not logits.exists():
        tool(options, "perplexity", "-m", base, "-f", options.evaluation, "-c", "512",
             "--chunks", options.chunks, "--kl-divergence-base", logits)  # fmt: skip
    if not importance.exists():
        tool(options, "imatrix", "-m", base, "-f", options.calibration, "-o", importance,
             "-c", "512", "--chunks", options.samples)  # fmt: skip
    return base, logits, importance


def ways(
    options: argparse.Namespace, kind: str, base: Path, importance: Path
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """How a file of one type is made, by name."""
    kept = ["--token-embedding-type", "bf16"] if options.linears else []
    yield "llama.cpp", lambda out: tool(options, "quantize", *kept, base, out, kind)
    with_importance = ["--imatrix", importance, *kept, base]
    yield PEER, lambda out: tool(options, "quantize", *with_importance, out, kind)
    text = ["--calibration", options.calibration, "--samples", options.samples, "--length", "512"]
    text += ["--ignore", "*embed_tokens*"] if options.linears else []
    for name, words in OURS.items():
        yield name, partial(ours, options, ["--type", kind, *words.split(), *text])


def ours(options: argparse.Namespace, choices: list[str], out: Path) -> None:
    """Make one file with our command line."""
    command = [str(Path(sys.executable).with_name("quantforge")), "quantize", options.model]
    command += ["--format", "gguf", "-o", str(out), "-q", "--threads", options.threads, *choices]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def tool(options: argparse.Namespace, name: str, *choices: object) -> str:
    """Run one of llama.cpp's tools; returns what it said."""
    command = [str(Path(options.tools) / f"llama-{name}"), *map(str, choices)]
    if name == "quantize":
        command.append(options.threads)
    else:
        # Without repacking: its kernels for AMX fault on some virtual machines.
        command += ["-t", options.threads, "--no-repack"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}: {ended.stderr[-2000:]}")
    return ended.stdout + ended.stderr


def measured(
    options: argparse.Namespace, make: Callable[[Path], object], work: Path, logits: Path
) -> Row:
    """Make a file and compare it with the base."""
    out = work / "x.gguf"
    for path in (out, out.with_name(f"{out.name}.quantforge.json")):
        path.unlink(missing_ok=True)
    start = time.monotonic()
    make(out)
    seconds = time.monotonic() - start
    text = tool(
        options, "perplexity", "-m", out, "-c", "512",
        "--kl-divergence", "--kl-divergence-base", logits,
    )  # fmt: skip
    found = KLD.search(text)
    if found is None:
        raise SystemExit(f"no KLD in what llama-perplexity says: {text[-2000:]}")
    size = out.stat().st_size
    return {"kl": float(found[1]), "error": float(found[2]), "bytes": size, "seconds": seconds}


def table(rows: list[Row]) -> str:
    """Return a line for each type: divergences, their ratios to llama.cpp with its importance, bytes."""
    own = [by for by in OURS if any(row["by"] == by for row in rows)]
    head = ["type", "llama.cpp", "with imatrix", *(word for by in own for word in (by, "ratio"))]
    lines = [
        f"| {' | '.join([*head, 'bytes, ours / llama.cpp'])} |",
        "|---" * (len(head) + 1) + "|",
    ]
    for kind in dict.fromkeys(row["type"] for row in rows):
        found = {row["by"]: row for row in rows if row["type"] == kind}
        peer, cells = found[PEER], [kind]
        cells += [f"{found[by]['kl']:.6f}" if by in found else "-" for by in ("llama.cpp", PEER)]
        for by in own:
            if by in found:
                cells += [f"{found[by]['kl']:.6f}", f"{found[by]['kl'] / peer['kl']:.3f}"]
            else:
                cells += ["-", "-"]
        sizes = {found[by]["bytes"] / peer["bytes"] for by in own if by in found}
        cells.append(", ".join(f"{size:.5f}" for size in sorted(sizes)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def versions(options: argparse.Namespace) -> dict[str, str]:
    """What was measured with."""
    said = BUILD.search(tool(options, "perplexity", "--version"))
    names = {name: version(name) for name in ("quantforge", "torch", "numba")}
    return {**names, "llama.cpp": said[0] if said else "unknown"}


if __name__ == "__main__":
    main()
