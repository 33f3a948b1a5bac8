"""File formats of quantized models: one module per format, which reads and writes it; none of them quantizes.

Tensor names, types, shapes and the configuration are computed from headers alone, without torch (``check_layer``,
``packed_tensors``, ``side_files``), so that ``plan`` knows the size of every file before the run. ``pack`` and
``unpack`` convert codes and parameters of one linear layer to and from its stored tensors, without any rounding.

In this folder:

    auto_round             AutoRound files: GPTQ and AWQ layouts with their own ``quant_method``
    awq                    AWQ files in the ``gemm`` layout: 4 bits, one group size for the whole model
    bnb                    bitsandbytes files as transformers serializes them: NF4 or FP4 blocks, or 8-bit rows
    configuration          Write the ``config.json`` of a result
    convert                Convert a quantized tensor to another format's scheme without changing its values, or refuse
    declared_quantization  Quantization declared by a model directory: find the declaration, compare it with the tensors
    decoded                View of a quantized checkpoint as unquantized: weights are decoded when read
    engine_rules           Rules for which layers of a format each engine can load
    engine_verdicts        Verdicts: whether each engine loads a quantized model, and why not
    fp8                    Fine-grained fp8 (``quant_method: fp8``), as in DeepSeek's releases
    gptq                   GPTQ files: 2, 3, 4 or 8 bits, one bit width and group size for the whole model
    gptq_v2                GPTQ files with ``checkpoint_format: gptq_v2``: zero points are stored as they are
    kv_scales              Scales of an fp8 KV cache, stored with the weights of a compressed-tensors model
    match_quantized        Match a quantized checkpoint to its architecture as if its weights were unquantized
    mlx                    MLX files: integers with a scale and a bias per group, and MLX's block-scale modes
    open_model             Open a model from a directory or a GGUF file
    patterns               Match regular expressions from users and configuration files against module names
    plain                  Unquantized checkpoints: bf16, f16 or f32 weights and no ``quantization_config``
    read_checks            Checks of a quantized checkpoint, applied in this order when it is read
    refusal_reasons        Reasons, shared by several formats, why a scheme or a mix of schemes cannot be stored
    storage                Convert a plan's tensors to the stored tensors of a format, and back
    compressed_tensors/    compressed-tensors: integers, floats and block scales, with or without quantized inputs
    gguf/                  GGUF: one file with weights, hyperparameters and vocabulary, for llama.cpp and Ollama
    sources/               Source models that need decoding or merging: low-precision releases, adapters, draft heads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from quantforge.errors import InputError, NotReadError, UnknownNameError, nearest_hint
from quantforge.grids import ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.formats.engine_rules import Engine
    from quantforge.packers.tensor import QuantizedTensor

KEEP = "keep"  # given instead of a scheme: leave the weight unquantized
PLAIN = "plain"  # unquantized safetensors: an export to this format decodes the weights
DEFAULT_FORMAT = "compressed-tensors"
GGUF = "gguf"  # the only format with mixtures of types and with pre-tokenizers
FORMATS: Mapping[str, str] = {
    PLAIN: "quantforge.formats.plain",
    DEFAULT_FORMAT: "quantforge.formats.compressed_tensors",
    "gptq": "quantforge.formats.gptq",
    "gptq_v2": "quantforge.formats.gptq_v2",
    "awq": "quantforge.formats.awq",
    "bnb": "quantforge.formats.bnb",
    "fp8": "quantforge.formats.fp8",
    "mlx": "quantforge.formats.mlx",
    GGUF: "quantforge.formats.gguf",
}
# Format names that other tools use, with the option to suggest instead; `nearest_hint` looks them up.
_NOT_WRITTEN_HINT = "it is not written here; `quantforge formats` lists what is"
_BITS_HINT = "widths are an option of their own: --bits 4, or --scheme W4A16"
FORMAT_HINTS: Mapping[str, str] = {
    "ggml ggmf ggjt ggufv2 ggufv3 llamacpp ollama lmstudio kquant kquants q4km q4ks q5km q6k q80": "--format gguf",
    "ggufq4km ggufq4ks ggufq40 ggufq5km ggufq6k ggufq80 ggufq2ks":
        "the type is an option of its own: --type Q4_K_M",
    "autogptq gptqmodel gptqmarlin marlin exllama exllamav2 gptqv1": "--format gptq",
    "autoawq awqmarlin gemm gemv llmawq": "--format awq",
    "bitsandbytes nf4 bnbnf4 bnb4bit bnb8bit qlora llmint8": "--format bnb",
    "llmcompressor ct compressed vllm sparseml packquantized packed intquantized nmvllm": "--format compressed-tensors",
    "mlxlm apple mlxcommunity": "--format mlx",
    "finegrainedfp8 deepseek fp8block blockfp8": "--format fp8",
    "fp8dynamic fp8static w8a8fp8": "--scheme FP8_DYNAMIC",
    "safetensors hf huggingface transformers dequantize dequantized fp16 bf16 float16 bfloat16 none fake":
        "--format plain holds a model that is not quantized; all formats but gguf are safetensors files",
    "autoround": "its files are those of GPTQ: --format gptq",
    "exl2 exl3 hqq aqlm quip quipsharp onnx openvino torchao quanto eetq tensorrt trt coreml executorch tflite":
        _NOT_WRITTEN_HINT,
    "int2 int3 int4 int8 w4a16 w8a16 w8a8 4bit 8bit": _BITS_HINT,
    "nvfp4 nvfp4a16": "--scheme nvfp4",
    "mxfp4 mxfp8": "it is a scheme, not a format: --scheme mxfp8",
}  # fmt: skip
# Values of ``quant_method`` that can be read; only `sources` reads the last two.
_READABLE_METHODS = (
    "compressed-tensors, gptq, auto-round, awq, bitsandbytes, fp8, mxfp4 and modelopt"
)


class Verdict(StrEnum):
    """Whether a quantized tensor can be stored in a format."""

    EXACT = "exact"
    INEXACT = "inexact"  # scales have to be rounded: only with --allow-inexact
    IMPOSSIBLE = "impossible"
    # Scales and zero points are read, and decide, before anything is written
    DEPENDS_ON_VALUES = "values"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether a format can store a scheme, why not, and the most similar scheme that it can store ("" for none)."""

    verdict: Verdict
    reason: str = ""
    nearest: str = ""


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """A quantized linear in a checkpoint: its scheme, its shape ``(out_features, in_features)``, its stored tensors."""

    module: str
    scheme: LayerScheme
    shape: tuple[int, int]
    tensor_names: tuple[str, ...]  # of its stored tensors, without the bias
    # `desc_act` in the configuration: groups are not consecutive columns
    act_order: bool | None = None
    total_rows: int = 0  # of the whole weight, if this layout describes a slice of its rows
    transposed: bool = False  # codes and scales are stored ``[in_features, out_features]``


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """Properties of a format that the rest of the program needs.

    Attributes:
        engine_packages: extra Python packages that an engine needs to load the format, by engine.
        hub_library: ``library_name`` for model cards on the Hugging Face Hub, left out if no engine loads the result.
        example_schemes: schemes shown in the table of conversions; empty if the format stores no codes.
        fuses_shared_inputs: whether engines fuse linears that read the same input (q, k, v), which then must share some
            parameters.
        fused_scale_suffixes: name suffixes of the stored scales, one number each, that must be equal in fused linears.
        holds_kv_scales: whether the files can hold scales of a KV cache.
        group_index_suffix: name suffix of the tensor with the group of each column (act-order); "" if there is none.
        single_group_size: whether the configuration has a single group size for the whole model.
        engines: which files of the format each engine loads (`quantforge.formats.engine_rules`).
        skip_list_key: key in the configuration with parts of the names of unquantized modules; "" if there is none.
        file_suffix: file name suffix of a format that writes one file (or numbered parts); "" for directories.
        row_sliced_suffixes: name suffixes of the stored tensors that can be read by rows of the weight; the others are
            read whole. Empty if weights can only be read whole.
        used_for_releases: whether publishers release models in the format, so that it may be the source of a run.
        stores_transposed: whether linears of shape ``[in, out]`` can be stored that way for engines that decode them.
        scales_are_tunable: whether scales are free parameters that tuning may learn.
        tied_embedding_reference: tool whose choice for tied embeddings is followed, or "" (`quantizes_tied_embedding`).
        preserved_scale_types: scale types that an export keeps, whatever the type of the model.
    """

    engine_packages: Mapping[str, str] = field(default_factory=dict)
    hub_library: str = "transformers"
    example_schemes: tuple[str, ...] = ()
    fuses_shared_inputs: bool = True
    fused_scale_suffixes: tuple[str, ...] = ()
    holds_kv_scales: bool = False
    group_index_suffix: str = ""
    single_group_size: bool = False
    engines: Mapping[str, Engine] = field(default_factory=dict)
    skip_list_key: str = ""
    file_suffix: str = ""
    row_sliced_suffixes: tuple[str, ...] = ()
    used_for_releases: bool = False
    stores_transposed: bool = False
    scales_are_tunable: bool = False
    tied_embedding_reference: str = ""
    preserved_scale_types: tuple[ScaleType, ...] = ()

    @property
    def is_single_file(self) -> bool:
        """Whether a result is one file (or numbered parts) instead of a directory."""
        return bool(self.file_suffix)

    @property
    def quantizes_tied_embedding(self) -> bool:
        """Whether a tied embedding is quantized by default, because the engine computes the head with packed codes."""
        return bool(self.tied_embedding_reference)


