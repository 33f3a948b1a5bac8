"""Decoding on a CPU, batch 1: packed 4-bit weights against bfloat16 in transformers and Q4_0 in llama.cpp.

    python benchmarks/cpu_decode.py [--layers 16] [--experts N] [--threads 1] [--rounds 5] [--steps 12]
                                    [--out FILE.json]

A random llama with the widths of Llama 3.2 1B (2048, 8192, 32 heads, 8 of keys and values) and a
vocabulary of 32000; with ``--experts`` a random mixtral with as many experts of width 2048, of which a
token is sent to two. One run, one model on every side at once; in every round each side in turn
decodes some tokens, so that what else the machine does falls on all of them:

- transformers in bfloat16 with its own cache;
- ours in bfloat16, and in int4 (g128, output layer int8 per row), by the own decoder;
- llama.cpp, if the wheel xllamacpp is there, on the Q4_0 file that `export` makes of the same
  weights (its output layer is Q6_K), and ours on the very same file.

A side's speed is the median over rounds of tokens per second, by the clock (llama.cpp's own, which
leaves its server out) and by the processor time; ratios are medians of the rounds'
ratios. Speed does not depend on what weights mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels" / "bench")]

from decode_8b import random_model  # noqa: E402

from quantforge.evaluation.speed import read_bandwidth  # noqa: E402
from quantforge.notation import parse  # noqa: E402
from quantforge.runtime.decoder import Decoder  # noqa: E402
from quantforge.runtime.decoding import DecodingStep, prefill  # noqa: E402
from quantforge.runtime.load import load  # noqa: E402
from quantforge.runtime.model_sizes import bytes_per_token  # noqa: E402

PROMPT = 32
WARM_UPS = 2
# Decodes so many tokens; the seconds of each, by the clock and of the processor, if it knows better.
Side = Callable[[int], tuple[float, float] | None]
PAIRS = (
    ("ours bf16", "transformers bf16"), ("ours int4 g128, head int8", "transformers bf16"),
    ("ours int4 g128, head int8", "llama.cpp Q4_0"), ("ours, the Q4_0 file", "llama.cpp Q4_0"),
)  # fmt: skip


def llama_1b(layers: int) -> dict[str, Any]:
    """The widths of Llama 3.2 1B, a vocabulary of 32000."""
    return {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip


def mixtral(layers: int, experts: int) -> dict[str, Any]:
    """A mixture with the attention of `llama_1b`, and experts a quarter as wide as its MLP."""
    return llama_1b(layers) | {
        "model_type": "mixtral", "intermediate_size": 2048, "num_local_experts": experts,
        "num_experts_per_tok": 2, "sliding_window": None, "architectures": ["MixtralForCausalLM"],
    }  # fmt: skip


def main() -> None:
    """Measure all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = (
        mixtral(options.layers, options.experts) if options.experts else llama_1b(options.layers)
    )
    with tempfile.TemporaryDirectory() as folder:
        sides, read = all_sides(config, options, Path(folder))
        rounds = measured(sides, options)
    rate = read_bandwidth()
    found: dict[str, Any] = {
        "layers": options.layers, "experts": options.experts, "threads": options.threads, "torch": torch.__version__,
        "load": [round(value, 1) for value in os.getloadavg()], "bandwidth": round(rate),
        "sides": {name: entry([r[name] for r in rounds], read.get(name), rate) for name in sides},
        "ratios": {f"{a} / {b}": ratio(rounds, a, b) for a, b in PAIRS if {a, b} <= sides.keys()},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def all_sides(
    config: dict[str, Any], options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Side], dict[str, int]]:
    """Make every side, and say how many bytes of weights a token of it reads."""
    dense = random_model(config, None, "cpu")
    path = exported(dense, folder)
    loaded = load(path, "cpu", torch.bfloat16)
    packed = random_model(config, parse("int4:g128:sym:bf16"), "cpu", parse("int8:row:sym:bf16"))
    tokens = (options.steps + WARM_UPS) * (options.rounds + 1)
    # The own decoder lays matrices of one input together, which transformers then sees as views.
    sides = {
        "transformers bf16": transformers_side(dense),
        "ours bf16": own_side(dense, tokens),
        "ours int4 g128, head int8": own_side(packed, tokens),
        "ours, the Q4_0 file": own_side(loaded.model, tokens),
    }
    read = dict(zip(sides, (bytes_per_token(dense), bytes_per_token(dense), bytes_per_token(packed),
                            loaded.read_bytes), strict=True))  # fmt: skip
    try:
        sides["llama.cpp Q4_0"] = llama_cpp_side(path, options)
        read["llama.cpp Q4_0"] = loaded.read_bytes
    except ImportError:
        pass
    return sides, read


