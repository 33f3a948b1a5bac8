"""Compare the metadata keys of a GGUF file with those derived from the source, in both directions.

The expected keys are derived as for writing a file (`translate_parameters`, `vocabulary`). Other converters omit keys
that equal llama.cpp's defaults, or write them explicitly; `llama_cpp_defaults` has these values. A key with another
value is an error. A key that cannot be derived from the source and that llama.cpp is not known to read is a warning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quantforge.architectures.match import Role
from quantforge.errors import InputError, RefusedError
from quantforge.files.output_names import projector_name
from quantforge.files.safetensors import read_tensor
from quantforge.formats.gguf.parameters import HyperParameters, translate_parameters
from quantforge.formats.gguf.parsing import GgufFile, read_gguf
from quantforge.formats.gguf.projector_file import ARCH, projector_file
from quantforge.formats.gguf.source import GgufCheckpoint
from quantforge.formats.gguf.vocabulary import TokenType, adds_bos_by_default, vocabulary
from quantforge.verification.findings import Report, Severity
from quantforge.verification.json_diff import (
    ABSENT,
    format_difference,
    format_value,
    shorten,
    trees_equal,
)
from quantforge.verification.opening import Artifact, SourceModel

TOKENS_KEY, TOKEN_TYPES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES_KEY, PRE_TOKENIZER_KEY = "tokenizer.ggml.scores", "tokenizer.ggml.pre"
# Keys for people, or checked by the reader of the file.
_IGNORED_KEYS = re.compile(
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|license.*|url|doi"
    r"|uuid|repo_url|source\..*|base_model\..*|dataset\..*|tags|languages|file_type|quantization_version|alignment)"
    r"|split\..*|quantize\.imatrix\..*|quantforge\..*"
)
# Token roles that text generation does not use; a file may or may not have them.
_OPTIONAL_KEYS = {
    f"tokenizer.ggml.{role}_token_id" for role in ("unknown", "padding", "seperator", "mask", "eot")
}
# Names of pre-tokenizers that llama.cpp treats alike.
_EQUIVALENT_PRE_TOKENIZERS = (
    ("llama-bpe", "llama3", "llama-v3"), ("gpt-2", "phi-2"), ("qwen2", "deepseek-r1-qwen"), ("gpt-4o", "llama4"),
    ("default", ""),
)  # fmt: skip
# Keys of an architecture whose default is 0.
_ZERO_DEFAULT_KEYS = (
    "expert_count expert_used_count attention.sliding_window pooling_type attention.scale logit_scale residual_scale"
    " embedding_scale attn_logit_softcapping final_logit_softcapping expert_weights_scale"
)
_LOOKS_SPECIAL = re.compile(r"<.*>|\[.*\]|\uff5c.*")


def affects_model(key: str) -> bool:
    """Return whether llama.cpp, or a program that reads the file before it, uses a key."""
    return not _IGNORED_KEYS.fullmatch(key)


def llama_cpp_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that llama.cpp assumes for keys missing in a file with these ``keys``."""
    arch, tokenizer_model = keys.get("general.architecture"), str(keys.get("tokenizer.ggml.model"))
    model = {key.removeprefix(f"{arch}."): value for key, value in keys.items()}
    heads, width = model.get("attention.head_count"), model.get("embedding_length")
    head_width: Any = ABSENT
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        head_width = width // heads
    tokens, is_sentencepiece = keys.get(TOKENS_KEY), tokenizer_model == "llama"  # of sentencepiece
    model_defaults = {
        "attention.head_count_kv": model.get("attention.head_count", ABSENT), "attention.key_length": head_width,
        "attention.value_length": head_width, "rope.dimension_count": model.get("attention.key_length", head_width),
        "rope.scaling.original_context_length": model.get("context_length", ABSENT),
        "vocab_size": len(tokens) if isinstance(tokens, list) else ABSENT, "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 10000.0, "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.finetuned": True, "tensor_data_layout": "", "attention.causal": True,
        "use_parallel_residual": True, **dict.fromkeys(_ZERO_DEFAULT_KEYS.split(), 0),
    }  # fmt: skip
    tokenizer_defaults: dict[str, Any] = {
        "add_space_prefix": is_sentencepiece,
        "add_bos_token": adds_bos_by_default(tokenizer_model, str(keys.get(PRE_TOKENIZER_KEY, ABSENT))),
        "add_eos_token": False, "add_sep_token": False, "token_type_count": 0, "remove_extra_whitespaces": False,
        "pre": "default", "precompiled_charsmap": [], "bos_token_id": 1 if is_sentencepiece else 11,
        "eos_token_id": 2 if is_sentencepiece else 11, "eot_token_id": ABSENT,
        **({"unknown_token_id": 0} if is_sentencepiece else {}),
    }  # fmt: skip
    result = {f"{arch}.{key}": value for key, value in model_defaults.items()}
    result |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer_defaults.items()}
    return {**result, "general.type": "model"}


