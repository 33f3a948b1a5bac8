"""Checkpoints that are all header: real sizes, no data on the disk. Enough to plan with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge.files.writer import Shards, header_bytes
from quantforge.plans import StoredTensor

LLAMA = {
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def write(directory: Path, config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> Path:
    """Write a model directory whose weights are a hole in a file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    header = header_bytes(tensors)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
    return directory


def llama_tensors(
    config: Mapping[str, Any], *, head: bool = True, prefix: str = ""
) -> list[StoredTensor]:
    """Headers of a llama of the sizes of ``config``."""
    hidden, ffn, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
    }
    if head:
        shapes["lm_head"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", ffn, hidden), ("mlp.up_proj", ffn, hidden), ("mlp.down_proj", hidden, ffn),
        ):  # fmt: skip
            shapes[f"{block}.{name}"] = (rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{norm}"] = (hidden,)
    return [StoredTensor(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def llama(directory: Path, **changes: Any) -> Path:
    """Write a llama that is all header; a tied one stores no head."""
    config = {**LLAMA, **changes}
    return write(directory, config, llama_tensors(config, head=not config["tie_word_embeddings"]))


def file_bytes(shards: Shards) -> int:
    """Return the exact size of all weight files together."""
    return sum(
        len(header_bytes(shard)) + sum(tensor.nbytes for tensor in shard) for shard in shards
    )
