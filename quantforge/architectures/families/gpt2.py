"""GPT-1 and GPT-2: LayerNorms with bias, learned positions, fused q, k, v (``[in, out]``), tied head.

Old checkpoints of GPT-2 omit the ``transformer.`` prefix and contain the causal mask as tensors. No scale of the input
of the second MLP matrix can be folded, because GELU precedes it. The norms of GPT-1 follow attention and MLP, on the
residual stream, so no scale folds into them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantforge.architectures import (
    Architecture,
    FoldKind,
    LayerKind,
    Parameter,
    ScaleFold,
    SharedInput,
)
from quantforge.architectures.declare import norm_parameters
from quantforge.architectures.layer_kind import keys_and_values
from quantforge.architectures.llama_cpp import NORM_BIASES, GgufFamily, GgufKeys


def read_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {
        "n_embd": keys.get_int("embedding_length"),
        "n_layer": keys.get_int("block_count"),
        "n_head": keys.get_int("attention.head_count"),
        "n_positions": keys.get_int("context_length"),
        "n_inner": keys.get_int("feed_forward_length"),
        "layer_norm_epsilon": keys.get_float("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


GPT2 = Architecture(
    model_type="gpt2",
    blocks="transformer.h",
    outer_parameters=(
        Parameter("transformer.wte.weight", ("vocab", "hidden")),
        Parameter("transformer.wpe.weight", ("positions", "hidden")),
        *norm_parameters("transformer.ln_f", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        LayerKind(
            parameters=(
                *norm_parameters("ln_1", "ln_2", bias=True),
                Parameter("attn.c_attn.weight", ("hidden", "qkv")),
                Parameter("attn.c_attn.bias", ("qkv",)),
                Parameter("attn.c_proj.weight", ("q", "hidden")),
                Parameter("attn.c_proj.bias", ("hidden",)),
                Parameter("mlp.c_fc.weight", ("hidden", "ffn")),
                Parameter("mlp.c_fc.bias", ("ffn",)),
                Parameter("mlp.c_proj.weight", ("ffn", "hidden")),
                Parameter("mlp.c_proj.bias", ("hidden",)),
            ),
            inputs=(
                SharedInput(("attn.c_attn",), "attn", ScaleFold(FoldKind.NORM, "ln_1")),
                SharedInput(
                    ("attn.c_proj",),
                    "attn.c_proj",
                    ScaleFold(FoldKind.ROWS, "attn.c_attn", "v"),
                    heads=True,
                ),
                SharedInput(("mlp.c_fc",), "mlp", ScaleFold(FoldKind.NORM, "ln_2")),
                SharedInput(("mlp.c_proj",), "mlp.c_proj"),
            ),
            mlp_activations=4,
            states=keys_and_values(),
        ),
    ),
    embedding="transformer.wte",
    head="lm_head",
    final_norm="transformer.ln_f",
    prefixes=(("", ""), ("", "transformer.")),
    droppable_patterns=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    required_values={"add_cross_attention": False},
    slices={"attn.c_attn": ("q", "kv", "kv")},
    slice_labels={"attn.c_attn": ("q", "k", "v")},
    transposed=True,
    defaults={
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
    },
    gguf=GgufFamily(
        "gpt2",
        bias_suffixes=(
            "attn_qkv.bias",
            "attn_output.bias",
            "ffn_up.bias",
            "ffn_down.bias",
            *NORM_BIASES,
        ),
        transformers_class="GPT2LMHeadModel",
        activations=("gelu_new", "gelu_pytorch_tanh"),
        uses_rotary=False,
        epsilon_keys=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        required_values={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        read_config=read_config,
    ),
)


GPT1 = replace(
    GPT2,
    model_type="openai-gpt",
    outer_parameters=(
        Parameter("transformer.tokens_embed.weight", ("vocab", "hidden")),
        Parameter("transformer.positions_embed.weight", ("positions", "hidden")),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        replace(
            GPT2.kinds[0],
            inputs=tuple(
                shared if shared.heads else replace(shared, scale_fold=None)
                for shared in GPT2.kinds[0].inputs
            ),
            states=None,  # transformers has no cache for it
            num_outputs=1,
        ),
    ),
    embedding="transformer.tokens_embed",
    final_norm="",
    required_values={},
    defaults={
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 512,
        "vocab_size": 40478,
        "tie_word_embeddings": True,
    },
    gguf=None,
)


FAMILIES = {"gpt2": GPT2, "openai-gpt": GPT1}
