"""Formats: one file per family of files, reading and writing; none of them ever quantizes.

Everything about names, types, shapes and configuration is decided from headers (``check``,
``packed_tensors``, ``config``: no torch), so that ``plan`` knows every byte before the run. ``pack`` and
``unpack`` move codes and parameters to and from the stored tensors of one linear layer, exactly.

In this folder:

    auto_round             AutoRound's files: layouts of GPTQ and AWQ under a ``quant_method`` of their own
    awq                    AWQ files, the ``gemm`` layout: 4 bits, one group size in the whole model
    bnb                    bitsandbytes files as transformers serializes them: NF4 or FP4 blocks
    configuration          ``config.json`` of an artifact: the source's, its type stated twice, the quantization added
    convert                One quantized tensor in the terms of another format: the same numbers, or a refusal
    declared_quantization  What a model directory declares about its quantization: where
    decoded                A quantized checkpoint as if it were not: its weights decoded as they are read
    engine_rules           Which engines load a quantized model: by its layers, by its family
    fp8                    Fine-grained fp8 (``quant_method: fp8``), as DeepSeek publishes its models
    gptq                   GPTQ files: 2, 3, 4 or 8 bits, one width and group size in the whole model
    gptq_v2                GPTQ files with ``checkpoint_format: gptq_v2``: zero points are stored as they are
    kv_scales              Scales of an fp8 KV cache, beside the weights of a compressed-tensors model
    match_quantized        A quantized checkpoint, matched as if its weights were stored plainly
    mlx                    MLX files: integers with a scale and a bias for each group, and MLX's modes of block scales
    open_model             One door to every kind of model: a directory, or a GGUF file
    patterns               Regular expressions that users type and that files hold, for names of modules
    plain                  Plain checkpoints: bf16, f16 or f32 weights and no ``quantization_config``
    read_checks            What is checked when files of a format are read, in this order
    refusal_reasons        Reasons why a scheme, or a mixture of schemes, cannot be stored, which several formats share
    storage                Storage of a plan's tensors in the files of a format, and back
    compressed_tensors/    compressed-tensors: integers, floats and block scales, with and without quantized inputs
    gguf/                  GGUF: one file with weights, hyper-parameters and vocabulary, as llama.cpp and Ollama load it
    sources/               Sources in low precision: models that are published in 4 or 8 bits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from quantforge.errors import InputError, NotReadError, UnknownNameError, nearest
from quantforge.grids import ScaleType
from quantforge.plans import Plan, StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.formats.engine_rules import Engine
    from quantforge.packers.tensor import QuantizedTensor

KEEP = "keep"  # in place of a scheme
PLAIN = "plain"  # the format without codes: an export into it decodes
DEFAULT = "compressed-tensors"  # where nothing asks for another
GGUF = "gguf"  # the one format with mixtures and pre-tokenizers
FORMATS: Mapping[str, str] = {
    PLAIN: "quantforge.formats.plain",
    DEFAULT: "quantforge.formats.compressed_tensors",
    "gptq": "quantforge.formats.gptq",
    "gptq_v2": "quantforge.formats.gptq_v2",
    "awq": "quantforge.formats.awq",
    "bnb": "quantforge.formats.bnb",
    "fp8": "quantforge.formats.fp8",
    "mlx": "quantforge.formats.mlx",
    GGUF: "quantforge.formats.gguf",
}
# Words of other tools, as `nearest` looks them up.
_NOT_WRITTEN = "it is not written here; `quantforge formats` lists what is"
_SCHEME = "widths are an option of their own: --bits 4, or --scheme W4A16"
FORMAT_WORDS: Mapping[str, str] = {
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
        _NOT_WRITTEN,
    "int2 int3 int4 int8 w4a16 w8a16 w8a8 4bit 8bit": _SCHEME,
    "nvfp4 nvfp4a16": "--scheme nvfp4",
    "mxfp4 mxfp8": "it is a scheme, not a format: --scheme mxfp8",
}  # fmt: skip
# Values of ``quant_method`` that are read; the last two by `sources` alone.
_READ = "compressed-tensors, gptq, auto-round, awq, bitsandbytes, fp8, mxfp4 and modelopt"


class Verdict(StrEnum):
    """Answer to whether a scheme can be stored in a format."""

    EXACT = "exact"
    INEXACT = "inexact"  # with --allow-inexact
    IMPOSSIBLE = "impossible"
    READ = "read"  # depends on the scales and zeros, which are read before anything is written


@dataclass(frozen=True, slots=True)
class Fit:
    """Verdict with its reason, and the nearest scheme that the format can hold ("" where none is near)."""

    verdict: Verdict
    reason: str = ""
    nearest: str = ""


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """A quantized linear of a checkpoint: module name, scheme, ``(out_features, in_features)``."""

    module: str
    scheme: LayerScheme
    shape: tuple[int, int]
    tensor_names: tuple[str, ...]  # names of the stored tensors that belong to it (without bias)
    scattered: bool | None = (
        None  # whether the configuration says that groups are not runs of columns
    )
    rows: int = 0  # of the whole, where this is a strip of rows
    turned: bool = False  # files hold its codes and scales ``[in_features, out_features]``


@dataclass(frozen=True, slots=True)
class About:
    """Facts of a format that others ask for.

    Attributes:
        packages: of Python that an engine needs for it beside its own, by engine.
        library: what the hub calls the library that such results are made for.
        specimens: schemes as its files are read with them, for the table of conversions; none where it holds no codes.
        joined: whether engines join the matrices that read one input, so that they have to share some parameters.
        holds_kv_scales: whether its files have a place for the scales of a KV cache.
        group_index: how the name of the tensor ends that says the group of each column (act-order), "" for none.
        one_group: whether its configuration states one group size, which all matrices of a model then have.
        engines: how each engine loads it (`formats.engines`).
        exceptions: the key of its configuration that lists parts of names of modules that are left out, "" for none.
        suffix: how the names of its files end, of a format that writes one file (or numbered ones); "" for directories.
        by_rows: how the names of stored tensors end that are cut with the rows of a weight (a strip gets the others
            whole); none where only whole weights are read.
        published: whether models are published in it, so that it may be what a run begins with.
        transposes: whether linears that a model holds ``[in, out]`` may be stored so, for an engine that decodes them.
        tunable: whether scales are numbers of their own, which may be learned.
        embedding_tool: the tool whose choice for a tied embedding is followed (`rounds_tied_embedding`), "" for none.
        scale_types: of scales that its files hold whatever the type of the model, so that an export keeps them.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    library: str = "transformers"
    specimens: tuple[str, ...] = ()
    joined: bool = True
    holds_kv_scales: bool = False
    group_index: str = ""
    one_group: bool = False
    engines: Mapping[str, Engine] = field(default_factory=dict)
    exceptions: str = ""
    suffix: str = ""
    by_rows: tuple[str, ...] = ()
    published: bool = False
    transposes: bool = False
    tunable: bool = False
    embedding_tool: str = ""
    scale_types: tuple[ScaleType, ...] = ()

    @property
    def one_file(self) -> bool:
        """Return whether a result is a file (or numbered files) and not a directory."""
        return bool(self.suffix)

    @property
    def rounds_tied_embedding(self) -> bool:
        """Return whether an embedding that is the head too is rounded by default: its engine multiplies by codes."""
        return bool(self.embedding_tool)


