"""GPTQ files with ``checkpoint_format: gptq_v2``: zero points are stored as they are, 0 included.

gptqmodel and SGLang read the field; vLLM ignores zero points, and with them the difference, for
symmetric files.
"""

from functools import partial

from quantforge.formats import FormatInfo, gptq

KEY = "gptq_v2"
INFO = FormatInfo(
    engine_packages={"transformers": "gptqmodel optimum"},
    example_schemes=("int4:g128:asym:f16",),
    group_index_suffix=".g_idx",
    single_group_size=True,
    scales_are_tunable=True,
    engines=gptq.ENGINES,
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = gptq.DEFAULT_BITS

check_model, default_scheme, find_layouts = gptq.check_model, gptq.default_scheme, gptq.find_layouts
stored_scheme, default_scale_type, packed_tensors = (
    gptq.stored_scheme,
    gptq.default_scale_type,
    gptq.packed_tensors,
)
check_layer = partial(gptq.check_layer, min_zero_point=MIN_ZERO_POINT)
pack = partial(gptq.pack, min_zero_point=MIN_ZERO_POINT)
unpack = partial(gptq.unpack, min_zero_point=MIN_ZERO_POINT)
side_files = partial(gptq.side_files, checkpoint_format=KEY)
is_declared = partial(gptq.is_declared, checkpoint_format=KEY)
