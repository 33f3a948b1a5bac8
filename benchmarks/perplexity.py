"""Perplexity: ours from final hidden states, chunk by chunk, beside plain transformers with all logits.

    python benchmarks/perplexity.py [--layers 4] [--vocabulary 128256] [--length 2048] [--rounds 3] [--out FILE.json]

A random llama with the widths of Llama 3.2 1B and some of its layers, in float32, the type in which
`eval` computes quality. In every round both sides score the same window, one after the other: plain
transformers by ``cross_entropy`` over ``model(ids).logits``, ours by `score_reference`, which also
keeps the hidden states that divergence needs. Speeds are medians over the rounds; extra memory is the
peak of the process above what it held before, of a window that is scored after all that. The two
means of the NLL are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels" / "bench")]

from decode_8b import random_model  # noqa: E402

from quantforge.evaluation.divergence import score_reference  # noqa: E402
from quantforge.evaluation.text_windows import Windows  # noqa: E402
from quantforge.numerics.allocator import return_freed_memory  # noqa: E402
from quantforge.runtime.memory import PeakMemory  # noqa: E402


def main() -> None:
    """Measure both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    return_freed_memory()  # as `eval` does
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": options.layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": options.vocabulary, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    model = random_model(config, None, "cpu").float()
    model.tie_weights()
    windows = Windows(torch.randint(options.vocabulary, (1, options.length)), None)
    sides: dict[str, Callable[[], float]] = {
        "transformers": lambda: plain(model, windows.ids),
        "ours": lambda: score_reference(model, windows).scores.mean_nll.mean,
    }
    values = {name: side() for name, side in sides.items()}
    rounds = [{name: seconds(side) for name, side in sides.items()} for _ in range(options.rounds)]
    found: dict[str, Any] = {
        "layers": options.layers, "vocabulary": options.vocabulary, "length": options.length,
        "threads": options.threads, "torch": torch.__version__,
        "load": [round(value, 1) for value in os.getloadavg()],
        "nll_difference": abs(values["ours"] - values["transformers"]),
    }  # fmt: skip
    for name, side in sides.items():
        with PeakMemory() as peak:
            side()
        clock, busy = (median(times[name][i] for times in rounds) for i in (0, 1))
        found[name] = {
            "tokens_per_second": round(options.length / clock, 1),
            "tokens_per_processor_second": round(options.length / busy, 1),
            "extra_bytes": peak.bytes,
        }
    ratios = [[r["transformers"][i] / r["ours"][i] for r in rounds] for i in (0, 1)]
    found["ours / transformers"] = {
        "clock": round(median(ratios[0]), 2),
        "processor": round(median(ratios[1]), 2),
        "extra_memory": round(found["ours"]["extra_bytes"] / found["transformers"]["extra_bytes"], 3),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def plain(model: Any, ids: torch.Tensor) -> float:
    """The mean NLL from all logits."""
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return loss.item()


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    clock, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - busy


if __name__ == "__main__":
    main()
