"""``config.json`` against the source's: a copy saved by transformers passes, any other change is found.

What a loader would compute otherwise is an error; what no loader is known to read, or only training does, a warning.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantforge.verification.findings import Report
from quantforge.verification.side_files import SideFiles, compare_files

Document = dict[str, Any]
_COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 256, "hidden_size": 64,
           "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
           "use_cache": True, "vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1,
           "rms_norm_eps": 1e-5}  # fmt: skip
# As released by their publishers: older spellings, nulls, keys that the class does not know.
RELEASED: dict[str, Document] = {
    "llama": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5,
              "eos_token_id": [1, 2], "max_position_embeddings": 131072, "tie_word_embeddings": True,
              "transformers_version": "4.45.0.dev0", "pretraining_tp": 1, "attention_bias": False, "rope_scaling": {
                  "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                  "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "mistral": {**_COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_theta": 1e6,
                "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.34.0.dev0"},
    "qwen2": {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000,
              "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 2,
              "transformers_version": "4.43.1"},
    "gemma3": {**_COMMON, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "rope_theta": 1000000,
               "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 16, "sliding_window_pattern": 6,
               "cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
               "transformers_version": "4.50.0.dev0"},
    "multimodal": {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
                   "image_token_index": 300, "mm_tokens_per_image": 4, "torch_dtype": "bfloat16",
                   "text_config": {"hidden_size": 64, "model_type": "gemma3_text", "num_hidden_layers": 2,
                                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 16},
                   "vision_config": {"hidden_size": 32, "model_type": "siglip_vision_model", "num_hidden_layers": 1}},
    "phi3": {**_COMMON, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "rope_scaling": None,
             "original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "sliding_window": 2047,
             "_name_or_path": "phi"},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2,
             "n_positions": 128, "n_ctx": 128, "task_specific_params": {"text-generation": {"max_length": 50}}},
    "deepseek": {**_COMMON, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": 1e4,
                 "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                                  "original_max_position_embeddings": 4096, "type": "yarn"}},
}  # fmt: skip


def as_saved_by_transformers(config: Document) -> Document:
    """Return a configuration as transformers saves it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    document: Document = json.loads(parsed.to_json_string())
    return document


def find_differences(
    config_document: Document, other: Document, tensors: dict[str, str] | None = None
) -> list[str]:
    report = Report(Path("m"))
    compare_files(report, SideFiles(config_document, tensors=tensors or {}), SideFiles(other))
    findings = [item for item in report.findings if item.check == "configuration"]
    assert all(item.where == "config.json" for item in findings)
    return [f"{item.severity} {item.detail}" for item in findings]


@pytest.mark.parametrize("name", RELEASED)
def test_files_saved_by_transformers_pass(name):
    released = RELEASED[name]
    assert find_differences(as_saved_by_transformers(released), released) == []
    assert find_differences(released, as_saved_by_transformers(released)) == []


def json_paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from json_paths(value, (*path, key))


