"""Tensor types of GGUF mixtures such as ``Q4_K_M``, chosen as llama.cpp chooses them.

A mixture spends more bits where llama.cpp's authors measured that they matter: the output matrix, the values of
attention, the second matrix of the MLP, and those more in the first and last eighth of the blocks than between. The
rules restate ``llama-quant.cpp``; they depend on counters that run over the tensors in file order, so the order is part
of the result. Tensors with fewer than two dimensions, norms, routers and position tables are always stored as F32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantforge.formats.gguf.container import TYPES
from quantforge.packers.lattices import LATTICES

# Mixture: (general.file_type, type of most tensors).
MIXTURES: Mapping[str, tuple[int, str]] = {
    "F32": (0, "F32"), "F16": (1, "F16"), "BF16": (32, "BF16"),
    "Q4_0": (2, "Q4_0"), "Q4_1": (3, "Q4_1"), "Q5_0": (8, "Q5_0"), "Q5_1": (9, "Q5_1"), "Q8_0": (7, "Q8_0"),
    "Q2_K": (10, "Q2_K"), "Q2_K_S": (21, "Q2_K"),
    "Q3_K_S": (11, "Q3_K"), "Q3_K_M": (12, "Q3_K"), "Q3_K_L": (13, "Q3_K"),
    "Q4_K_S": (14, "Q4_K"), "Q4_K_M": (15, "Q4_K"), "Q5_K_S": (16, "Q5_K"), "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"), "IQ4_NL": (25, "IQ4_NL"), "IQ4_XS": (30, "IQ4_XS"),
    "IQ1_S": (24, "IQ1_S"), "IQ1_M": (31, "IQ1_M"), "IQ2_XXS": (19, "IQ2_XXS"), "IQ2_XS": (20, "IQ2_XS"),
    "IQ2_S": (28, "IQ2_XS"), "IQ2_M": (29, "IQ2_S"), "IQ3_XXS": (23, "IQ3_XXS"), "IQ3_XS": (22, "IQ3_S"),
    "IQ3_S": (26, "IQ3_S"), "IQ3_M": (27, "IQ3_S"),
}  # fmt: skip
MIXTURE_BY_BITS: Mapping[int, str] = {
    2: "Q2_K",
    3: "Q3_K_M",
    4: "Q4_K_M",
    5: "Q5_K_M",
    6: "Q6_K",
    8: "Q8_0",
}
# Words of other tools, as `nearest` looks them up.
_EIGHT_BIT_ENDS = (
    " (with --embedding q8_0, and --lm-head q8_0 where the model has a head of its own,"
    " as such files have)"
)
TYPE_HINTS: Mapping[str, str] = {
    "q4kl q4kxl udq4kxl": f"--type Q4_K_M{_EIGHT_BIT_ENDS}",
    "q3kxl udq3kxl": f"--type Q3_K_L{_EIGHT_BIT_ENDS}",
    "q2kl q2kxl udq2kxl": f"--type Q2_K{_EIGHT_BIT_ENDS}",
    "q5kl q5kxl udq5kxl": f"--type Q5_K_M{_EIGHT_BIT_ENDS}",
    "q6kl q6kxl udq6kxl": f"--type Q6_K{_EIGHT_BIT_ENDS}",
    "q8kxl udq8kxl q8k": "--type Q8_0",
    "q4 q4k q4kmedium 4bit int4": "--type Q4_K_M, the type of --bits 4",
    "q3 q3k 3bit int3": "--type Q3_K_M, the type of --bits 3",
    "q5 q5k 5bit int5": "--type Q5_K_M, the type of --bits 5",
    "q2 2bit int2": "--type Q2_K, the type of --bits 2",
    "6bit int6": "--type Q6_K, the type of --bits 6",
    "8bit int8": "--type Q8_0, the type of --bits 8",
    "q4044 q4048 q4088": "--type Q4_0: llama.cpp reorders it where it loads",
    "fp16 float16 half": "--type F16",
    "bfloat16": "--type BF16",
    "fp32 float32 float": "--type F32",
    "tq10 tq20": "for models that are ternary themselves; the smallest here is --type IQ1_S",
    "w4a16 w8a16 w8a8 nf4": "this is a scheme: --scheme in place of --type",
    "gguf ggml": "--format gguf",
    "auto copy": "leave --type out: --bits chooses it",
}  # fmt: skip
MIXED_PREFIX = "mixed"  # begins the name of what rules or an allocation mix: mixed-4.06bpw
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# What stands in for a type whose blocks do not divide the rows.
_FALLBACK_TYPES = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **dict.fromkeys(("IQ4_XS", *map(str.upper, LATTICES)), "IQ4_NL"),
}
# Mixtures with rules of their own.
_LOW_BIT_MIXTURES = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})
# Of these, those that raise to IQ3_S rather than to Q2_K
_RAISED_TO_IQ3_S = frozenset({"IQ2_S", "IQ2_M"})
_ALWAYS_F32 = ("position_embd.weight", "token_types.weight")
# Rows of which tokens choose
EMBEDDING_TENSORS = ("token_embd.weight", "per_layer_token_embd.weight")
UNQUANTIZED_TENSORS = ("per_layer_model_proj.weight",)  # keeps its type whatever the mixture
_EIGHT_EXPERTS, _FEW_EXPERTS = 8, 4
_LAYERS_70B = 80


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Properties of a model that the rules of the mixtures need."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    importance: bool = False  # whether the codes are chosen with an importance matrix


def file_order(name: str) -> tuple[int, str]:
    """Return the sort key of a tensor in a file: by block (tensors outside of blocks first), then by name."""
    name_parts = name.split(".")
    return (int(name_parts[1]) if name_parts[0] == "blk" else -1, name)


_CONVOLUTIONS = ("shortconv.conv.weight", "ssm_conv1d.weight")


def always_float32(name: str, rank: int) -> bool:
    """Return whether a tensor is stored as F32 in every mixture."""
    return (
        rank < 2
        or not name.endswith("weight")
        or "_norm.weight" in name
        or "ffn_gate_inp" in name
        or name.endswith(_CONVOLUTIONS)
        or name in _ALWAYS_F32
    )


def fitting_type(kind: str, columns: int) -> str:
    """Return the type, or its fallback if its block size does not divide ``columns``."""
    if columns % TYPES[kind].columns == 0:
        return kind
    other = _FALLBACK_TYPES.get(kind, "F16")
    return other if columns % TYPES[other].columns == 0 else "F16"


def assign_types(
    mixture: str, tensors: Iterable[tuple[str, int]], shape: ModelShape
) -> dict[str, str]:
    """Return the type of each quantizable tensor ``(name, columns)`` in a mixture, before `fitting_type`."""
    base = MIXTURES[mixture][1]
    ordered = sorted(tensors, key=lambda item: file_order(item[0]))
    names = [name for name, _ in ordered]
    is_tied = "output.weight" not in names
    values = [name for name in names if _is_value(name)]
    type_by_name: dict[str, str] = {}
    value = 0
    rows = dict.fromkeys(("ffn_down", "ffn_gate", "ffn_up"), 0)
    for name, columns in ordered:
        matrix = next((matrix_name for matrix_name in rows if matrix_name in name), "")
        if base in FLOAT_TYPES:
            type_by_name[name] = base
        elif name == "output.weight" or (is_tied and name in EMBEDDING_TENSORS):
            type_by_name[name] = output_type(mixture, base, columns)
        elif name in EMBEDDING_TENSORS:
            type_by_name[name] = _embedding_type(mixture, base)
        elif _is_value(name):
            type_by_name[name] = _values_type(mixture, base, value, len(values), shape)
            value += 1
        elif matrix:
            index = (
                file_order(name)[0]
                if shape.experts > 1 and mixture not in _LOW_BIT_MIXTURES
                else rows[matrix]
            )
            choose = _down_type if matrix == "ffn_down" else _gate_up_type
            type_by_name[name] = choose(mixture, base, index, shape)
            rows[matrix] += 1
        elif "attn_output.weight" in name:
            type_by_name[name] = _attention_output_type(mixture, base, shape)
        else:
            type_by_name[name] = _other_type(mixture, base, name, shape)
    return type_by_name


def _is_value(name: str) -> bool:
    return any(
        value_name in name
        for value_name in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
    )


def _has_more_bits(index: int, count: int) -> bool:
    """Return whether a layer gets more bits: the first and last eighth, and every third between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def output_type(mixture: str, base: str, columns: int) -> str:
    """Return the type of the output matrix (or tied embedding) in a mixture of mostly ``base``."""
    if base == "Q8_0" or columns % TYPES["Q6_K"].columns:
        return "Q8_0"
    return "Q5_K" if mixture in _LOW_BIT_MIXTURES or mixture == "IQ3_XXS" else "Q6_K"


