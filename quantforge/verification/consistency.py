"""Check the files of one model against each other and against its tensors, without a source.

The readers of the formats already refuse a configuration that does not fit the headers of the tensors. This module
checks the rest: settings that only some loaders refuse or read differently, flags that only the values of the tensors
contradict, and files that repeat the content of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.architectures import text_config
from quantforge.architectures.match import Role
from quantforge.errors import InputError, IntegrityError
from quantforge.files.reader import CONFIG_FILE
from quantforge.formats import kv_scales
from quantforge.formats.compressed_tensors.groups import (
    MIXED_PRECISION,
    input_arguments,
    parse_group,
    weight_arguments,
)
from quantforge.formats.configuration import name_variants, quantization_config
from quantforge.verification.findings import Report
from quantforge.verification.json_diff import (
    ABSENT,
    format_value,
    iterate_changes,
    shorten,
    trees_equal,
)
from quantforge.verification.opening import Artifact
from quantforge.verification.side_files import (
    CODE_LOADING_KEYS,
    GENERATION,
    KNOWN_ATTENTION_KERNELS,
    QUANTIZATION_FILES,
    SETTINGS,
    TOKENIZER,
    SideFiles,
    normalize_tokenizer,
    read_side_files,
    token_ids,
)

# Settings that determine how codes are read, with the default that loaders assume (`ABSENT`: it may be missing).
# GPTQModel reads quantize_config.json before config.json, vLLM and transformers read config.json.
_DECODING_SETTINGS: Mapping[str, Any] = {
    "bits": None, "group_size": None, "sym": True, "zero_point": True, "desc_act": False, "lm_head": False,
    "dynamic": {}, "extra_config": {}, "format": ABSENT, "checkpoint_format": ABSENT, "quant_method": ABSENT,
}  # fmt: skip
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
# Keys that vLLM or transformers require, by format.
_REQUIRED_KEYS = {
    "gptq": "desc_act sym", "gptq_v2": "desc_act sym checkpoint_format", "awq": "zero_point", "mlx": "bits group_size",
    "bnb": "load_in_4bit load_in_8bit", "compressed-tensors": "quantization_status",
}  # fmt: skip
# Keys of a compressed-tensors group; defaults of its arguments; arguments without influence on loading.
_GROUP_KEYS = {"targets", "weights", "input_activations", "format"}
_DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
}
_IGNORED_ARGUMENTS = {"observer", "observer_kwargs", "zp_dtype"}
_KNOWN_ACT_ORDERS = (None, False, True, "group", "weight", "dynamic", "static")


def check_consistency(report: Report, artifact: Artifact) -> None:
    """Report files of a directory that are damaged or contradict each other or the tensors."""
    if not report.path.is_dir():
        return
    try:
        side_files = read_side_files(artifact)
    except InputError as error:
        report.add("unreadable", error.file or "", error.message)
        return
    rows = [t.header.shape[0] for t in artifact.model_layout.tensors if t.role is Role.EMBEDDING]
    find_contradictions(report, side_files, min(rows, default=0))
    try:
        for text in _doubtful_settings(artifact):
            report.warn("settings", CONFIG_FILE, text)
    except (InputError, IntegrityError):
        pass  # the checks of the tensors report this
    if report.source is None:
        for name, document in (
            (CONFIG_FILE, side_files.config),
            (SETTINGS, side_files.document(SETTINGS)),
        ):
            for key in CODE_LOADING_KEYS:
                if key in document and document[key] not in KNOWN_ATTENTION_KERNELS:
                    text = f"{key} lets a loader run code of the model or of another repository"
                    report.warn("settings", name, text)


def find_contradictions(report: Report, side_files: SideFiles, rows: int) -> None:
    """Report files that are damaged or contradict each other.

    Args:
        report: gets the findings.
        side_files: the side files.
        rows: number of rows of the embedding, 0 if unknown.
    """
    for name, text in side_files.damaged.items():
        report.add("settings", name, f"is damaged: {text}")
    for name, text in (*_conflicting_descriptions(side_files), *_description_conflicts(side_files)):
        report.add("settings", name, text)
    for name, text in (*_token_id_conflicts(side_files, rows), *_token_conflicts(side_files)):
        report.warn("settings", name, text)


# The quantization.


def _quantization_description(side_files: SideFiles) -> Mapping[str, Any]:
    description = side_files.config.get("quantization_config")
    return description if isinstance(description, Mapping) else {}


def _conflicting_descriptions(side_files: SideFiles) -> Iterator[tuple[str, str]]:
    """Yield file and message for every second description of the quantization that differs from the first."""
    description = _quantization_description(side_files)
    for name in sorted(QUANTIZATION_FILES & side_files.documents.keys()):
        first, second = (
            {_ALIASES.get(key, key): value for key, value in one.items() if value is not None}
            for one in (description, side_files.documents[name])
        )
        for key, default in _DECODING_SETTINGS.items():
            one, two = first.get(key, default), second.get(key, default)
            if not trees_equal(one, two) and (default is not ABSENT or ABSENT not in (one, two)):
                yield name, f"{key} = {format_value(two)}, {CONFIG_FILE} has {format_value(one)}"
    copies = {key: side_files.config.get(key) for key in ("quantization", "compression_config")}
    copies["text_config"] = text_config(side_files.config).get("quantization_config")
    for name, copy in copies.items():
        inner = copy.get("quantization_config", copy) if isinstance(copy, Mapping) else description
        if description and (change := next(iterate_changes(inner, description), None)):
            location, value = shorten(".".join((name, *change.path))), format_value(change.value)
            yield (
                CONFIG_FILE,
                f"{location} = {value}, quantization_config has {format_value(change.source_value)}",
            )


def _description_conflicts(side_files: SideFiles) -> Iterator[tuple[str, str]]:
    """Yield contradictions within ``quantization_config``, and settings that would damage valid weights."""
    description = _quantization_description(side_files)
    groups, format_name = (
        description.get("config_groups"),
        description.get("format") or MIXED_PRECISION,
    )
    group_list = [*groups.values()] if isinstance(groups, Mapping) else []
    group_formats = [group.get("format") for group in group_list if isinstance(group, Mapping)]
    for other in (description.get("checkpoint_format"), *group_formats):
        if format_name != MIXED_PRECISION and other not in (None, format_name):
            yield (
                CONFIG_FILE,
                f"format = {format_value(format_name)}, and elsewhere {format_value(other)}",
            )
    sparsity = description.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        yield (
            CONFIG_FILE,
            f"sparsity_config = {format_value(sparsity)}: loaders unpack the weights by it",
        )
    announced = (
        description.get("kv_cache_scheme")
        or description.get("quant_method") != "compressed-tensors"
    )
    if not announced and (scales := kv_scales.scale_names(side_files.tensors)):
        text = f"{scales[0]} is a scale of a KV cache ({len(scales)} in all)"
        yield CONFIG_FILE, f"kv_cache_scheme is missing, but {text}"


def _doubtful_settings(artifact: Artifact) -> Iterator[str]:
    """Yield settings that only some loaders refuse or assume, and flags that the tensors contradict.

    Raises:
        InputError, IntegrityError: a tensor cannot be read.
    """
    config = artifact.checkpoint.config
    description = config.get("quantization_config") or config.get("quantization")
    if not artifact.layouts or not isinstance(description, Mapping):
        return
    if "packing_format" not in description:  # AutoRound has keys of its own
        for key in _REQUIRED_KEYS.get(artifact.format.KEY, "").split():
            if key not in description:
                yield f"{key} is missing: loaders refuse the file, or assume what its tensors deny"
    quantization = quantization_config(config)
    if quantization.get("quant_method") == "compressed-tensors":
        yield from _doubtful_group_settings(artifact, quantization)
    elif quantization.get("quant_method") in {"gptq", "awq"}:
        yield from _doubtful_flags(artifact, quantization)


def _doubtful_group_settings(artifact: Artifact, quantization: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings of compressed-tensors groups that QuantForge would not write for the same schemes."""
    groups, config = quantization["config_groups"], artifact.checkpoint.config
    if "group_0" not in groups:
        yield "config_groups has no group_0, the only group that TensorRT-LLM reads"
    if (status := quantization.get("quantization_status")) not in (None, "compressed"):
        yield f"quantization_status = {format_value(status)}: loaders expect weights that are not packed"
    modules = [name for module in artifact.layouts for name in name_variants(module, config)]
    for name, group_settings in groups.items():
        group, location = (
            parse_group(group_settings, quantization),
            f"config_groups.{shorten(name)}",
        )
        if not any(group.match_rank(module) is not None for module in modules):
            yield f"{location}.targets = {format_value(group_settings.get('targets'))} name no quantized layer"
        for key in group_settings.keys() - _GROUP_KEYS:
            if group_settings[key] is not None:
                yield f"{location}.{shorten(key)} = {format_value(group_settings[key])}: loaders refuse or ignore it"
        for key, expected in (
            ("weights", weight_arguments(group.layer.weight)),
            ("input_activations", input_arguments(group.layer.input) or {}),
        ):
            arguments, expected_arguments = (
                _normalized_arguments(group_settings.get(key)),
                _normalized_arguments(expected),
            )
            if arguments.get("scale_dtype") is None:  # it follows from the format
                expected_arguments.pop("scale_dtype", None)
            for change in iterate_changes(arguments, expected_arguments, (location, key)):
                text = f"{location}.{key}.{shorten(change.path[-1])} = {format_value(change.value)}"
                yield f"{text}, the tensors and the rest of config.json ask for {format_value(change.source_value)}"