def other_than(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return 7
    return []


def with_value(document: Document, path: tuple[Any, ...], value: Any = ...) -> Document:
    """Return a copy of a document with another value at a path, or without it."""
    edited = copy.deepcopy(document)
    node: Any = edited
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return edited


# Their absence means the same to transformers: it has the same default, or does not know them.
OPTIONAL_KEYS = {"use_cache", "transformers_version", "_name_or_path", "tie_word_embeddings"}


# What transformers ignores: notes, a window that is switched off, a family inside of another.
IGNORED = {"_name_or_path", "transformers_version", "qwen2 sliding_window", "multimodal model_type"}


@pytest.mark.parametrize("name", RELEASED)
def test_every_changed_or_added_configuration_key_is_found(name):
    config = RELEASED[name]
    for path in json_paths(config):
        value: Any = config
        for key in path:
            value = value[key]
        if not {path[-1], f"{name} {path[-1]}"} & IGNORED or path == ("model_type",):
            assert find_differences(with_value(config, path, other_than(value)), config), path
        if isinstance(path[-1], str):
            (finding,) = find_differences(
                with_value(config, (*path[:-1], "added_by_nobody"), 1), config
            )
            assert finding.startswith("warning"), finding


@pytest.mark.parametrize("name", RELEASED)
def test_a_missing_key_is_found_if_its_default_differs(name):
    config = RELEASED[name]
    whole = as_saved_by_transformers(config)
    for key in config.keys() - OPTIONAL_KEYS:
        gone = as_saved_by_transformers(with_value(config, (key,))) if key != "model_type" else {}
        if any(gone.get(other_key) != value for other_key, value in whole.items()):
            assert find_differences(with_value(config, (key,)), config), key


# What is added to a configuration of Mistral, and how bad it is.
ADDED: dict[str, tuple[Any, str]] = {
    "rope_scaling": ({"rope_type": "linear", "factor": 4.0}, "error"),
    "auto_map": ({"AutoModelForCausalLM": "modeling_x.X"}, "error"),
    "_attn_implementation_internal": ("x/y", "error"),
    "max_position_embeddings": (1 << 21, "error"),
    "attention_dropout": (0.5, "warning"),
    "architectures": (["OtherForCausalLM"], "error"),
    "num_labels": (1 << 60, "warning"),
    "transformers_weights": ("other.safetensors", "warning"),
    "head_dim": (8, "error"),
    "layer_types": (["full_attention"], "warning"),
    "torch_dtype": ("float32", "warning"),
    "use_cache": (False, "warning"),
}


@pytest.mark.parametrize("key", ADDED)
def test_an_added_key_is_an_error_if_loaders_use_it(key):
    config = RELEASED["mistral"]
    value, severity = ADDED[key]
    findings = find_differences({**config, key: value}, config)
    assert any(item.startswith(severity) for item in findings), findings
    assert severity == "error" or not any(item.startswith("error") for item in findings)


def test_a_built_in_attention_implementation_passes():
    config = RELEASED["mistral"]
    assert find_differences({**config, "_attn_implementation": "sdpa"}, config) == []


def test_older_and_newer_key_spellings_must_agree():
    config = as_saved_by_transformers(RELEASED["llama"])
    scaling = RELEASED["llama"]["rope_scaling"]
    assert find_differences({**config, "rope_theta": 5e5}, config) == []
    assert find_differences({**config, "rope_scaling": scaling, "rope_theta": 5e5}, config) == []
    assert find_differences({**config, "rope_theta": 1e4}, config)
    assert find_differences({**config, "torch_dtype": "bfloat16"}, config) == []
    assert find_differences({**config, "torch_dtype": "float64"}, config)
    assert find_differences({**config, "rope_scaling": {**scaling, "factor": 2.0}}, config)


def test_null_equals_absent_only_without_a_default():
    config = RELEASED["mistral"]  # its window is null, the default of the family 4096
    assert find_differences({**config, "pad_token_id": None}, config) == []
    assert find_differences({key: config[key] for key in config if key != "sliding_window"}, config)


def test_a_separately_quantized_head_may_be_untied():
    config = RELEASED["llama"]
    edited = {**config, "tie_word_embeddings": False}
    assert find_differences(edited, config)
    assert find_differences(edited, config, {"lm_head.weight_packed": "I32"}) == []


def test_an_unreadable_configuration_is_compared_literally():
    config = {**RELEASED["llama"], "model_type": "of_nobody", "width": 3}
    assert find_differences({**config, "use_cache": True}, config) == []
    assert find_differences({**config, "width": 4}, config)[0].startswith("error")
    edited = {**RELEASED["llama"], "num_attention_heads": "x"}
    assert any(
        "num_attention_heads = 'x'" in item for item in find_differences(edited, RELEASED["llama"])
    )


def test_configuration_values_are_printed_escaped_and_short():
    config = RELEASED["llama"]
    for edited in ({**config, "x\x1b[2J\u202e": "a\x07b\u2066"}, {**config, "vocab_size": 10**400}):
        text = "".join(find_differences(edited, config))
        assert text.isprintable()
        assert 0 < len(text) < 600
