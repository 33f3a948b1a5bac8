"""What lies beside the weights, against the source: configuration, tokenizer, chat template, licences.

A release of ours carries these files byte for byte. Other tools write them anew through transformers, so that for them
only a difference in meaning counts: another token, another template, another constant of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge import manifest
from quantforge.checkpoint.reader import LICENCES
from quantforge.errors import InputError
from quantforge.formats.opening import side_data
from quantforge.verify.artifact import Artifact, Source
from quantforge.verify.findings import Report
from quantforge.verify.structure import tokens_of

CONSTANTS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "hidden_activation", "activation_function",
    "sliding_window", "attention_bias", "mlp_bias", "tie_word_embeddings", "n_embd", "n_layer", "n_head",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor",
    "num_experts_per_tok", "num_local_experts", "num_experts", "norm_topk_prob", "bos_token_id", "eos_token_id",
)  # fmt: skip
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "add_eos_token")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TEMPLATE = "chat_template.jinja"


def check_side_files(report: Report, artifact: Artifact, source: Source) -> None:
    """Compare everything beside the weights with the source."""
    _check_constants(report, artifact, source)
    own, other = _files(artifact), _files(source)
    if not own and not report.path.is_dir():
        return
    strict = manifest.read(report.path) is not None and report.path.is_dir()
    for name in sorted(other):
        if name not in own:
            _missing(report, name)
        elif own[name] != other[name] and strict and source.checkpoint.path.is_dir():
            report.add("side-files", name, "is not the source's, byte for byte")
    _check_tokenizer(report, own, other)
    _check_template(report, own, other)


def _files(model: Artifact | Source) -> dict[str, bytes]:
    """Files beside the weights by name."""
    checkpoint = model.checkpoint
    if checkpoint.path.is_dir():
        return checkpoint.side_data()
    try:
        return side_data(checkpoint)
    except InputError:
        return {}


def _missing(report: Report, name: str) -> None:
    """Files that another may stand for are not missed here."""
    if name in {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}:
        report.add("side-files", name, "the source has it, the artifact does not")
    elif report.path.is_dir() and any(Path(name).match(pattern) for pattern in LICENCES):
        report.warn("side-files", name, "the source has it, the artifact does not")


def _check_constants(report: Report, artifact: Artifact, source: Source) -> None:
    own, other = artifact.matched.config, source.matched.config
    for key in CONSTANTS:
        if key in own and key in other and not _equal(own[key], other[key]):
            if key == "tie_word_embeddings" and own[key] is False:
                continue  # a head that was quantized by itself is no longer the embedding
            report.add(
                "configuration",
                "config.json",
                f"{key} = {own[key]!r}, the source has {other[key]!r}",
            )


def _equal(first: object, second: object) -> bool:
    """Equal, or equal as single-precision numbers; of tables the keys that both have."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return all(_equal(first[key], second[key]) for key in first.keys() & second.keys())
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return all(map(_equal, first, second))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second or first is None or second is None


def _check_tokenizer(report: Report, own: Mapping[str, bytes], other: Mapping[str, bytes]) -> None:
    name = "tokenizer.json"
    first, second = _parsed(own, name), _parsed(other, name)
    if name not in own or not second:
        return
    try:
        tokens, expected = tokens_of(first), tokens_of(second)
        same_merges = _merges(first) == _merges(second)
    except (AttributeError, KeyError, TypeError, ValueError):
        report.add("side-files", name, "is no tokenizer")
        return
    if differ := sorted(
        key for key in tokens.keys() | expected.keys() if tokens.get(key) != expected.get(key)
    ):
        text = f"{len(differ)} token(s) differ from the source, e.g. {differ[0]!r}"
        report.add("side-files", name, text)
    if not same_merges:
        report.add("side-files", name, "the merges are not the source's")
    if report.path.is_dir():
        for part in PARTS:
            if first.get(part) != second.get(part):
                report.add("side-files", name, f"{part} is not the source's")


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges in one spelling; two are in use."""
    merges = tokenizer["model"].get("merges") or []
    return [item if isinstance(item, str) else " ".join(item) for item in merges]


def _check_template(report: Report, own: Mapping[str, bytes], other: Mapping[str, bytes]) -> None:
    name = "tokenizer_config.json"
    first, second = _parsed(own, name), _parsed(other, name)
    if _template(own, first) != _template(other, second):
        place = TEMPLATE if TEMPLATE in own else name
        report.add("side-files", place, "the chat template is not the source's")
    for key in SPECIAL:
        if key in first and key in second and _text(first[key]) != _text(second[key]):
            report.add("side-files", name, f"{key} is not the source's")


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> object:
    """The chat template, wherever it lies; a file of its own takes precedence."""
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="replace").rstrip("\n")
    found = config.get("chat_template")
    return found.rstrip("\n") if isinstance(found, str) else found


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, Mapping) else token


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
