"""Gemma 3: gemma 2 without soft-capping, with norms over the heads of q and k.

The larger models are multimodal: their text tower lies under a prefix, its configuration under ``text_config`` (with
most keys left at their defaults), and the vision tower with its projector is kept as it is.
"""

from dataclasses import replace

from quantforge.architectures import gemma2
from quantforge.architectures.declare import layer, norms
from quantforge.architectures.layer_windows import WindowRule

HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", dimension="head")
ARCHITECTURE = replace(
    gemma2.ARCHITECTURE,
    model_type="gemma3",
    kinds=(layer(gemma2.NORMS, HEAD_NORMS, *gemma2.MIXERS),),
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    foreign=(*gemma2.ARCHITECTURE.foreign, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    requires={"use_bidirectional_attention": False},
    defaults={
        **gemma2.ARCHITECTURE.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    text_config="text_config",
    fused_attention=True,
    windows=WindowRule(width=4096, period=6, period_key="sliding_window_pattern"),
)
