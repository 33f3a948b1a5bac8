"""GPT-1 and GPT-2: LayerNorm with bias, learned positions, q, k, v in one Conv1D (stored ``[in, out]``), tied head.

Old checkpoints of GPT-2 leave out the ``transformer.`` prefix and carry the causal mask as tensors. Nothing absorbs a
scale of the second MLP matrix: GELU lies between. The norms of GPT-1 come after the halves of a layer, on the residual,
so that they absorb nothing.
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
from quantforge.architectures.declare import norms
from quantforge.architectures.layer_kind import keys_and_values
from quantforge.architectures.llama_cpp import NORM_BIASES, GgufFamily, Keys


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe."""
    return {
        "n_embd": keys.integer("embedding_length"),
        "n_layer": keys.integer("block_count"),
        "n_head": keys.integer("attention.head_count"),
        "n_positions": keys.integer("context_length"),
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


GPT2 = Architecture(
    model_type="gpt2",
    blocks="transformer.h",
    outer=(
        Parameter("transformer.wte.weight", ("vocab", "hidden")),
        Parameter("transformer.wpe.weight", ("positions", "hidden")),
        *norms("transformer.ln_f", bias=True),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        LayerKind(
            parameters=(
                *norms("ln_1", "ln_2", bias=True),
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
            inner_copies=4,
            states=keys_and_values(),
        ),
    ),
    embedding="transformer.wte",
    head="lm_head",
    final_norm="transformer.ln_f",
    prefixes=(("", ""), ("", "transformer.")),
    droppable=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    requires={"add_cross_attention": False},
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
        biases=("attn_qkv.bias", "attn_output.bias", "ffn_up.bias", "ffn_down.bias", *NORM_BIASES),
        class_name="GPT2LMHeadModel",
        activations=("gelu_new", "gelu_pytorch_tanh"),
        rotary=False,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        graph={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        read_config=read_config,
    ),
)


GPT1 = replace(
    GPT2,
    model_type="openai-gpt",
    outer=(
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
    requires={},
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
