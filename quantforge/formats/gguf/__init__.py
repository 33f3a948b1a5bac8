"""GGUF: one file with weights, hyperparameters and vocabulary, for llama.cpp and Ollama.

`container` is the layout, `parsing` reads it strictly; `families`, `parameters` and `rope` translate configurations,
`vocabulary` tokenizers; `mixture` chooses types; `source` shows a file as if it were a model directory. This module is
the format: what it holds, and how one module lies in it. `quantforge.planning.gguf_plan` puts a file together, and
`quantforge.formats.storage` moves tensors in and out. Nothing here quantizes.

In this folder:

    container              Binary layout of GGUF files: header, metadata, tensor table
    families               Model families that can be stored as GGUF, and the tensor names of their files
    importance_file        Importance matrices in the file formats of llama.cpp's tools
    metadata               General metadata keys of a GGUF file: model name, license, base model, provenance
    mixture                Tensor types of GGUF mixtures such as ``Q4_K_M``, chosen as llama.cpp chooses them
    modelfile              Ollama ``Modelfile`` for a GGUF file, with the model's context length and stop tokens
    parameters             Convert hyperparameters from ``config.json`` to the metadata keys of llama.cpp
    parsing                Strict parser of GGUF files, stricter than those of llama.cpp and gguf-py
    projector_file         GGUF file of a vision tower with its projector, for llama.cpp's ``--mmproj``
    rope                   Convert rotary embedding settings from ``config.json`` to GGUF keys and tables
    source                 Checkpoint view of a GGUF file, with the tensor names, order and shapes of transformers
    tokenizer              Read and check the tokenizer of a model directory: vocabulary, merges, added tokens
    tokenizer_differences  Tokenizer behavior that GGUF has no key for: one sentence per difference
    tokenizer_files        Tokenizer files made from the keys of a GGUF file: the inverse of `vocabulary`
    vocabulary             Convert a ``tokenizer.json`` to the vocabulary keys of llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.convert import GGML_INTEGER_SCHEMES
from quantforge.formats.engine_rules import NOT_RUN, Engine, message_for_grids
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.read_checks import require_finite
from quantforge.grids import GGML_BLOCKS, ScaleType
from quantforge.notation import parse
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "gguf"
_VLLM_PLUGIN = "vllm-gguf-plugin"
INFO = FormatInfo(
    hub_library="gguf",
    example_schemes=("q4_0", "q4_1", "q8_0", "q4_k", "mxfp4"),
    fuses_shared_inputs=False,
    engines={
        "llama.cpp": Engine(),
        "ollama": Engine(),
        "transformers": Engine(unsupported_reason="it decodes GGUF to dense weights"),
        "vllm": Engine(
            layer_rules=(
                message_for_grids(("mxfp4", "tq1_0", "tq2_0"), f"{_VLLM_PLUGIN} has no such type"),
            ),
            note=f"through {_VLLM_PLUGIN} (since vLLM 0.24), on a GPU; {NOT_RUN}",
        ),
        "sglang": Engine(note=NOT_RUN),
        **dict.fromkeys(
            ("tensorrt-llm", "lmdeploy", "mlx"), Engine(unsupported_reason="does not read GGUF")
        ),
    },
    engine_packages={"vllm": _VLLM_PLUGIN},
    file_suffix=".gguf",
    scales_are_tunable=True,
    tied_embedding_reference="llama-quantize",
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
QUANTIZATION_CONFIG = {"quant_method": KEY}  # of the configuration that `source` makes
_BLOCK_COLUMNS = 32  # of the blocks whose numbers are integers


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, the scale type of all ggml blocks."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return the type of most tensors of the default mixture for a bit width.

    Raises:
        InputError: no mixture has that width.
    """
    from quantforge.formats.gguf.mixture import MIXTURE_BY_BITS, MIXTURES

    if bits not in MIXTURE_BY_BITS:
        raise InputError(f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type")
    return MIXTURES[MIXTURE_BY_BITS[bits]][1].lower()


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Check a weight: a ggml type whose blocks divide the columns, or integers equivalent to one (`ggml_scheme`)."""
    if layer.weight.integer and layer.input is None:
        return _check_integers(layer.weight, shape)
    grid = layer.weight.grid
    if grid not in GGML_BLOCKS or layer.input is not None:
        return Compatibility(Verdict.IMPOSSIBLE, f"{layer} is no type of a GGUF file", "q4_k")
    if shape[1] % GGML_BLOCKS[grid].columns:
        reason = f"{shape[1]} columns are no multiple of {GGML_BLOCKS[grid].columns}"
        return Compatibility(Verdict.IMPOSSIBLE, reason, "q8_0")
    return Compatibility(Verdict.EXACT)


def check_model(layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Compatibility:
    """Return EXACT: types can be mixed freely."""
    del layers
    return Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme to convert to: integers get a float16 scale (and minimum) per 32 columns.

    These stay integers here; `ggml_scheme` returns the same numbers under the name of their type, ``q4_0``.
    """
    del shape
    if not scheme.integer:
        return scheme
    centered = GGML_INTEGER_SCHEMES[f"q{scheme.bits}_0"]
    return centered if scheme.symmetric else GGML_INTEGER_SCHEMES.get(f"q{scheme.bits}_1", centered)


def ggml_scheme(scheme: Scheme) -> Scheme:
    """Return the ggml type equivalent to a scheme, e.g. ``q4_0`` for ``int4:g32:sym``; other schemes unchanged."""
    filled = scheme.with_scale(ScaleType.F16)
    return next(
        (parse(grid) for grid, integers in GGML_INTEGER_SCHEMES.items() if integers == filled),
        scheme,
    )


def _check_integers(scheme: Scheme, shape: tuple[int, int]) -> Compatibility:
    """Return whether integers match a ggml type: 4, 5 or 8 bits, groups that are multiples of 32."""
    if f"q{scheme.bits}_0" not in GGML_INTEGER_SCHEMES:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"{scheme.bits}-bit integers are no type of a GGUF file"
        )
    if scheme.group_size(shape[1]) % _BLOCK_COLUMNS or shape[1] % _BLOCK_COLUMNS:
        return Compatibility(
            Verdict.IMPOSSIBLE,
            f"groups of {scheme.group_size(shape[1])} are no multiple of {_BLOCK_COLUMNS}",
        )
    return Compatibility(Verdict.EXACT)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Return the header of the blocks of one module, under the module's own name."""
    kind = TYPES[ggml_scheme(layer.weight).grid.upper()]
    return (StoredTensor(f"{module}.weight", "U8", (shape[0], kind.row_bytes(shape[1]))),)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Return the blocks of one module, uint8 ``[rows, bytes per row]``, in the source's row order."""
    from quantforge.packers.ggml.blocks import pack_blocks

    return {f"{module}.weight": pack_blocks(replace(tensor, scheme=ggml_scheme(tensor.scheme)))}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Unpack the blocks of one module."""
    from quantforge.packers.ggml.blocks import unpack_blocks

    (name,) = layout.tensor_names
    tensor = unpack_blocks(tensors[name], layout.scheme.weight)
    for key, value in tensor.parameters.items():
        if value.is_floating_point():
            require_finite(name, value, key)
    return tensor


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return an empty dict: everything is in the GGUF file."""
    del plan, config
    return {}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration is that of a GGUF file, as `source` makes it."""
    return config.get("quantization_config") == QUANTIZATION_CONFIG


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the modules stored in blocks, as listed in the configuration that `source` makes."""
    grids: Mapping[str, str] = config[f"{KEY}_types"]
    layouts = []
    for name, grid in grids.items():
        rows, row_bytes = tensors[name].shape
        block = GGML_BLOCKS[grid]
        columns = row_bytes // block.block_bytes * block.columns
        scheme = LayerScheme(parse(grid))
        layouts.append(ModuleLayout(name.removesuffix(".weight"), scheme, (rows, columns), (name,)))
    return layouts


# Order of rows


def interleave_rotary_rows(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows ``[heads * width, ...]`` of q or k from rotated halves to rotated pairs; unchanged for 0 heads.

    They are viewed as ``[heads, 2, width / 2, ...]`` and the two middle axes swapped. Quantized rows are independent of
    each other, so it is their bytes that are reordered.
    """
    return _swap_axes(rows, heads, 2) if heads else rows


def deinterleave_rotary_rows(rows: Tensor, heads: int) -> Tensor:
    """Invert `interleave_rotary_rows`."""
    return _swap_axes(rows, heads, len(rows) // heads // 2) if heads else rows


def _swap_axes(rows: Tensor, heads: int, first: int) -> Tensor:
    shape = rows.shape
    return rows.reshape(heads, first, -1, *shape[1:]).transpose(1, 2).reshape(shape)


def unsupported_in_gguf(setting: str, supported: str) -> RefusedError:
    """Return the error for a configuration that GGUF keys cannot express, with what is supported."""
    return RefusedError(
        f"{setting} cannot be carried by a GGUF file (supported: {supported})",
        "use --format compressed-tensors",
        subject="config.json",
    )
