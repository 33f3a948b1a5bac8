"""Tiny models with random weights, saved by transformers itself, and a tokenizer trained on a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MIXTURE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR_ATTENTION = {
    **SIZES,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
# name: model type, configuration, stored type
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", SIZES, "bfloat16"),
    "tied": ("llama", {**SIZES, "tie_word_embeddings": True}, "float16"),
    "wide": (  # of whole superblocks of ggml
        "llama",
        {**SIZES, "hidden_size": 256, "num_hidden_layers": 1},
        "bfloat16",
    ),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 128},
        "float32",
    ),
    "mixture": ("qwen3_moe", MIXTURE, "bfloat16"),
    "hybrid": ("qwen3_next", LINEAR_ATTENTION, "bfloat16"),
    "tower": (
        "gemma3",
        {
            "text_config": {
                **SIZES,
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 16,
            },
            "vision_config": TOWER,
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
        },
        "bfloat16",
    ),
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEXT = ["the weights of the model are rounded to the nearest point of the grid"] * 4


def tokenizer() -> Any:
    """Train a byte-level BPE tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*TEXT, "def f(x): return x"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def fill(model: torch.nn.Module) -> None:
    """Fill parameters with random numbers of the size that trained models have."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            gain = float("norm" in name or ".ln_" in name) * float(bool(parameter.flatten()[0]))
            parameter.data.copy_(gain + 0.1 * noise)
        else:
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)


def save(name: str, directory: Path, **changes: Any) -> Path:
    """Make a model of `MODELS` in a directory; ``changes`` are of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, values, dtype = MODELS[name]
    auto = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    model = auto.from_config(
        AutoConfig.for_model(model_type, **{**values, **changes}), dtype=torch.float32
    )
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