def _embedding_type(mixture: str, base: str) -> str:
    if mixture in _RAISED_TO_IQ3_S or mixture == "IQ3_XXS":
        return "IQ3_S"
    return "Q2_K" if mixture in _LOW_BIT_MIXTURES else base


def _other_type(mixture: str, base: str, name: str, shape: ModelShape) -> str:
    """Return the type of attention keys and queries, and of all remaining tensors."""
    if "attn_k.weight" in name and shape.experts == _EIGHT_EXPERTS:
        return "Q4_K" if mixture in _LOW_BIT_MIXTURES else "Q8_0"
    lower_types = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
    return (
        lower_types.get(mixture, base)
        if "attn_k.weight" in name or "attn_q.weight" in name
        else base
    )


def _gate_up_type(mixture: str, base: str, index: int, shape: ModelShape) -> str:
    """Return the type of the MLP's gate and up matrices."""
    between = shape.layers // 8 <= index < 7 * shape.layers // 8
    return "IQ3_XXS" if mixture == "IQ3_XS" and between else base


def _values_type(mixture: str, base: str, index: int, count: int, shape: ModelShape) -> str:
    grouped = shape.heads // shape.kv_heads >= 4
    type_name = base
    if mixture in _LOW_BIT_MIXTURES:
        raised = "IQ3_S" if mixture in _RAISED_TO_IQ3_S else "Q2_K"
        return "Q4_K" if grouped or shape.experts >= _FEW_EXPERTS else raised
    if mixture == "IQ3_M" or (mixture in {"IQ3_XXS", "IQ3_XS", "IQ3_S"} and grouped):
        type_name = "Q4_K"
    elif mixture == "IQ3_XXS":
        type_name = "IQ3_XXS" if shape.importance else "IQ3_S"
    elif mixture == "Q2_K":
        type_name = "Q4_K" if grouped else "Q3_K"
    elif mixture == "Q2_K_S" and grouped:
        type_name = "Q4_K"
    elif mixture == "Q3_K_M":
        type_name = "Q5_K" if index < 2 else "Q4_K"
    elif (
        mixture == "Q3_K_L"
        or (mixture in {"IQ4_NL", "IQ4_XS"} and grouped)
        or (mixture == "Q4_K_S" and index < 4)
    ):
        type_name = "Q5_K"
    elif mixture in {"Q4_K_M", "Q5_K_M"} and _has_more_bits(index, count):
        type_name = "Q6_K"
    if (
        shape.layers == _LAYERS_70B
        and shape.heads != shape.kv_heads
        and type_name in {"Q3_K", "Q4_K"}
    ):
        type_name = "Q5_K"
    return "Q8_0" if shape.experts == _EIGHT_EXPERTS else type_name


