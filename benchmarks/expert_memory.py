"""Peak memory, and scratch on disk, of a calibrated run over mixtures of 8 and of 64 experts of the same sizes.

    python benchmarks/expert_memory.py --out PREFIX

Random mixtures of one layer's shape (qwen3_moe), with as many calibration tokens; hidden states and what reaches the
experts go to disk. Each run is a process of its own: its peak above the imports is the kernel's high-water mark of
resident memory; what is anonymous of it, no pages of libraries and files, is looked at every 20 ms. Scratch are the
unnamed files of hidden states, and whatever lies beside the result while it is made but for the weight files, which are
the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

WORDS = 512
RUN = r"""
import json, os, re, sys, threading
from pathlib import Path
from quantforge import api
from quantforge.model import hidden_states
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import quantforge.execution.execute, quantforge.execution.calibration
import quantforge.quantizers.gptq.gptq, quantforge.quantizers.gptq.column_loops, quantforge.formats.compressed_tensors
import numba, transformers.models.qwen3_moe.modeling_qwen3_moe

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

open_bytes = {}
begin, end = hidden_states.OnDisk.__init__, hidden_states.OnDisk.close

def opened(self, rows, length, hidden, directory):
    open_bytes[id(self)] = 4 * rows * length * hidden
    begin(self, rows, length, hidden, directory)

def closed(self):
    open_bytes.pop(id(self), None)
    end(self)

hidden_states.OnDisk.__init__, hidden_states.OnDisk.close = opened, closed
model, out, samples, length, threads = sys.argv[1:]
done, scratch, anonymous = threading.Event(), [0], [0]

def watch():
    while not done.wait(0.02):
        size = sum(open_bytes.copy().values())
        for path in Path(out).parent.glob(f".{Path(out).name}.qf/**/*"):
            try:
                size += path.stat().st_size * (path.is_file() and path.suffix != ".safetensors")
            except OSError:
                pass
        scratch[0] = max(scratch[0], size)
        anonymous[0] = max(anonymous[0], status("RssAnon"))

text = f"{model}/text.txt"
recipe = build_recipe(None, method="gptq", bits=4, calibration=text, samples=int(samples), length=int(length))
watcher = threading.Thread(target=watch, daemon=True)
Path("/proc/self/clear_refs").write_text("5")
before, own = status("VmRSS"), status("RssAnon")
spent = sum(os.times()[:2])
watcher.start()
api.quantize(model, recipe, Path(out), Settings(threads=int(threads), activations="disk"))
done.set()
peak = {"peak": status("VmHWM") - before, "anonymous": anonymous[0] - own}
print(json.dumps(peak | {"scratch": scratch[0], "processor": sum(os.times()[:2]) - spent}))
"""


def main() -> None:
    """Measure both, and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, nargs=2, default=[8, 64])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for experts in options.experts:
            model = written(Path(name) / str(experts), experts, options)
            size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
            words = (model, Path(name) / "out", options.samples, options.length, options.threads)
            command = [sys.executable, "-c", RUN, *map(str, words)]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(
                {"experts": experts, "bytes": size} | json.loads(found.stdout.splitlines()[-1])
            )
            print(json.dumps(rows[-1]), flush=True)
            subprocess.run(["rm", "-r", words[1]], check=True)
    few, many = rows
    lines = [
        "| experts | source | peak above the imports | of it anonymous | scratch on disk | seconds of the processor |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['experts']} | {row['bytes'] / 1e6:.0f} MB | {row['peak'] / 1e6:.0f} MB |"
            f" {row['anonymous'] / 1e6:.0f} MB | {row['scratch'] / 1e6:.2f} MB | {row['processor']:.1f} |"
            for row in rows
        ),
        "| ratio | "
        + " | ".join(
            f"{many[key] / few[key]:.2f}"
            for key in ("bytes", "peak", "anonymous", "scratch", "processor")
        )
        + " |",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def written(path: Path, experts: int, options: argparse.Namespace) -> Path:
    """Write a random mixture with a tokenizer of words, and a text of them."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=options.hidden, intermediate_size=options.inner, moe_intermediate_size=options.inner,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=options.hidden // 4,
        num_experts=experts, num_experts_per_tok=2, vocab_size=WORDS, tie_word_embeddings=True, norm_topk_prob=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    ids = torch.randint(0, WORDS, (options.samples * options.length * 2,)).tolist()
    (path / "text.txt").write_text("\n".join(f"w{i}" for i in ids))
    return path


if __name__ == "__main__":
    main()
