"""KL divergence of GGUF files: llama.cpp's own quantizer and ours, both measured by llama.cpp.

    scripts/llama_cpp_tools
    python benchmarks/gguf_quality.py --model MODEL --calibration cal.txt --evaluation eval.txt --out PREFIX

One base (the model as F16) is scored once by llama-perplexity; every file is then compared with it by
``llama-perplexity --kl-divergence -c 512``. Importance is llama-imatrix's for llama-quantize, and our own for us, from
the same text. Writes PREFIX.json and PREFIX.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

TYPES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_0", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
KLD = re.compile(r"Mean\s+KLD:\s*([-\d.]+)\s*±\s*([-\d.]+)")
TOOLS = Path(".venv-interop/llama.cpp/bin")


def main() -> None:
    """Make every file, compare it with the base, and write the table."""
    options = arguments()
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    base, logits, importance = work / "base.gguf", work / "base.logits", work / "imatrix.gguf"
    ours(options, base, "--type", "F16")
    tool("perplexity", "-m", base, "-f", options.evaluation, "-c", "512", "--chunks", options.chunks,
         "--kl-divergence-base", logits)  # fmt: skip
    tool("imatrix", "-m", base, "-f", options.calibration, "-o", importance, "-c", "512",
         "--chunks", options.samples)  # fmt: skip
    rows = []
    for kind in options.types:
        made = {
            "llama.cpp": lambda out, kind=kind: tool("quantize", base, out, kind),
            "llama.cpp imatrix": lambda out, kind=kind: tool("quantize", "--imatrix", importance, base, out, kind),
            "ours rtn": lambda out, kind=kind: ours(options, out, "--type", kind, *calibrated(options)),
            "ours gptq": lambda out, kind=kind: ours(
                options, out, "--type", kind, "--method", "gptq", *calibrated(options)
            ),
        }  # fmt: skip
        for name, make in made.items():
            out = work / "x.gguf"
            out.unlink(missing_ok=True)
            start = time.monotonic()
            make(out)
            seconds = time.monotonic() - start
            text = tool(
                "perplexity",
                "-m",
                out,
                "-c",
                "512",
                "--kl-divergence",
                "--kl-divergence-base",
                logits,
            )
            found = KLD.search(text)
            if found is None:
                raise SystemExit(f"no KLD in the output of llama-perplexity for {kind} {name}")
            rows.append({"type": kind, "by": name, "kl": float(found[1]), "error": float(found[2]),
                         "bytes": out.stat().st_size, "seconds": seconds})  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    write(options, rows)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("model", "calibration", "evaluation", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--work", default=".venv-interop/gguf-quality")
    parser.add_argument("--samples", default="128")
    parser.add_argument("--chunks", default="80")
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    return parser.parse_args()


def calibrated(options: argparse.Namespace) -> tuple[str, ...]:
    """The rows that both sides calibrate on."""
    return ("--calibration", options.calibration, "--samples", options.samples, "--length", "512")


def ours(options: argparse.Namespace, out: Path, *choices: str) -> None:
    """Make one file with our command line; without calibration text it is an export."""
    verb = "quantize" if "--calibration" in choices else "export"
    command = [
        "quantforge",
        verb,
        options.model,
        "--format",
        "gguf",
        "-o",
        str(out),
        "--overwrite",
        "-q",
        *choices,
    ]
    side = out.with_name(out.name + ".quantforge.json")
    if not side.exists():
        out.unlink(missing_ok=True)
    subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], check=True)


def tool(name: str, *choices: object) -> str:
    """Run one of llama.cpp's tools; returns what it said."""
    command = [str(TOOLS / f"llama-{name}"), *map(str, choices)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def write(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Write the figures, and a table with ratios to llama.cpp with its importance matrix."""
    Path(f"{options.out}.json").write_text(
        json.dumps(
            {"machine": platform.processor(), "arguments": vars(options), "rows": rows}, indent=1
        )
    )
    lines = [
        "| type | by | KL | ± | to llama.cpp imatrix | bytes | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer = next(
            r["kl"] for r in rows if r["type"] == row["type"] and r["by"] == "llama.cpp imatrix"
        )
        ratio = float(str(row["kl"])) / float(str(peer))
        lines.append(
            f"| {row['type']} | {row['by']} | {row['kl']:.6f} | {row['error']:.6f} | {ratio:.3f} |"
            f" {row['bytes']} | {row['seconds']:.1f} |"
        )
    Path(f"{options.out}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
