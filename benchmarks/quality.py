"""KL divergence and seconds of our methods, of llm-compressor and of AutoRound, on the same rows, several seeds.

    python benchmarks/quality.py --model MODEL --calibration cal.txt --evaluation eval.txt --peer PYTHON --out PREFIX

Writes PREFIX.json (everything) and PREFIX.md (a table for each scheme and evaluation text: mean over the seeds, ratio
to llm-compressor's GPTQ). Seconds are those of quantizing alone, imports excluded, on all sides; ``processor`` in the
JSON are those of the processor, with imports on our side. Each peer runs where it is installed: ``--peer`` is the
python of llm-compressor, ``--autoround`` that of AutoRound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.tokenizer import load_tokenizer

SCHEMES = ("int4:g128:sym", "int3:g128:sym", "int2:g64:asym")
UNTUNED = ("--method", "gptq", "--tune", "0")
OURS = {
    "rtn absmax": ("--method", "rtn", "--scales", "absmax"),
    "rtn search": ("--method", "rtn", "--scales", "search"),
    "gptq absmax, untuned, no refinement": (*UNTUNED, "--scales", "absmax", "--refine", "0"),
    "gptq": (
        "--method",
        "gptq",
    ),  # at the default effort, which tunes for one epoch at 4 bits and fewer
    "gptq, untuned": UNTUNED,
    "gptq, untuned, no refinement": (*UNTUNED, "--refine", "0"),
    "gptq --guided-hessians 1, untuned": (*UNTUNED, "--guided-hessians", "1"),
    "gptq --guided-hessians 4, untuned": (*UNTUNED, "--guided-hessians", "4"),
    "gptq --guided-hessians 1": ("--method", "gptq", "--guided-hessians", "1"),
    "gptq --tune 1": ("--method", "gptq", "--tune", "1"),
    "gptq --tune 2": ("--method", "gptq", "--tune", "2"),
    "gptq --effort low": ("--method", "gptq", "--effort", "low"),
    "gptq --effort high": ("--method", "gptq", "--effort", "high"),
    "rotate+gptq": ("--method", "rotate+gptq"),
    "awq": ("--method", "awq"),
    "awq+gptq": ("--method", "awq+gptq"),
    "awq+gptq, untuned": ("--method", "awq+gptq", "--tune", "0"),
}
# Of a peer: its option, its script, and what the script is told.
PEERS = {
    "llm-compressor rtn": ("peer", "llm_compressor.py", "rtn"),
    "llm-compressor gptq": ("peer", "llm_compressor.py", "gptq"),
    "AutoRound, 200 iterations": ("autoround", "autoround.py", "200"),
}


def main() -> None:
    """Run everything and write the results."""
    options = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            sample = draw(
                RowRequest(str(options.calibration), options.samples, options.length, seed),
                load_tokenizer(options.model),
            )
            np.save(f"{scratch}/rows.npy", sample.ids.numpy())
            for scheme in options.schemes:
                found = [ours(options, name, scheme, seed, Path(scratch)) for name in options.ours]
                found += [
                    peer(options, name, scheme, seed, Path(scratch))
                    for name, (where, _, _) in PEERS.items()
                    if name in options.peers and getattr(options, where)
                ]
                paths = [run.pop("path") for run in found]
                for text in options.evaluation:
                    scores = evaluate(options, text, paths)
                    rows += [run | score for run, score in zip(found, scores, strict=True)]
                    print(json.dumps(rows[-len(found) :]), flush=True)
    versions = rows[-1].get("versions", {})
    setting = {
        "model": options.model.name,
        "calibration": f"{options.calibration.name}, {options.samples} rows of {options.length}",
        "evaluation": f"the first {options.windows} windows of 512 of each text",
        "seeds": options.seeds,
        "threads": options.threads,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **versions,
    }
    document = {"setting": setting, "command": sys.argv[1:], "runs": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(setting, rows))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, nargs="+", required=True)
    parser.add_argument("--peer", type=Path, help="python of an environment with llm-compressor")
    parser.add_argument("--autoround", type=Path, help="python of one with AutoRound")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--ours", nargs="+", default=tuple(OURS))
    parser.add_argument("--peers", nargs="+", default=tuple(PEERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=80)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def ours(
    options: argparse.Namespace, name: str, scheme: str, seed: int, scratch: Path
) -> dict[str, object]:
    """One run of ours."""
    out = scratch / f"ours-{seed}-{scheme}-{name}".replace(" ", "-").replace(":", "-")
    command = [
        "quantize", options.model, *OURS[name], "--scheme", scheme, "--calibration", options.calibration,
        "--samples", options.samples, "--length", options.length, "--seed", seed,
        "--threads", options.threads, "--json", "-o", out,
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = quantforge(*command)["seconds"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    run = {"tool": name, "scheme": scheme, "seed": seed, "seconds": seconds}
    return {**run, "processor": used, "path": out}


def peer(
    options: argparse.Namespace, name: str, scheme: str, seed: int, scratch: Path
) -> dict[str, object]:
    """One run of a peer."""
    where, script, told = PEERS[name]
    out = scratch / f"peer-{seed}-{scheme}-{told}".replace(":", "-")
    command = [
        getattr(options, where), Path(__file__).parent / "peers" / script,
        options.model, scratch / "rows.npy", out, told, scheme,
    ]  # fmt: skip
    done = subprocess.run(
        [str(item) for item in command],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
    )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    (made,) = {path.parent for path in out.rglob("config.json")}  # AutoRound adds a folder
    return {"tool": name, "scheme": scheme, "seed": seed, "path": made, **result}


def evaluate(
    options: argparse.Namespace, text: Path, paths: list[object]
) -> list[dict[str, object]]:
    """KL divergence and perplexity of each result on one text."""
    result = quantforge(
        "eval", options.model, *paths, "--text", text, "--windows", options.windows,
        "--no-speed", "--threads", options.threads, "--json",
    )  # fmt: skip
    keys = {
        "kl": "kl_mean",
        "kl_se": "kl_se",
        "perplexity": "perplexity",
        "bits": "bits_per_weight",
    }
    return [
        {"text": text.name} | {short: row[key] for short, key in keys.items()}
        for row in result["models"][1:]
    ]


def quantforge(*arguments: object) -> dict[str, object]:
    """Run the command line and return its JSON document."""
    command = [sys.executable, "-c", "from quantforge.cli.app import main; main()"]
    done = subprocess.run(
        [*command, *(str(item) for item in arguments)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def table(setting: dict[str, object], rows: list[dict[str, object]]) -> str:
    """One Markdown table: mean KL over the seeds (and its spread), ratio to the peer's GPTQ, median seconds."""
    lines = [f"- {key}: {value}" for key, value in setting.items()]
    lines += [
        "",
        "KL divergence to the source, nats per token, mean over the seeds (least to largest)",
        "",
    ]
    for scheme, text in dict.fromkeys((row["scheme"], row["text"]) for row in rows):
        mine = [row for row in rows if (row["scheme"], row["text"]) == (scheme, text)]
        base = [row["kl"] for row in mine if row["tool"] == "llm-compressor gptq"]
        lines += [
            f"## {scheme}, {text}",
            "",
            "| | KL | of llm-compressor's GPTQ | seconds |",
            "|---|---|---|---|",
        ]
        for tool in dict.fromkeys(row["tool"] for row in mine):
            found = [row["kl"] for row in mine if row["tool"] == tool]
            seconds = statistics.median(row["seconds"] for row in mine if row["tool"] == tool)
            ratio = f"{statistics.mean(found) / statistics.mean(base):.3f}" if base else "-"
            spread = f"{min(found):.5f} to {max(found):.5f}"
            lines.append(
                f"| {tool} | {statistics.mean(found):.5f} ({spread}) | {ratio} | {seconds:.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