def check_gguf_keys(report: Report, artifact: Artifact, source: SourceModel) -> None:
    """Report keys of a GGUF file that contradict the source, and check the vision tower file next to it."""
    checkpoint = artifact.checkpoint
    if report.path.is_dir():
        report.skip("only a GGUF file has them", "gguf-keys")
        return
    check_tower_file(report, source)
    if not isinstance(checkpoint, GgufCheckpoint):
        return
    file, name = checkpoint.file, report.path.name
    try:
        expected, computed = expected_keys(file, source)
    except (InputError, RefusedError) as error:
        report.skip(f"the keys cannot be derived from the source: {error.message}", "gguf-keys")
        return
    keys = {key: value.value for key, value in file.metadata.items()}
    for text, severity in key_differences(keys, expected):
        report.add("gguf-keys", name, text, severity)
    if computed is not None:
        _check_frequencies(report, file, computed)


def expected_keys(
    file: GgufFile, source: SourceModel
) -> tuple[dict[str, Any], HyperParameters | None]:
    """Return the keys derived from the source, and the hyperparameters computed from its configuration.

    Raises:
        InputError, RefusedError: as `translate_parameters` and `vocabulary`.
    """
    checkpoint = source.checkpoint
    if isinstance(checkpoint, GgufCheckpoint):
        return {key: value.value for key, value in checkpoint.file.metadata.items()}, None
    config = source.model_layout.config
    parameters = translate_parameters(config)
    rows = next(t.header.shape[0] for t in source.model_layout.tensors if t.role is Role.EMBEDDING)
    try:
        vocabulary_keys = vocabulary(checkpoint.path, rows, config)
    except RefusedError:
        vocabulary_keys = vocabulary(
            checkpoint.path, rows, config, file.value(PRE_TOKENIZER_KEY, str, "default")
        )
    values = {key: value.value for key, value in (parameters.keys | vocabulary_keys.keys()).items()}
    plain_values = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    return {"general.architecture": parameters.family.arch, **plain_values}, parameters


