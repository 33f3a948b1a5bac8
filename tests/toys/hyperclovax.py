"""A family from outside: HyperCLOVA X is a llama with multipliers, which are the skeleton's business."""

from dataclasses import replace

from quantforge.architectures.families import llama

ARCHITECTURE = replace(
    llama.ARCHITECTURE, model_type="hyperclovax", required_values={"use_post_norm": False}
)
