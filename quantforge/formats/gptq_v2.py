"""GPTQ files with ``checkpoint_format: gptq_v2``: zero points are stored as they are, 0 included.

gptqmodel and SGLang read the field; vLLM ignores zero points, and with them the difference, for
symmetric files.
"""

from functools import partial

from quantforge.formats import About, gptq

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
OWN_BITS = gptq.OWN_BITS

check_model, default_scheme, layouts = gptq.check_model, gptq.default_scheme, gptq.layouts
native, scale_type, packed_tensors = gptq.native, gptq.scale_type, gptq.packed_tensors
check = partial(gptq.check, least_zero=LEAST_ZERO)
pack = partial(gptq.pack, least_zero=LEAST_ZERO)
unpack = partial(gptq.unpack, least_zero=LEAST_ZERO)
side_files = partial(gptq.side_files, checkpoint_format=KEY)
claims = partial(gptq.claims, checkpoint_format=KEY)