def key_differences(
    keys: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[tuple[str, Severity]]:
    """Yield a message and its severity for every key that changes what llama.cpp computes."""
    defaults = llama_cpp_defaults({**expected, **keys})
    for key in filter(affects_model, {**expected, **keys}):
        default, name = defaults.get(key, ABSENT), shorten(key)
        if key in keys and key in expected:
            if format_difference := _describe_difference(key, keys, expected[key]):
                yield f"{name}: {format_difference}", Severity.ERROR
        elif key in expected:
            if key not in _OPTIONAL_KEYS and not trees_equal(default, expected[key]):
                yield (
                    f"{name} is missing, the source has {format_value(expected[key])}",
                    Severity.ERROR,
                )
        elif not trees_equal(default, keys[key]):
            text = f"{name} = {format_value(keys[key])} does not follow from the source; llama.cpp"
            if key in defaults or key.startswith("tokenizer.chat_template"):
                yield f"{text} obeys it", Severity.ERROR
            else:
                yield f"{text} may obey it", Severity.WARNING


def _describe_difference(key: str, keys: Mapping[str, Any], expected: Any) -> str:
    """Describe how a key differs from the expected value; "" if both mean the same to llama.cpp."""
    value = keys[key]
    if isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        if key == SCORES_KEY:  # they rank the pieces that are joined
            value, expected = (_merge_order(scores, keys) for scores in (value, expected))
        differ = [
            n for n, (a, b) in enumerate(zip(value, expected, strict=True)) if not trees_equal(a, b)
        ]
        tokens = keys.get(TOKENS_KEY)
        if key == TOKEN_TYPES_KEY and isinstance(tokens, list) and len(tokens) == len(value):
            # Other converters mark tokens as control tokens by their looks.
            differ = [
                n
                for n in differ
                if (value[n], expected[n]) != (TokenType.CONTROL, TokenType.USER_DEFINED)
                or not _LOOKS_SPECIAL.fullmatch(str(tokens[n]))
            ]
        if not differ:
            return ""
        first = differ[0]
        return f"{len(differ)} entries differ, e.g. at {first}: {format_difference(value[first], expected[first])}"
    if key == PRE_TOKENIZER_KEY and any(
        value in names and expected in names for names in _EQUIVALENT_PRE_TOKENIZERS
    ):
        return ""
    if isinstance(value, str) and isinstance(expected, str) and "chat_template" in key:
        value, expected = value.removesuffix("\n"), expected.removesuffix("\n")
    return "" if trees_equal(value, expected) else format_difference(value, expected)


def _merge_order(scores: list[Any], keys: Mapping[str, Any]) -> list[int]:
    """Return the indices of ordinary multi-character pieces, from the highest score to the lowest."""
    pieces = zip(scores, keys.get(TOKENS_KEY, []), keys.get(TOKEN_TYPES_KEY, []), strict=False)
    numbers = {
        n: score if isinstance(score, float) else -math.inf
        for n, (score, piece, kind) in enumerate(pieces)
        if kind == TokenType.NORMAL and len(str(piece)) > 1
    }
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


def _check_frequencies(report: Report, file: GgufFile, parameters: HyperParameters) -> None:
    """Check that the file has exactly the tables of rotary frequencies that the configuration requires."""
    expected = {
        tensor.name: memoryview(tensor.fixed or b"").cast("f").tolist()
        for tensor in parameters.computed
    }
    stored = {
        name: read_tensor(tensor.raw()).float().flatten().tolist()
        for name, tensor in file.tensors.items()
        if name.startswith("rope_f")
    }
    for name in sorted({**stored, **expected}):
        values, expected_values = stored.get(name, []), expected.get(name, [])
        are_close = (
            math.isclose(a, b, rel_tol=1e-5) for a, b in zip(values, expected_values, strict=False)
        )
        if len(values) != len(expected_values) or not all(are_close):
            report.add("gguf-keys", name, "differs from the source's rotary embedding")


def check_tower_file(report: Report, source: SourceModel) -> None:
    """Compare the vision tower file next to a GGUF file, if there is one, with the source: keys and tensors."""
    tower_path = report.path.with_name(projector_name(report.path))
    if not tower_path.is_file():
        return
    try:
        file, expected = read_gguf(tower_path), projector_file(source.checkpoint, tower_path.name)
        expected_names = {stored.name for stored, _ in expected.plan.places}
        for name, value in expected.values(source.checkpoint):
            entry = file.tensors.get(name)
            if entry and not torch.equal(read_tensor(entry.raw()).to(value.dtype), value):
                report.add(
                    "unquantized-changed", tower_path.name, f"{name} differs from the source's"
                )
    except (InputError, RefusedError) as error:
        report.add(
            "unreadable", tower_path.name, f"cannot be compared with the source: {error.message}"
        )
        return
    for name in sorted(expected_names ^ file.tensors.keys()):
        problem = "is missing" if name in expected_names else "is not part of the tower"
        report.add("incomplete", tower_path.name, f"{shorten(name)} {problem}")
    keys_of_file, expected_keys_of_file = (
        {key: value.value for key, value in keys.items() if key.startswith(f"{ARCH}.")}
        for keys in (file.metadata, expected.keys)
    )
    for text, severity in key_differences(keys_of_file, expected_keys_of_file):
        report.add("gguf-keys", tower_path.name, text, severity)
