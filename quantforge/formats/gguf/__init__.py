"""GGUF: one file with weights, hyper-parameters and vocabulary, as llama.cpp and Ollama load it.

`container` is the layout, `parsing` reads it strictly; `families`, `parameters` and `rope` translate configurations,
`vocabulary` tokenizers; `mixture` chooses types; `source` shows a file as if it were a model directory. This module is
the format: what it holds, and how one module lies in it. `quantforge.planning.gguf_draft` puts a file together, and
`quantforge.formats.storage` moves tensors in and out. Nothing here quantizes.

In this folder:

    container              A GGUF file as bytes: header, metadata, tensor table, and where the data of every tensor goes
    families               Families that GGUF holds, and the names of their tensors in its files
    importance_file        Importance matrices as llama.cpp's tools write and read them
    metadata               The keys of a file: what the model is, where it comes from, its parameters, its vocabulary
    mixture                Number types of the tensors of a mixture: ``Q4_K_M`` and its relatives
    modelfile              A ``Modelfile`` for Ollama: the file as it is
    parameters             Hyper-parameters: from ``config.json`` to the keys that llama.cpp builds its graph from
    parsing                GGUF files, read more strictly than llama.cpp and gguf-py do
    projector_file         The file of a vision tower with its projector, as llama.cpp's ``--mmproj`` takes it
    rope                   Rotary embeddings: bases and scaling
    source                 A GGUF file as if it were a model directory
    tokenizer              The tokenizer of a model directory: pieces, merges, added and special tokens, chat templates
    tokenizer_differences  Tokenizer behavior that GGUF has no key for: one sentence per difference
    tokenizer_files        The files of a tokenizer from the keys of a GGUF file: the inverse of `vocabulary`
    vocabulary             Vocabularies: from ``tokenizer.json`` to the keys that llama.cpp builds its tokenizer from
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import InputError, RefusedError
from quantforge.formats import Compatibility, FormatInfo, ModuleLayout, Verdict
from quantforge.formats.convert import INTEGERS
from quantforge.formats.engine_rules import UNTRIED, Engine, grid_in
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.read_checks import finite
from quantforge.grids import GGML_BLOCKS, ScaleType
from quantforge.notation import parse
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

KEY = "gguf"
_PLUGIN = "vllm-gguf-plugin"
INFO = FormatInfo(
    hub_library="gguf",
    example_schemes=("q4_0", "q4_1", "q8_0", "q4_k", "mxfp4"),
    fuses_shared_inputs=False,
    engines={
        "llama.cpp": Engine(),
        "ollama": Engine(),
        "transformers": Engine(never="it decodes GGUF to dense weights"),
        "vllm": Engine(
            refuses=(grid_in(("mxfp4", "tq1_0", "tq2_0"), f"{_PLUGIN} has no such type"),),
            note=f"through {_PLUGIN} (since vLLM 0.24), on a GPU; {UNTRIED}",
        ),
        "sglang": Engine(note=UNTRIED),
        **dict.fromkeys(("tensorrt-llm", "lmdeploy", "mlx"), Engine(never="does not read GGUF")),
    },
    engine_packages={"vllm": _PLUGIN},
    file_suffix=".gguf",
    scales_are_tunable=True,
    tied_embedding_reference="llama-quantize",
)
MIN_ZERO_POINT = 0
DEFAULT_BITS = 4
QUANTIZATION = {"quant_method": KEY}  # of the configuration that `source` makes
_COLUMNS = 32  # of the blocks whose numbers are integers


def default_scale_type(model_dtype: str) -> ScaleType:
    """Return float16, which all blocks hold."""
    del model_dtype
    return ScaleType.F16


def default_scheme(bits: int) -> str:
    """Return the grid of most tensors of the mixture; `quantforge.planning.gguf_draft` has all of it.

    Raises:
        InputError: no mixture has that width.
    """
    from quantforge.formats.gguf.mixture import BY_BITS, MIXTURES

    if bits not in BY_BITS:
        raise InputError(f"--bits {bits}: no mixture of that size", "2, 3, 4, 5, 6 or 8, or --type")
    return MIXTURES[BY_BITS[bits]][1].lower()


def check_layer(layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
    """Judge a weight: a type of ggml whose blocks divide the columns, or integers that are one (`ggml_scheme`)."""
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
    """Return EXACT: types mix freely."""
    del layers
    return Compatibility(Verdict.EXACT)


def stored_scheme(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme to which values are restated: of integers, a float16 scale (and minimum) for 32 columns.

    These stay integers here; `ggml_scheme` returns the same numbers under the name of their type, ``q4_0``.
    """
    del shape
    if not scheme.integer:
        return scheme
    centered = INTEGERS[f"q{scheme.bits}_0"]
    return centered if scheme.symmetric else INTEGERS.get(f"q{scheme.bits}_1", centered)