# The second matrices of the MLP in the first blocks, and in the others.
_DOWN_TYPES = {
    "Q2_K": ("Q3_K", "Q3_K"),
    "Q2_K_S": ("Q4_K", "Q2_K"),
    "Q3_K_M": ("Q5_K", "Q4_K"),
    "IQ3_XXS": ("Q4_K", "Q3_K"),  # without an importance
}


def _down_type(mixture: str, base: str, index: int, shape: ModelShape) -> str:
    first = index < shape.layers // 8
    if mixture in _LOW_BIT_MIXTURES:
        raised = "IQ3_S" if mixture in _RAISED_TO_IQ3_S else "Q2_K"
        return raised if first else base
    if mixture == "IQ3_M":
        eight = shape.experts == _EIGHT_EXPERTS and _has_more_bits(index, shape.layers)
        return "Q4_K" if first or eight else base
    if mixture in {"Q2_K", "Q2_K_S", "Q3_K_M"} or (mixture == "IQ3_XXS" and not shape.importance):
        raised, default_type = _DOWN_TYPES[mixture]
        return (
            raised if index < shape.layers // (16 if mixture == "Q3_K_M" else 8) else default_type
        )
    if mixture == "Q3_K_L" or (mixture == "Q4_K_S" and first):
        return "Q5_K"
    if mixture in {"Q4_K_M", "Q5_K_M"} and _has_more_bits(index, shape.layers):
        return "Q6_K"
    if mixture in {"IQ4_NL", "IQ4_XS"} and first and not shape.importance:
        return "Q5_K"
    if mixture in {"Q4_0", "Q5_0"} and first and shape.importance:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[mixture]
    return base


