"""A family from outside: Granite computes like a llama with four multipliers, which are the skeleton's business."""

from dataclasses import replace

from quantforge.architectures import llama

ARCHITECTURE = replace(llama.ARCHITECTURE, model_type="granite")
