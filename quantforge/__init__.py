"""QuantForge: quantize, convert and evaluate large language models offline.

A recipe becomes a plan; the plan is executed one part of the model at a time into quantized tensors; every file
format, and the runtime, is a view of those tensors. ``docs/design.md`` is the map.
"""

__version__ = "0.1.0"