def measured(sides: dict[str, Side], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds per token, by the clock and of the processor, of every side in every round."""
    rounds = []
    for side in sides.values():
        side(WARM_UPS)
    for _ in range(options.rounds):
        found = {}
        for name, side in sides.items():
            side(WARM_UPS)
            clock, busy = time.perf_counter(), time.process_time()
            own = side(options.steps)
            found[name] = own or (
                (time.perf_counter() - clock) / options.steps,
                (time.process_time() - busy) / options.steps,
            )
        rounds.append(found)
    return rounds


def entry(times: list[tuple[float, float]], nbytes: int | None, rate: float) -> dict[str, float]:
    """Median speeds, and the bytes of weights that a token reads."""
    clock, busy = (median(values) for values in zip(*times, strict=True))
    assert nbytes is not None
    return {
        "tokens_per_second": round(1 / clock, 2),
        "tokens_per_processor_second": round(1 / busy, 2),
        "read_bytes": nbytes,
        "bytes_per_second": round(nbytes / clock),
        "bandwidth_use": round(nbytes / clock / rate, 3),
    }


def ratio(rounds: list[dict[str, Any]], ours: str, peer: str) -> dict[str, float]:
    """How many times as fast, the median over the rounds."""
    clock, busy = (median(r[peer][i] / r[ours][i] for r in rounds) for i in (0, 1))
    return {"clock": round(clock, 2), "processor": round(busy, 2)}


def transformers_side(model: Any) -> Side:
    """Its forward and cache."""
    output = model(torch.arange(PROMPT)[None], use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode(steps: int) -> None:
        nonlocal output
        for _ in range(steps):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)

    return decode


def own_side(model: Any, tokens: int) -> Side:
    """The own decoder."""
    decoder = Decoder(model)
    cache = decoder.cache(1, PROMPT + tokens)
    with torch.inference_mode():
        token = prefill(decoder, torch.arange(PROMPT)[None], cache, tokens).argmax(-1)
    step = DecodingStep(decoder, cache)

    @torch.inference_mode()
    def decode(steps: int) -> None:
        nonlocal token
        for _ in range(steps):
            token = step(token).argmax(-1)

    return decode


def llama_cpp_side(path: Path, options: argparse.Namespace) -> Side:
    """The engine, in a process of its own: beside its pool of threads torch's would not spin between products."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ImportError("xllamacpp")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (there, str(path), options.threads)
    context.Process(target=serve_llama_cpp, args=arguments, daemon=True).start()

    def decode(steps: int) -> tuple[float, float]:
        here.send(steps)
        seconds: tuple[float, float] = here.recv()
        return seconds

    return decode


def serve_llama_cpp(connection: Any, path: str, threads: int) -> None:
    """Decode as many tokens as are asked for; it keeps the prompt, and computes no more of it than its last token.

    Answers with the seconds per token by its own clock, and of the processor.
    """
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = 512
    settings.n_parallel = 1
    settings.cpuparams.n_threads = threads
    settings.warmup = True
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    while True:
        try:
            steps, busy = connection.recv(), time.process_time()
        except EOFError:  # the benchmark has ended
            return
        answer = server.handle_completions(
            {"prompt": "a " * PROMPT, "n_predict": steps, "ignore_eos": True, "temperature": 0}
        )
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        clock = float(timings["predicted_per_token_ms"]) / 1000
        connection.send((clock, (time.process_time() - busy) / steps))


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
