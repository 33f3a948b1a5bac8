"""Kimi K2.5 and later: a deepseek_v3 beside a vision tower."""

from quantforge.architectures import deepseek_v3
from quantforge.architectures.declare import beside_towers

ARCHITECTURE = beside_towers(
    deepseek_v3.ARCHITECTURE,
    "kimi_k25",
    (r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\..*",),
    (
        ("language_model.model.blocks.", "model.layers."),  # as transformers 5 writes them
        ("language_model.", ""),
        ("model.language_model.", "model."),
    ),
)
