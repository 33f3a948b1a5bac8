"""Granite 3 mixtures: a llama with factors of its own, and experts that files hold stacked, ``[experts, out, in]``."""

from dataclasses import replace

from quantforge.architectures import granite, llama
from quantforge.architectures.declare import attention, layer
from quantforge.architectures.llama_cpp import WITH_TABLE, Family
from quantforge.architectures.mixtures import experts_in_one, router

STORED = "block_sparse_moe"
EXPERTS = experts_in_one(
    "ffn",
    module=f"{STORED}.experts",
    stored=(f"{STORED}.input_linear.weight", f"{STORED}.output_linear.weight"),
    stored_one=("w1", "w3", "w2"),
)
ROUTER = router(f"{STORED}.router", stored=f"{STORED}.router.layer.weight")
PARTS = (llama.NORMS, attention("attention_bias"), ROUTER, EXPERTS)
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="granitemoe",
    kinds=(layer(*PARTS),),
    sizes={"experts": ("num_local_experts", "num_experts")},
    defaults={
        **granite.FACTORS,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    gguf=Family(
        "granitemoe",
        interleaved=True,
        scalings=WITH_TABLE,
        experts=True,
        reals={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        names={
            f"{STORED}.experts.gate_proj.weight": "ffn_gate_exps.weight",
            f"{STORED}.experts.up_proj.weight": "ffn_up_exps.weight",
            f"{STORED}.experts.down_proj.weight": "ffn_down_exps.weight",
            f"{STORED}.router.weight": "ffn_gate_inp.weight",
        },
    ),
)
