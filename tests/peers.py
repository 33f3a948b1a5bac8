"""Sources of the artifacts in ``fixtures/peers``: tiny random models, the same bytes wherever they are made.

``python -m tests.peers DIRECTORY`` writes them for ``scripts/interop``. Their vocabulary is printable ASCII, and they
have one block: an artifact is then a few tens of kilobytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent / "fixtures" / "peers"
_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
# `wide` has rows of 256 weights, which ggml's K-quants ask for, and rows of 32, which they cannot hold;
# `square` has whole tiles of 128 by 128.
SOURCES: dict[str, dict[str, Any]] = {
    "narrow": _SIZES,
    "wide": {**_SIZES, "hidden_size": 256, "intermediate_size": 32, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16},
    "square": {**_SIZES, "hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
}  # fmt: skip


def tokenizer() -> Any:
    """Return a byte-level tokenizer of printable ASCII and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Newline and space as the byte level spells them.
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    merges = [("t", "h"), ("Ġ", "th")]  # some engines ask for one
    tokens = ["<s>", "</s>", *letters, *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return fast


def make(name: str, directory: Path) -> Path:
    """Write one source, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = tokenizer()
    config = LlamaConfig(**SOURCES[name], vocab_size=len(tokens), bos_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = parameter.dim() == 1
        parameter.data.copy_(1 + 0.2 * noise if norm else noise / parameter.shape[-1] ** 0.5)
        if key.endswith(("o_proj.weight", "gate_proj.weight")):  # outliers, as trained models have
            parameter.data[:, 3] *= 6
    model.bfloat16().save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory


def digest(weight: torch.Tensor) -> str:
    """Return the SHA-256 of a decoded weight ``[out, in]`` as little-endian float32, without signs of zeros."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    for source in SOURCES:
        made = make(source, Path(sys.argv[1]) / source)
        state = hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()
        print(json.dumps({"source": source, "sha256": state}))
