"""Seconds of GPTQ on a synthetic checkpoint, ours and llm-compressor's, in turn.

    python benchmarks/speed.py --width 4096 --blocks 2 --tokens 16384 --peer PYTHON --out PREFIX

The checkpoint is a random llama with rows of random tokens: speed does not depend on what the weights mean. Whole runs
are timed, imports excluded; ours draws and encodes the text as well, which the peer is given as token ids. Of the peer
its ``oneshot`` alone is stated too, without loading and saving.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 512
PEER = "llm-compressor"
ALONE = "llm-compressor, oneshot alone"
# The peer neither tunes nor sweeps.
WAYS = {
    "as by default": {},
    "--tune 0": {"tune": 0},
    "--tune 0 --refine 0": {"tune": 0, "refine": 0},
}
RUN = """
import json, sys, time
from pathlib import Path
from quantforge import api
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import quantforge.execution.execute, quantforge.execution.calibration
import numba, quantforge.quantizers.gptq.gptq, quantforge.formats.compressed_tensors
import transformers.models.llama.modeling_llama
model, text, out, rows, length, threads, way = sys.argv[1:]
recipe = build_recipe(
    None, method="gptq", bits=4, calibration=text, samples=int(rows), length=int(length), **json.loads(way)
)
start = time.monotonic()
api.quantize(model, recipe, Path(out), Settings(threads=int(threads)))
print(time.monotonic() - start)
"""


def main() -> None:
    """Build, run both sides in turn, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=None)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, help="a real model instead of a synthetic one")
    parser.add_argument("--calibration", type=Path, help="its calibration text")
    parser.add_argument("--ours", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = options.model or synthetic(scratch / "model", options)
        text = options.calibration or (scratch / "model" / "text.txt")
        rows = options.tokens // LENGTH
        save_rows(model, text, rows, scratch / "rows.npy")
        times: dict[str, list[float]] = {f"ours, {way}": [] for way in options.ours}
        times |= {PEER: [], ALONE: []}
        for _ in range(options.repeats):
            for way in options.ours:
                asked = json.dumps(WAYS[way])
                arguments = (model, text, scratch / "ours", rows, LENGTH, options.threads, asked)
                times[f"ours, {way}"].append(ours(arguments))
            found = peer(options, model, scratch)
            times[PEER].append(found["whole"])
            times[ALONE].append(found["seconds"])
            print(times, flush=True)
    write(options, times)


def synthetic(path: Path, options: argparse.Namespace) -> Path:
    """A random llama with a word-level tokenizer and a text that gives random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.ffn or options.width * 11 // 4 // 256 * 256,
        num_hidden_layers=options.blocks,
        num_attention_heads=options.width // 128,
        num_key_value_heads=max(1, options.width // 512),
        vocab_size=1024,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1024)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    ids = torch.randint(0, 1024, (options.tokens + LENGTH,)).tolist()
    (path / "text.txt").write_text("\n".join(f"w{i}" for i in ids))
    return path


def save_rows(model: Path, text: Path, rows: int, out: Path) -> None:
    """The rows that our run will draw, for the peer."""
    from quantforge_calibration.draw import RowRequest, draw
    from quantforge_calibration.tokenizer import load_tokenizer

    sample = draw(RowRequest(str(text), rows, LENGTH, 0), load_tokenizer(model))
    np.save(out, sample.ids.numpy())


def ours(arguments: tuple[object, ...]) -> float:
    """Seconds of one run of ours, reading and writing included."""
    out = Path(str(arguments[2]))
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def peer(options: argparse.Namespace, model: Path, scratch: Path) -> dict[str, float]:
    """Seconds of one run of the peer: ``whole``, and ``seconds`` of it in ``oneshot``."""
    script = Path(__file__).parent / "peers" / "llm_compressor.py"
    out = scratch / "peer"
    command = [options.peer, script, model, scratch / "rows.npy", out, "gptq", "int4:g128:sym"]
    done = subprocess.run(
        [str(item) for item in command],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def write(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """PREFIX.json and PREFIX.md."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    what = (
        options.model.name if options.model else f"{options.blocks} blocks of width {options.width}"
    )
    lines = [
        f"GPTQ int4:g128:sym, {what}, {options.tokens} tokens, {options.threads} threads,"
        f" {platform.processor() or platform.machine()}; seconds, imports excluded",
        "",
        f"| | median | runs | {PEER} / this | its oneshot / this |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {medians[name]:.1f} | {', '.join(f'{value:.1f}' for value in values)}"
            f" | {medians[PEER] / medians[name]:.2f} | {medians[ALONE] / medians[name]:.2f} |"
            for name, values in times.items()
        ),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    document = {"command": sys.argv[1:], "seconds": times}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
