"""GPTQ files with ``checkpoint_format: gptq_v2``: zero points are stored as they are, 0 included.

gptqmodel and SGLang read the field; vLLM ignores zero points, and with them the difference, for
symmetric files.
"""

from functools import partial

from quantforge.formats import About, gptq, gptq_layouts
from quantforge.formats.gptq import (
    OWN_BITS,
    check_model,
    default_scheme,
    layouts,
    scale_type,
)
from quantforge.formats.gptq_layouts import native, stored

KEY = "gptq_v2"
ABOUT = About(
    packages={"transformers": "gptqmodel optimum"},
    specimens=("int4:g128:asym:f16",),
    group_index=".g_idx",
    one_group=True,
    tunable=True,
    engines=gptq.ENGINES,
)
LEAST_ZERO = 0

check = partial(gptq_layouts.check, least_zero=LEAST_ZERO)
pack = partial(gptq_layouts.pack, least_zero=LEAST_ZERO)
unpack = partial(gptq_layouts.unpack, least_zero=LEAST_ZERO)
side_files = partial(gptq.side_files, checkpoint_format=KEY)
claims = partial(gptq.claims, checkpoint_format=KEY)

__all__ = [
    "KEY", "LEAST_ZERO", "OWN_BITS", "check", "check_model", "claims", "default_scheme",
    "layouts", "native", "pack", "scale_type", "side_files", "stored", "unpack",
]  # fmt: skip
