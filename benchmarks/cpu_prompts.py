"""Prompts on a CPU: the same Q4_0 file by our decoder and by llama.cpp, with the processor as it is and limited.

    python benchmarks/cpu_prompts.py [--layers 4] [--threads 1] [--rounds 5] [--limits none,avx2] [--out FILE.json]

The model is that of `cpu_decode`. In every round each side in turn computes a prompt of each length; printed are the
medians of tokens per second by the clock (llama.cpp's own) and by the processor's time, and the medians of the rounds'
ratios. Our side rounds activations to 16 bits and to 8, as llama.cpp does. A limit holds for our side alone, in a
process of its own: llama.cpp's wheel is built for AVX2 anyway.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_decode import exported, llama_1b
from cpu_sweep import LIMITS

from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import prefill
from quantforge.runtime.load import load

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "bench"))

from decode_8b import random_model

LENGTHS = (64, 128, 512)
# Computes a prompt of so many tokens; the seconds of one token, by the clock and of the processor.
Side = Callable[[int], tuple[float, float]]


def main() -> None:
    """Measure under every limit, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limits", default="none,avx2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.file:
        print(json.dumps(measured(asked)))
        return
    found: dict[str, Any] = {
        "layers": asked.layers, "threads": asked.threads, "torch": torch.__version__,
        "xllamacpp": version("xllamacpp"), "load": [round(load, 1) for load in os.getloadavg()],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        path = exported(random_model(llama_1b(asked.layers), None, "cpu"), Path(folder))
        for limit in asked.limits.split(","):
            line = [sys.executable, __file__, "--file", str(path), "--threads", str(asked.threads),
                    "--rounds", str(asked.rounds)]  # fmt: skip
            done = subprocess.run(
                line, env=os.environ | LIMITS[limit], check=True, stdout=subprocess.PIPE
            )
            found[limit] = json.loads(done.stdout)
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by length, the speeds of both sides and their ratio."""
    torch.set_num_threads(asked.threads)
    sides: dict[str, Side] = {
        "ours": own_side(asked.file, 16),
        "ours, 8 bits": own_side(asked.file, 8),
        "llama.cpp": llama_cpp_side(asked.file, asked.threads),
    }
    found = {}
    for length in LENGTHS:
        for side in sides.values():
            side(length)
        rounds = [{name: side(length) for name, side in sides.items()} for _ in range(asked.rounds)]
        row: dict[str, float] = {}
        for kind, name in enumerate(("clock", "processor")):
            for side_name in sides:
                row[f"{side_name}, {name}"] = round(
                    1 / median(r[side_name][kind] for r in rounds), 1
                )
            for own in list(sides)[:-1]:
                ratios = [r["llama.cpp"][kind] / r[own][kind] for r in rounds]
                row[f"{own} / llama.cpp, {name}"] = round(median(ratios), 3)
        found[str(length)] = row
    return found


def own_side(path: Path, bits: int) -> Side:
    """The own decoder, with activations of so many bits and a cache that it makes anew."""
    decoder = Decoder(load(path, "cpu", torch.bfloat16, input_bits=bits).model)

    @torch.inference_mode()
    def compute(length: int) -> tuple[float, float]:
        tokens, cache = torch.arange(length)[None] % 900 + 3, decoder.cache(1, length + 8)
        clock, busy = time.perf_counter(), time.process_time()
        prefill(decoder, tokens, cache, 8)
        return (time.perf_counter() - clock) / length, (time.process_time() - busy) / length

    return compute


def llama_cpp_side(path: Path, threads: int) -> Side:
    """The engine, in a process of its own: beside its pool of threads torch's would not spin between products."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there, str(path), threads), daemon=True).start()

    def compute(length: int) -> tuple[float, float]:
        here.send(length)
        seconds: tuple[float, float] = here.recv()
        return seconds

    return compute


def serve(connection: Any, path: str, threads: int) -> None:
    """Compute prompts of as many tokens as are asked for, of which it has kept nothing."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = 1024
    settings.n_parallel = 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.warmup = True
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    first = 3
    while True:
        try:
            length = connection.recv()
        except EOFError:  # the benchmark has ended
            return
        first += 1  # another beginning: nothing of the prompt before can be used
        tokens = [first, *(number % 900 + 3 for number in range(1, length))]
        busy = time.process_time()
        answer = server.handle_completions(
            {"prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": False}
        )
        busy = time.process_time() - busy
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        assert timings["prompt_n"] == length
        connection.send((float(timings["prompt_ms"]) / 1000 / length, busy / length))


if __name__ == "__main__":
    main()
