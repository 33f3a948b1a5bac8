"""Sequences that decode together on a CPU: the same Q4_0 file by our engine and by llama.cpp's server.

    python benchmarks/cpu_sequences.py [--layers 4] [--threads 2] [--rounds 3] [--sequences 1,4,16] [--limits none,avx2]
                                       [--out FILE.json]

The model is that of `cpu_decode`. In every round each side in turn answers so many requests at once, 8 tokens and 64
new ones each; printed are the medians of new tokens per second by the clock, from the first request to the last answer,
and the medians of the rounds' ratios. llama.cpp rounds activations to 8 bits in blocks of 32 columns; our side is
measured with 16 bits and with 8. A limit holds for our side alone: llama.cpp's wheel is built for AVX2 anyway.
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
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_decode import exported, llama_1b
from cpu_sweep import LIMITS

from quantforge.runtime.batching.engine import EngineOptions, ServingEngine
from quantforge.runtime.batching.generation_requests import GenerationRequest
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "bench"))

from decode_8b import random_model

PROMPT, NEW = 8, 64
# Answers so many requests at once; the seconds by the clock.
Side = Callable[[int], float]


def main() -> None:
    """Measure under every limit, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", default="1,4,16")
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
                    "--rounds", str(asked.rounds), "--sequences", asked.sequences]  # fmt: skip
            done = subprocess.run(
                line, env=os.environ | LIMITS[limit], check=True, stdout=subprocess.PIPE
            )
            found[limit] = json.loads(done.stdout)
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by number of sequences, the speed of each side, and the ratio of ours to llama.cpp's."""
    torch.set_num_threads(asked.threads)
    sides: dict[str, Side] = {f"ours, {bits} bits": own_side(asked.file, bits) for bits in (16, 8)}
    sides["llama.cpp"] = llama_cpp_side(asked.file, asked.threads)
    found = {}
    for count in map(int, asked.sequences.split(",")):
        for side in sides.values():
            side(count)
        rounds = [{name: side(count) for name, side in sides.items()} for _ in range(asked.rounds)]
        row = {name: round(count * NEW / median(r[name] for r in rounds), 1) for name in sides}
        for name in list(sides)[:-1]:
            row[f"{name} / llama.cpp"] = round(median(r["llama.cpp"] / r[name] for r in rounds), 2)
        found[str(count)] = row
    return found


def prompt_of(number: int) -> list[int]:
    """Return a prompt that begins like no other."""
    return [3 + number % 900, *range(3, PROMPT + 2)]


def own_side(path: Path, bits: int) -> Side:
    """The own engine, with activations of so many bits."""
    decoder = Decoder(load(path, "cpu", torch.bfloat16, input_bits=bits).model)

    def answer(count: int) -> float:
        engine = ServingEngine(decoder, EngineOptions(rows=count, tokens=256))
        began = time.perf_counter()
        for number in range(count):
            ids = tuple(prompt_of(number))
            engine.submit(GenerationRequest(str(number), ids, NEW))
        while not engine.idle:
            engine.step()
        return time.perf_counter() - began

    return answer


def llama_cpp_side(path: Path, threads: int) -> Side:
    """The engine, in a process of its own: beside its pool of threads torch's would not spin between products."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there, str(path), threads), daemon=True).start()

    def answer(count: int) -> float:
        here.send(count)
        seconds: float = here.recv()
        return seconds

    return answer


def serve(connection: Any, path: str, threads: int) -> None:
    """Answer as many requests at once as are asked for, and send the seconds until the last is answered."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_parallel = 16
    settings.n_ctx = 16 * 256
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.warmup = True
    settings.verbosity = -1
    server = xllamacpp.Server(settings)

    def one(number: int) -> None:
        answer = server.handle_completions(
            {"prompt": prompt_of(number), "n_predict": NEW, "ignore_eos": True, "temperature": 0,
             "cache_prompt": False}
        )  # fmt: skip
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        assert timings["predicted_n"] == NEW

    while True:
        try:
            count = connection.recv()
        except EOFError:  # the benchmark has ended
            return
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(one, range(count)))
        connection.send(time.perf_counter() - began)


if __name__ == "__main__":
    main()