class Format(Protocol):
    """Interface of the modules of formats, as plain functions."""

    KEY: str
    ABOUT: About
    LEAST_ZERO: int  # the least zero point that an asymmetric grid may have in the files
    OWN_BITS: int  # what `--bits` is where nothing is said of it

    def scale_type(self, model_dtype: str) -> ScaleType:
        """Return the stored type of scales that a scheme leaves open; ``model_dtype`` is F16/BF16/F32."""

    def default_scheme(self, bits: int) -> str:
        """Return the scheme that ``--bits N`` means in this format; `KEEP`: every weight stays as it is."""

    def check(self, layer: LayerScheme, shape: tuple[int, int]) -> Fit:
        """Judge whether a weight of ``shape`` (out, in) with this scheme can be stored."""

    def check_model(self, layers: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> Fit:
        """Judge whether these modules, each of which passes `check`, can be stored in one model."""

    def native(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme:
        """Return the scheme in which the files hold a given one (one scale per matrix as one per row)."""

    def packed_tensors(
        self, module: str, layer: LayerScheme, shape: tuple[int, int]
    ) -> tuple[StoredTensor, ...]:
        """Return the tensors that ``pack`` will give for a module, without its bias."""

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Lay the codes and parameters out as the tensors that `packed_tensors` announced.

        Raises `RefusedError` for values that the format cannot hold; see `formats.convert`.
        """

    def unpack(self, layout: ModuleLayout, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Read codes and parameters back exactly; raise `InputError` for values that the format does not allow."""

    def side_files(self, plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
        """Return ``config.json`` (the source's plus the quantization) and the other files that the format defines."""

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Return whether a ``config.json`` says that its directory is in this format."""

    def layouts(
        self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> Sequence[ModuleLayout]:
        """Return the quantized linears of a checkpoint in this format, from its headers."""


if TYPE_CHECKING:  # the type checker holds the modules to the interface
    from quantforge.formats import (
        awq,
        bnb,
        compressed_tensors,
        fp8,
        gguf,
        gptq,
        gptq_v2,
        mlx,
        plain,
    )

    _HELD: tuple[Format, ...] = (
        plain,
        compressed_tensors,
        gptq,
        gptq_v2,
        awq,
        bnb,
        fp8,
        mlx,
        gguf,
    )


def format_of(key: str) -> Format:
    """Return the module of a format, imported when it is first asked for.

    Raises:
        UsageError: no such format; the hint names the nearest.
    """
    if key not in FORMATS:
        raise UnknownNameError(f"unknown format '{key}'", nearest(key, FORMATS, FORMAT_WORDS))
    return cast("Format", import_module(FORMATS[key]))


def gptq_layout(found: Mapping[str, Any]) -> object:
    """Return the ``checkpoint_format`` of GPTQ that a ``quantization_config`` states, "gptq" where it states none."""
    stated = found.get("checkpoint_format") or found.get("format")
    return stated or ("marlin" if found.get("is_marlin_format") is True else "gptq")


def detect(config: Mapping[str, Any]) -> Format:
    """Return the format that claims a ``config.json`` (no ``quantization_config``: ``plain``).

    Raises:
        NotReadError: it names a quantization method that no format reads.
        InputError: it has a configuration of a quantization that names none.
    """
    for key in FORMATS:
        module = format_of(key)
        if module.claims(config):
            return module
    found = config["quantization_config"]
    method = found.get("quant_method")
    unread = NotReadError if method and isinstance(method, str) else InputError
    if method == "gptq":  # of a layout that neither of its two formats has
        raise unread(
            f"config.json: GPTQ with checkpoint_format = {gptq_layout(found)!r} is not read",
            "gptq and gptq_v2 are; quantize again from the original model",
        )
    raise unread(
        f"config.json: no reader for quant_method {method!r}",
        f"read are {_READ}; quantize again from the original model",
    )