def ggml_scheme(scheme: Scheme) -> Scheme:
    """Return the type of ggml that a scheme is: ``q4_0`` for ``int4:g32:sym``; others are returned as they are."""
    filled = scheme.with_scale(ScaleType.F16)
    return next((parse(grid) for grid, integers in INTEGERS.items() if integers == filled), scheme)


def _check_integers(scheme: Scheme, shape: tuple[int, int]) -> Compatibility:
    """Return whether integers match a ggml type: 4, 5 or 8 bits, groups that are multiples of 32."""
    if f"q{scheme.bits}_0" not in INTEGERS:
        return Compatibility(
            Verdict.IMPOSSIBLE, f"{scheme.bits}-bit integers are no type of a GGUF file"
        )
    if scheme.group_size(shape[1]) % _COLUMNS or shape[1] % _COLUMNS:
        return Compatibility(
            Verdict.IMPOSSIBLE,
            f"groups of {scheme.group_size(shape[1])} are no multiple of {_COLUMNS}",
        )
    return Compatibility(Verdict.EXACT)


def packed_tensors(
    module: str, layer: LayerScheme, shape: tuple[int, int]
) -> tuple[StoredTensor, ...]:
    """Announce the blocks of one module, under the module's own name."""
    kind = TYPES[ggml_scheme(layer.weight).grid.upper()]
    return (StoredTensor(f"{module}.weight", "U8", (shape[0], kind.row_bytes(shape[1]))),)


def pack(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Return the blocks of one module, uint8 ``[rows, bytes of a row]``, in the order of the source's rows."""
    from quantforge.packers.ggml.blocks import to_blocks

    return {f"{module}.weight": to_blocks(replace(tensor, scheme=ggml_scheme(tensor.scheme)))}


def unpack(layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """Read the blocks of one module."""
    from quantforge.packers.ggml.blocks import from_blocks

    (name,) = layout.tensor_names
    tensor = from_blocks(tensors[name], layout.scheme.weight)
    for key, value in tensor.parameters.items():
        if value.is_floating_point():
            finite(name, value, key)
    return tensor


def side_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return nothing: everything is in the file."""
    del plan, config
    return {}


def is_declared(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration is that of a GGUF file, as `source` makes it."""
    return config.get("quantization_config") == QUANTIZATION


def find_layouts(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Sequence[ModuleLayout]:
    """Return the modules that are held in blocks: `source` says so in the configuration that it makes."""
    grids: Mapping[str, str] = config[f"{KEY}_types"]
    found = []
    for name, grid in grids.items():
        rows, row_bytes = tensors[name].shape
        block = GGML_BLOCKS[grid]
        columns = row_bytes // block.block_bytes * block.columns
        scheme = LayerScheme(parse(grid))
        found.append(ModuleLayout(name.removesuffix(".weight"), scheme, (rows, columns), (name,)))
    return found


# Order of rows


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows ``[heads * width, ...]`` from halves to pairs; 0 heads: as they are.

    They are viewed as ``[heads, 2, width / 2, ...]`` and the two middle axes swapped. Quantized rows are independent of
    each other, so it is their bytes that are reordered.
    """
    return _swapped(rows, heads, 2) if heads else rows


def halves(rows: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return _swapped(rows, heads, len(rows) // heads // 2) if heads else rows


def _swapped(rows: Tensor, heads: int, first: int) -> Tensor:
    shape = rows.shape
    return rows.reshape(heads, first, -1, *shape[1:]).transpose(1, 2).reshape(shape)


def not_carried(what: str, instead: str) -> RefusedError:
    """Return the error for what no key of a file could carry, with what is supported."""
    return RefusedError(
        f"config.json: {what} cannot be carried by a GGUF file (supported: {instead})",
        "use --format compressed-tensors",
    )