class Format(Protocol):
    """Interface of a format module, as plain functions."""

    KEY: str
    INFO: FormatInfo
    MIN_ZERO_POINT: int  # the smallest zero point that the files can hold
    DEFAULT_BITS: int  # used if --bits is not given

    def default_scale_type(self, model_dtype: str) -> ScaleType:
        """Return the type in which scales are stored if the scheme has none; ``model_dtype`` is F16, BF16 or F32."""

    def default_scheme(self, bits: int) -> str:
        """Return the scheme for ``--bits N`` in this format; `KEEP` if it leaves every weight unquantized."""

    def check_layer(self, layer: LayerScheme, shape: tuple[int, int]) -> Compatibility:
        """Return whether a weight of ``shape`` (out, in) with this scheme can be stored."""

    def check_model(
        self, layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]
    ) -> Compatibility:
        """Return whether these modules, each of which passes `check_layer`, can be stored in one model."""

    def stored_scheme(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme:
        """Return the scheme as stored in the files, e.g. with one scale per row instead of one per matrix."""

    def packed_tensors(
        self, module: str, layer: LayerScheme, shape: tuple[int, int]
    ) -> tuple[StoredTensor, ...]:
        """Return the headers of the tensors that ``pack`` returns for a module, without its bias."""

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Convert codes and parameters to the stored tensors described by `packed_tensors`.

        Raises `RefusedError` for values that the format cannot hold; see `formats.convert`.
        """

    def unpack(self, layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Convert stored tensors to codes and parameters; raise `InputError` for values the format does not allow."""

    def side_files(self, plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
        """Return ``config.json`` with the quantization added, and the other side files of the format, by name."""

    def is_declared(self, config: Mapping[str, Any]) -> bool:
        """Return whether a ``config.json`` declares this format."""

    def find_layouts(
        self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> Sequence[ModuleLayout]:
        """Return the quantized linears of a checkpoint in this format, found in its headers."""


def load_format(key: str) -> Format:
    """Import and return the module of a format.

    Raises:
        UsageError: the format does not exist; the hint names the most similar one.
    """
    if key not in FORMATS:
        raise UnknownNameError(f"unknown format '{key}'", nearest_hint(key, FORMATS, FORMAT_HINTS))
    return cast("Format", import_module(FORMATS[key]))


def gptq_checkpoint_format(quantization: Mapping[str, Any]) -> object:
    """Return the ``checkpoint_format`` declared in GPTQ's ``quantization_config``; "gptq" if it is missing."""
    declared = quantization.get("checkpoint_format") or quantization.get("format")
    return declared or ("marlin" if quantization.get("is_marlin_format") is True else "gptq")


def detect_format(config: Mapping[str, Any]) -> Format:
    """Return the format that a ``config.json`` declares; ``plain`` if it has no ``quantization_config``.

    Raises:
        NotReadError: the declared quantization method cannot be read.
        InputError: ``quantization_config`` does not name its method.
    """
    for key in FORMATS:
        module = load_format(key)
        if module.is_declared(config):
            return module
    quantization = config["quantization_config"]
    method = quantization.get("quant_method")
    error_class = NotReadError if method and isinstance(method, str) else InputError
    if method == "gptq":  # with a checkpoint_format that neither gptq nor gptq_v2 reads
        raise error_class(
            f"GPTQ with checkpoint_format = {gptq_checkpoint_format(quantization)!r} is not read",
            "gptq and gptq_v2 are; quantize again from the original model",
            subject="config.json",
        )
    raise error_class(
        f"no reader for quant_method {method!r}",
        f"read are {_READABLE_METHODS}; quantize again from the original model",
        subject="config.json",
    )
