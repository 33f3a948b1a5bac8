"""Tiny models of the families that GGUF carries, each with everything that its graph in llama.cpp has a place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.conftest import (
    GEMMA4,
    GEMMA4_MOE,
    GEMMA4_SHARED,
    K_EQ_V,
    SIZES,
    randomize,
    tiny_tokenizer,
)

_SLIDING = ["sliding_attention"] * 5 + ["full_attention"]
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.5] * 8,
    "short_factor": [1.0] * 8,
}
_ROUTED = {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1,
           "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}  # fmt: skip
_LATENT = {**_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 24}  # fmt: skip
_OTHER_HEADS = {"head_dim": 32, "num_key_value_heads": 1}  # heads of full layers
# Name: (model_type, configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True, "head_dim": 32}),
    "llama-linear": ("llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": ("llama", {**SIZES, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}}),
    "mistral": ("mistral", {**SIZES, "sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 32}),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {**SIZES, "num_hidden_layers": 6, "head_dim": 32, "sliding_window": 16,
                               "query_pre_attn_scalar": 32, "layer_types": _SLIDING}),
    "phi3": ("phi3", {**SIZES, "sliding_window": None}),
    "phi3-long": ("phi3", {**SIZES, "sliding_window": None, "rope_parameters": _LONG,
                           "max_position_embeddings": 1024, "original_max_position_embeddings": 512}),
    "smollm3": ("smollm3", {**SIZES, "num_hidden_layers": 4}),
    "olmo2": ("olmo2", SIZES),
    "glm": ("glm", {**SIZES, "head_dim": 16}),
    "glm4": ("glm4", {**SIZES, "head_dim": 32}),
    "granite": ("granite", {**SIZES, "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0,
                            "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5}),
    "seed_oss": ("seed_oss", {**SIZES, "head_dim": 32}),
    "ernie4_5": ("ernie4_5", {**SIZES, "head_dim": 32}),
    "hunyuan": ("hunyuan_v1_dense", {**SIZES, "head_dim": 32}),
    "hunyuan-alpha": ("hunyuan_v1_dense", {**SIZES, "head_dim": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}}),
    "starcoder2": ("starcoder2", SIZES),
    "stablelm": ("stablelm", {**SIZES, "use_qkv_bias": True}),
    "phi": ("phi", {**SIZES, "num_key_value_heads": 4}),
    "nemotron": ("nemotron", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "gemma": ("gemma", {**SIZES, "head_dim": 32}),
    "arcee": ("arcee", SIZES),
    "cohere": ("cohere", {**SIZES, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**SIZES, "num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.5}),
    "exaone4": ("exaone4", {**SIZES, "sliding_window": None,
                            "layer_types": ["full_attention"] * 3}),
    "gpt2": ("gpt2", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
                      "bos_token_id": 0, "eos_token_id": 1}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma4": ("gemma4_text", {**GEMMA4, **GEMMA4_SHARED}),
    "gemma4-equal": ("gemma4_text", {**GEMMA4, **K_EQ_V, "num_hidden_layers": 2, "layer_types": _SLIDING[-2:]}),
    "gemma4-moe": ("gemma4_text", {**GEMMA4, **K_EQ_V, **GEMMA4_MOE}),
    "gemma4-other": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None,
                                     "per_layer_config": {1: _OTHER_HEADS, 3: _OTHER_HEADS}, "rope_parameters": {
                                         "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                                         "full_attention": {"rope_type": "default", "rope_theta": 3e5}}}),
    "llama4": ("llama4_text", {**SIZES, "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4,
                               "intermediate_size": 64, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
                               "rope_parameters": _LLAMA3}),
    "llama4-several": ("llama4_text", {**SIZES, "num_hidden_layers": 5, "head_dim": 32, "num_local_experts": 128,
                                       "num_experts_per_tok": 2, "intermediate_size": 32, "use_qk_norm": False}),
}  # fmt: skip
# Written, and read by llama.cpp alone.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                "shared_expert_intermediate_size": 96}),
    "olmoe": ("olmoe", {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
                                  "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "ernie4_5_moe": ("ernie4_5_moe", {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2,
                                      "moe_intermediate_size": 32, "moe_layer_start_index": 1}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**SIZES, "head_dim": 32, "num_experts": 4, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "dots1": ("dots1", {**_ROUTED, "num_key_value_heads": 4, "head_dim": 32}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, "n_group": 1, "topk_group": 1}),
    "lfm2": ("lfm2", {**SIZES, "num_hidden_layers": 4, "conv_bias": False, "block_multiple_of": 32,
                      "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": ("lfm2_moe", {**SIZES, "num_hidden_layers": 4, "conv_bias": False, "num_experts": 4,
                              "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
                              "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "qwen3_next": ("qwen3_next", {**SIZES, "num_hidden_layers": 4, "head_dim": 32, "num_experts": 4,
                                  "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                  "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
                                  "linear_key_head_dim": 32, "linear_num_value_heads": 4,
                                  "linear_value_head_dim": 32, "full_attention_interval": 2}),
    "ministral3": ("ministral3", {**SIZES, "head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}),
    "ministral3-plain": ("ministral3", {**SIZES, "head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.0}}),
    "gpt_oss": ("gpt_oss", {**SIZES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}  # fmt: skip


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model with some values changed."""
    from transformers import AutoConfig

    model_type, values = {**FAMILIES, **WRITTEN}[name]
    made = AutoConfig.for_model(model_type, **{**values, **changes})
    found: dict[str, Any] = json.loads(made.to_json_string())
    return found


def make(name: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Build, fill and save one model with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = {**FAMILIES, **WRITTEN}[name]
    config = AutoConfig.for_model(model_type, **{**values, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.to(dtype).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    """Logits of the last token, from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


_CORPUS = [
    "the weights of the model are rounded to the nearest point of the grid, row by row",
    "Hello world, it's 1234 and 5678; don't we see the end of the text? I've 2024 reasons",
    "日本語 русский हिन्दी العربية  two  spaces\n\nnewlines\t1 + 1 = 2; def f(x): return x",
]


def byte_level_tokenizer(kind: str) -> Any:
    """A tokenizer whose pre-tokenizer is the one that llama.cpp calls ``kind``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from quantforge.formats.gguf.vocabulary import BYTE_LEVEL_STEP, DIGITS_STEP, pre_tokenizer_steps

    known = pre_tokenizer_steps(kind)
    assert known is not None
    steps, whole = known
    nodes: list[Any] = []
    for step in steps:
        if step == DIGITS_STEP:
            nodes.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != BYTE_LEVEL_STEP:
            nodes.append(pre_tokenizers.Split(Regex(step), "isolated"))
    nodes.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=BYTE_LEVEL_STEP in steps)
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(nodes) if len(nodes) > 1 else nodes[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


def sentencepiece_tokenizer(*, prefix: bool) -> Any:
    """BPE as converters restate a sentencepiece model: every cut of a piece into two pieces is a merge."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator(_CORPUS * 4, trainer)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    own = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    # Sentencepiece numbers what it joined by rank, and the single characters after that.
    pieces += [piece for piece, _ in own if len(piece) > 1] + [
        piece for piece, _ in own if len(piece) == 1
    ]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in vocab
        if not piece.startswith("<")
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]]
    )
    return tokenizer
