"""Decoding on a CPU, batch 1: packed 4-bit weights against bfloat16 in transformers and Q4_0 in llama.cpp.

    python benchmarks/cpu_decode.py [--layers 4] [--threads 1] [--steps 32] [--out FILE.json]

A random llama with the widths of Llama 3.2 1B (2048, 8192, 32 heads, 8 of keys and values), some of
its layers and a vocabulary of 32000, so that all sides fit beside each other. One process, in turn:
read bandwidth; transformers in bfloat16 with its own cache; ours in bfloat16 and int4 (g128) by the
own decoder; llama.cpp, if the wheel xllamacpp is there, on the Q4_0 file that `export` makes of the
same weights. The output layer is bfloat16 beside bfloat16, int8 beside our int4, and what llama.cpp's
file has beside its Q4_0 (Q6_K). Speed does not depend on what the weights mean.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels" / "bench")]

from decode_8b import random_model, read_bytes  # noqa: E402

from quantforge.evaluation.speed import read_bandwidth  # noqa: E402
from quantforge.runtime.decoder import Decoder  # noqa: E402
from quantforge.runtime.generate import Step, prefill  # noqa: E402
from quantforge.scheme import parse  # noqa: E402

PROMPT = 32
WARM_UPS = 3


def main() -> None:
    """Measure all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": options.layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    found: dict[str, Any] = {
        "layers": options.layers, "threads": options.threads, "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }  # fmt: skip
    rate = found["bandwidth"] = read_bandwidth()
    dense = random_model(config, None, "cpu")
    found["transformers bf16"] = entry(
        transformers_times(dense, options.steps), read_bytes(dense), rate
    )
    found["ours bf16"] = entry(own_times(dense, options.steps), read_bytes(dense), rate)
    packed = random_model(config, parse("int4:g128:sym:bf16"), "cpu", parse("int8:row:sym:bf16"))
    found["ours int4 g128"] = entry(own_times(packed, options.steps), read_bytes(packed), rate)
    del packed
    try:
        found["llama.cpp Q4_0"] = llama_cpp(dense, options)
    except ImportError as error:
        found["llama.cpp Q4_0"] = {"not measured": str(error)}
    base = found["transformers bf16"]["tokens_per_second"]
    for side in ("ours bf16", "ours int4 g128"):
        found[side]["over_transformers_bf16"] = round(found[side]["tokens_per_second"] / base, 2)
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def entry(times: list[float], nbytes: int, rate: float) -> dict[str, float]:
    """Median speed, and the bytes of weights that a token reads."""
    tpot = median(times)
    return {
        "tokens_per_second": round(1 / tpot, 2),
        "read_bytes": nbytes,
        "bytes_per_second": round(nbytes / tpot),
        "bandwidth_use": round(nbytes / tpot / rate, 3),
    }


@torch.inference_mode()
def transformers_times(model: Any, steps: int) -> list[float]:
    """Seconds per step of its forward."""
    output = model(torch.arange(PROMPT)[None], use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps + WARM_UPS):
        start = time.perf_counter()
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return times[WARM_UPS:]


@torch.inference_mode()
def own_times(model: Any, steps: int) -> list[float]:
    """Seconds per step of the own decoder."""
    decoder = Decoder(model)
    cache = decoder.cache(1, PROMPT + steps + WARM_UPS)
    token = prefill(decoder, torch.arange(PROMPT)[None], cache, steps + WARM_UPS).argmax(-1)
    step = Step(decoder, cache)
    times = []
    for _ in range(steps + WARM_UPS):
        start = time.perf_counter()
        token = step(token).argmax(-1)
        times.append(time.perf_counter() - start)
    return times[WARM_UPS:]


def llama_cpp(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Export the same weights, and let the engine generate."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as name:
        path = exported(model, Path(name))
        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx = 256
        settings.n_parallel = 1
        settings.cpuparams.n_threads = options.threads
        settings.warmup = True
        settings.verbosity = -1
        server = xllamacpp.Server(settings)
        request = {
            "prompt": "a " * PROMPT,
            "n_predict": options.steps,
            "ignore_eos": True,
            "temperature": 0,
        }
        server.handle_completions(request)
        answer = server.handle_completions(request)
        nbytes = path.stat().st_size
    if isinstance(answer, str):
        answer = json.loads(answer)
    speed = answer["timings"]["predicted_per_second"]
    return {"tokens_per_second": round(speed, 2), "file_bytes": nbytes}


def exported(model: Any, folder: Path) -> Path:
    """Save the model with a small tokenizer, and export it as Q4_0."""
    from quantforge.cli.app import app
    from tests.conftest import tiny_tokenizer

    source, target = folder / "model", folder / "model.gguf"
    model.save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    arguments = ["export", str(source), "--format", "gguf", "--type", "Q4_0", "-o", str(target)]
    app(arguments, standalone_mode=False)
    return target


if __name__ == "__main__":
    main()
