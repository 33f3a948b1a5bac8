"""Mistral Small 3.1 and later, and Ministral 3: a mistral or a ministral3 beside a vision tower."""

from dataclasses import replace

from quantforge.architectures import ministral3
from quantforge.architectures.tower_names import beside_towers

ARCHITECTURE = replace(
    beside_towers(
        ministral3.ARCHITECTURE,
        "mistral3",
        (r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
        (("language_model.", ""), ("model.language_model.", "model.")),
    ),
    graph=None,
)
