"""What one `quantforge verify` costs, in a fresh process: processor time and the highest memory.

Measured on the released model, and on models of random weights of two sizes: memory that grows with the model would
show between them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from scripts.defects.artifacts import DEMO, RELEASED, Shop, by_command, environment

HIDDEN, INTERMEDIATE, HEADS = 2048, 5632, 32
GIGABYTE = 10**9
RELEASED_ARTIFACT = f"{RELEASED}/rtn-int4-g64-absmax"


def costs(work: Path, gigabytes: float) -> Iterator[str]:
    """Measure; a table in Markdown, line by line."""
    (released,) = Shop(work).all(only=RELEASED_ARTIFACT)
    yield "| `verify --source`, one thread, of | exit code | processor time | highest memory |"
    yield "|---|---|---|---|"
    yield _row(released.name, released.path, released.source)
    for size in (gigabytes / 4, gigabytes) if gigabytes else ():
        source = work / "models" / f"random-{size:g}"
        artifact = work / "healthy" / source.name
        if not artifact.exists():
            shutil.rmtree(source, ignore_errors=True)
            random_model(source, size)
            by_command("{rtn} --scheme int4:g128:sym --scales absmax", source, artifact)
        yield _row(f"{size:g} GB of random weights", artifact, source)


def _row(title: str, artifact: Path, source: Path) -> str:
    code, seconds, memory = measured("verify", str(artifact), "--source", str(source))
    return f"| {title} | {code} | {seconds:.0f} s | {memory / 1e6:.0f} MB |"


def measured(*words: str) -> tuple[int, float, int]:
    """Run the command line in a process of its own: exit code, seconds of processor time, most bytes of memory."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        # One thread, however `verify` is told.
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        os.execve(sys.executable, [sys.executable, "-m", "quantforge", *words], environment() | one)
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def random_model(place: Path, gigabytes: float) -> None:
    """Write a llama model of random bfloat16 weights in shards of a few blocks, without ever holding it whole."""
    from safetensors.torch import save_file

    place.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, place)
    demo = json.loads((DEMO / "config.json").read_bytes())
    square, wide = (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN)
    shapes = {f"self_attn.{name}_proj": square for name in "qkvo"} | {
        "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1],
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    block = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    blocks = max(1, round(gigabytes * GIGABYTE / block))
    config = demo | {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": blocks,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    names = {
        "model.embed_tokens.weight": (demo["vocab_size"], HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    parts = [names]
    parts += [{f"model.layers.{n}.{k}.weight": s for k, s in shapes.items()} for n in range(blocks)]
    index = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        tensors = {name: _random(shape, generator) for name, shape in part.items()}
        save_file(tensors, place / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    document = {"metadata": {"total_size": block * blocks}, "weight_map": index}
    (place / "model.safetensors.index.json").write_text(json.dumps(document))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5 * 0.5
    return weight.to(torch.bfloat16)