def _normalized_arguments(arguments: Any) -> dict[str, Any]:
    """Return arguments with the defaults of compressed-tensors, without those that have no influence."""
    if not isinstance(arguments, Mapping) or not arguments:
        return {}
    normalized = {
        key: value
        for key, value in arguments.items()
        if value is not None and key not in _IGNORED_ARGUMENTS
    }
    if normalized.get("actorder") in _KNOWN_ACT_ORDERS:
        normalized.pop("actorder", None)
    size = normalized.get("group_size", -1)
    strategy = "group" if size != -1 else "channel" if "group_size" in normalized else "tensor"
    return {**_DEFAULT_ARGUMENTS, "strategy": strategy, **normalized, "group_size": size}


def _doubtful_flags(artifact: Artifact, quantization: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags of GPTQ and AWQ files that all tensors contradict: act-order and zero points."""
    checkpoint, layouts = artifact.checkpoint, artifact.layouts.values()
    grouped = [
        layout.module for layout in layouts if layout.scheme.weight.groups(layout.shape[1]) > 1
    ]
    meta = quantization.get("meta")
    static = quantization.get("static_groups") or (
        isinstance(meta, Mapping) and meta.get("static_groups")
    )
    if quantization.get("desc_act") is True and grouped and not static:
        names = (f"{module}.g_idx" for module in grouped if f"{module}.g_idx" in checkpoint.entries)
        if all(bool((checkpoint.read(name).diff() >= 0).all()) for name in names):
            yield "desc_act = true, but the columns of every layer are in order"
    asymmetric = [layout for layout in layouts if not layout.scheme.weight.symmetric]
    zeros = (
        (artifact.unpack(layout).parameters["zeros"], layout.scheme.weight.bits)
        for layout in asymmetric
    )
    if asymmetric and all(bool((zero == 1 << (bits - 1)).all()) for zero, bits in zeros):
        flag = "sym" if quantization["quant_method"] == "gptq" else "zero_point"
        yield f"{flag} = {format_value(quantization.get(flag))}, but every zero point is that of symmetric weights"


# The vocabulary.


def _token_id_conflicts(side_files: SideFiles, rows: int) -> Iterator[tuple[str, str]]:
    """Yield file and message for every token id that the embedding does not have."""
    documents = {
        CONFIG_FILE: text_config(side_files.config),
        GENERATION: side_files.document(GENERATION),
    }
    for name, document in documents.items():
        for key, number in _values_of_keys(document, "_token_id", int):
            if rows and not -1 <= number < rows:
                yield name, f"{key} = {format_value(number)}, the embedding has {rows} rows"


def _token_conflicts(side_files: SideFiles) -> Iterator[tuple[str, str]]:
    """Yield file and message for tokens that ``tokenizer.json`` does not have, or has under another id."""
    try:
        tokens = token_ids(side_files.document(TOKENIZER))
        merges = normalize_tokenizer(side_files.document(TOKENIZER))["model"]["merges"]
    except InputError:
        return
    lines = side_files.files.get("merges.txt", b"").decode(errors="replace").splitlines()
    if lines and merges != [line for line in lines if line and not line.startswith("#version")]:
        yield "merges.txt", f"the merges are not those of {TOKENIZER}"
    for name in ("vocab.json", "added_tokens.json"):
        document = side_files.document(name)
        if change := next(
            iterate_changes(document, {key: tokens.get(key, ABSENT) for key in document}), None
        ):
            text = f"{format_value(change.path[0])} = {format_value(change.value)}"
            yield name, f"{text}, {TOKENIZER} has {format_value(change.source_value)}"
    roles = set(_values_of_keys(side_files.document(SETTINGS), "_token", str))
    for name in (SETTINGS, "special_tokens_map.json"):
        for key, text in _values_of_keys(side_files.document(name), "_token", str):
            if text not in tokens:
                yield name, f"{key} = {format_value(text)} is not a token of {TOKENIZER}"
            elif (key, text) not in roles and any(key == role for role, _ in roles):
                yield name, f"{key} = {format_value(text)} is not that of {SETTINGS}"


def _values_of_keys(
    document: Mapping[str, Any], suffix: str, kind: type
) -> Iterator[tuple[str, Any]]:
    """Yield the shortened key and the value of every entry whose key has a suffix and whose value has a type.

    Values may be lists, or tables with the value under ``content``.
    """
    for key, value in document.items():
        for item in value if isinstance(value, list) else [value]:
            content = item.get("content") if isinstance(item, Mapping) else item
            if key.endswith(suffix) and isinstance(content, kind):
                yield shorten(key), content
