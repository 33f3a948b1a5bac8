"""Streaming uses as much memory as predicted: one block, its Hessians, hidden states and a micro-batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.thorough import mark_others_thorough

# Small blocks, work buffers of products (they differ between processors): half of `memory.OVERHEAD`.
HEAP = 24 << 20
LEAST = 0.45  # of what is predicted: on a busy machine the two rows of a micro-batch pass a block one after the other
FAMILIES = {
    "llama": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 2048},
    "gemma2": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
               "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048},
    "gpt2": {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 512, "vocab_size": 2048},
}  # fmt: skip

# Runs in its own process: the allocator is set for the whole of it, and peaks are of the process. It returns here all
# that is freed, because the prediction is of what is alive (`memory.OVERHEAD` counts what a run's heap keeps beside).
STREAM = """
import json, sys
from pathlib import Path
import torch
from quantforge.numerics import allocator
allocator.MMAP_THRESHOLD, allocator.TRIM_THRESHOLD = 1 << 20, 1 << 17
assert allocator.return_freed_memory()
from quantforge.planning import peak_memory as memory
from quantforge.architectures.match import match_tensors
from quantforge.plans import Action, StoredTensor, TensorPlan
from quantforge.numerics.threads import reproducible
from quantforge.model.statistics import Statistic
from quantforge.recipe import CalibrationOptions
from quantforge.model.skeleton import build_skeleton
from quantforge.model.stream import ModelStream

torch.set_num_threads(2)  # the rows of a micro-batch pass side by side

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

class Source:
    def __init__(self, config):
        self.config = config
        parameters = build_skeleton(config).named_parameters()
        self.shapes = {name: parameter.shape for name, parameter in parameters}
    def read(self, name):
        return torch.full(self.shapes[name], 0.01, dtype=torch.bfloat16)
    def read_rows(self, name, first, last):
        return torch.randn(last - first, self.shapes[name][1]).bfloat16()

samples = int(sys.argv[2])
directory = Path(sys.argv[3]) if len(sys.argv) > 3 else None
needs = frozenset({Statistic.HESSIAN})
for family, config in json.loads(sys.argv[1]).items():
    source = Source({"model_type": family, **config})
    stored = [StoredTensor(name, "BF16", tuple(shape)) for name, shape in source.shapes.items()]
    matched = match_tensors(source.config, stored)
    plans = [
        TensorPlan(t.header.name, "BF16", t.header.shape, Action.QUANTIZE, "", block=t.block, shared=t.shared_input,
                   transposed=t.transposed)
        for t in matched.tensors if t.role == "linear"
    ]
    calibration = CalibrationOptions(samples=samples, length=512, micro_batch=2)
    sizes = memory.RunSizes(calibration, ("rtn",), 0, needs, directory is None, 1)
    predicted = memory.peak_bytes(matched, tuple(plans), sizes)
    rows = torch.randint(0, 2048, (samples, 512))
    before = status("VmRSS")
    peaks = []
    with (
        torch.inference_mode(),
        reproducible(),
        ModelStream(source, matched, rows, micro_batch=2, activations=directory) as stream,
    ):
        for part in stream:
            Path("/proc/self/clear_refs").write_text("5")
            observed = part.observe({shared.key: needs for shared in part.inputs})
            part.advance()
            peaks.append(status("VmHWM") - before)
            del observed
    print(json.dumps([family, predicted - memory.OVERHEAD, peaks]))
"""


def run(
    families: dict[str, object], samples: int, *directory: str
) -> dict[str, tuple[int, list[int]]]:
    command = [sys.executable, "-c", STREAM, json.dumps(families), str(samples), *directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {family: (predicted, peaks) for family, predicted, peaks in results}


@pytest.fixture(scope="module")
def measured() -> Callable[[str], tuple[int, list[int]]]:
    return cache(lambda family: run({family: FAMILIES[family]}, 4)[family])


@pytest.mark.parametrize("family", mark_others_thorough(FAMILIES, "gemma2"))
def test_peak_memory_matches_the_prediction(
    measured: Callable[[str], tuple[int, list[int]]], family: str
) -> None:
    predicted, peaks = measured(family)
    assert LEAST * predicted < max(peaks) < 1.15 * predicted + HEAP


@pytest.mark.parametrize("family", mark_others_thorough(FAMILIES, "gemma2"))
def test_peak_memory_does_not_grow_from_block_to_block(
    measured: Callable[[str], tuple[int, list[int]]], family: str
) -> None:
    _, peaks = measured(family)
    assert max(peaks) < 1.05 * peaks[0] + HEAP / 2


@pytest.mark.thorough
def test_hidden_states_on_disk_reduce_peak_memory(tmp_path: Path) -> None:
    # A narrow block: what counts here are its hidden states.
    narrow = {"intermediate_size": 512, "num_hidden_layers": 1}
    llama, samples = {"llama": FAMILIES["llama"] | narrow}, 32
    states = samples * 512 * 512 * 4
    _, in_memory = run(llama, samples)["llama"]
    predicted, peaks = run(llama, samples, str(tmp_path))["llama"]
    assert LEAST * predicted < max(peaks) < 1.15 * predicted + HEAP
    assert max(peaks) < max(in_memory) - states / 2