def _attention_output_type(mixture: str, base: str, shape: ModelShape) -> str:
    if shape.experts == _EIGHT_EXPERTS:
        raised = {"Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M"}
        raised |= {"IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", *_LOW_BIT_MIXTURES}
        return "Q5_K" if mixture in raised else base
    types_by_mixture = {
        "Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K",
        "IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS", **dict.fromkeys(_RAISED_TO_IQ3_S, "IQ3_S"),
    }  # fmt: skip
    return types_by_mixture.get(mixture, base)


def file_type(
    label: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]], shape: ModelShape
) -> int:
    """Return llama.cpp's file type number for a mixture, or that of the most similar one if rules changed types.

    Of several that are as near, one that is mostly of the commonest type comes first.

    Args:
        label: the mixture that was asked for, or the type of most tensors.
        shapes: type and shape of every tensor of the file, by name.
        shape: of the model; with an importance or without one, whichever is nearer.
    """
    requested_type, distances = _file_type_of(label), _mixture_distances(shapes, shape)
    min_distance = min(distances.values(), default=0)
    if distances.get(requested_type, min_distance) == min_distance:
        return requested_type
    ((most_common_type, _),) = Counter(_types_in_blocks(shapes).values()).most_common(1)
    nearest = [
        (base != most_common_type, number)
        for number, base in MIXTURES.values()
        if distances[number] == min_distance
    ]
    return min(nearest)[1]


def _mixture_distances(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], shape: ModelShape
) -> dict[int, int]:
    """Return, by file type number, how many tensors of the blocks would have another type in that mixture.

    Empty where no mixture is mostly of the commonest type: only other programs write that, under their own numbers.
    """
    types = _types_in_blocks(shapes)
    base_types = {base for _, base in MIXTURES.values()}
    if not types or Counter(types.values()).most_common(1)[0][0] not in base_types:
        return {}
    columns = {name: size[-1] for name, (_, size) in shapes.items() if len(size) > 1}
    distances: dict[int, int] = {}
    for label, (number, _) in MIXTURES.items():
        counts = []
        for has_importance in (False, True):
            assigned = assign_types(
                label, columns.items(), replace(shape, importance=has_importance)
            )
            expected_types = {
                name: fitting_type(kind, columns[name]) for name, kind in assigned.items()
            }
            counts.append(
                sum(expected_types.get(name, kind) != kind for name, kind in types.items())
            )
        distances[number] = min(counts)
    return distances


def _types_in_blocks(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Return the types of the quantizable tensors in blocks."""
    return {
        name: kind
        for name, (kind, shape) in shapes.items()
        if name.startswith("blk.") and not always_float32(name, len(shape))
    }


def _file_type_of(label: str) -> int:
    """Return the file type number of a mixture or of the first one that is mostly of a type; 0 if there is none."""
    first = (number for name, (number, base) in MIXTURES.items() if label in (name, base))
    return MIXTURES[label][0] if label in MIXTURES else next(first, 0)
