"""``config.json`` against the source's: rewritten by transformers it passes, with anything else changed it does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quantforge.verification.beside.facts import Beside, Pair
from quantforge.verification.beside.model_configuration import configuration_changes
from quantforge.verification.findings import Severity

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


def saved(config: Document) -> Document:
    """As transformers writes it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    found: Document = json.loads(parsed.to_json_string())
    return found


def judged(own: Document, other: Document) -> list[str]:
    return [
        f"{severity} {change}" for change, severity, _ in configuration_changes(pair(own, other))
    ]


def pair(own: Document, other: Document) -> Pair:
    return Pair(Beside(own), Beside(other))


@pytest.mark.parametrize("name", RELEASED)
def test_what_transformers_saves_means_the_same(name):
    released = RELEASED[name]
    assert judged(saved(released), released) == []
    assert [item for item in judged(released, saved(released)) if item.startswith("error")] in (
        [],
        ["error sliding_window = 32768, the source has None"],
    )


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


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


def changed(document: Document, path: tuple[Any, ...], value: Any = ...) -> Document:
    """A copy with another value at a place, or without it."""
    found = copy.deepcopy(document)
    node: Any = found
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return found


# Keys whose absence every reader understands, or that no reader obeys: see the table of reasons.
MAY_GO = {"use_cache", "transformers_version", "_name_or_path", "task_specific_params"}


@pytest.mark.parametrize("name", RELEASED)
def test_every_changed_added_or_missing_key_is_found(name):
    config = RELEASED[name]
    for path in places(config):
        value: Any = config
        for key in path:
            value = value[key]
        if path[-1] not in {"_name_or_path"}:
            assert judged(changed(config, path, other_than(value)), config), path
        if isinstance(path[-1], str):
            if value is not None and path[-1] not in MAY_GO:
                gone = judged(changed(config, path), config)
                assert gone or (path[-1], value) == ("tie_word_embeddings", True), path
            assert judged(changed(config, (*path[:-1], "added_by_nobody"), 1), config), path


ADDED = {
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
    "max_position_embeddings": 1 << 20,
    "attention_dropout": 0.5,
    "_attn_implementation_internal": "x/y",
    "architectures": ["OtherForCausalLM"],
    "num_labels": 1 << 60,
    "transformers_weights": "other.safetensors",
    "head_dim": 8,
    "layer_types": ["full_attention"],
}


@pytest.mark.parametrize("key", ADDED)
def test_a_key_that_a_loader_obeys_is_found_when_it_is_added(key):
    config = RELEASED["mistral"]
    assert [item for item in judged({**config, key: ADDED[key]}, config) if key in item]


def test_an_older_spelling_beside_the_newer_has_to_say_the_same():
    config = saved(RELEASED["llama"])
    assert judged({**config, "rope_theta": 5e5}, config) == []
    assert judged({**config, "rope_theta": 1e4}, config)
    assert judged({**config, "rope_scaling": RELEASED["llama"]["rope_scaling"]}, config)
    assert (
        judged(
            {**config, "rope_scaling": RELEASED["llama"]["rope_scaling"], "rope_theta": 5e5}, config
        )
        == []
    )


def test_a_null_is_the_same_as_nothing_only_without_a_default():
    config = RELEASED["mistral"]  # its window is null, the default of the family 4096
    assert judged({**config, "pad_token_id": None}, config) == []
    assert judged({key: config[key] for key in config if key != "sliding_window"}, config)


def test_a_head_that_was_quantized_by_itself_may_be_untied():
    config = RELEASED["llama"]
    own = {**config, "tie_word_embeddings": False}
    head = frozenset({"lm_head.weight_packed"})
    assert judged(own, config)
    assert configuration_changes(Pair(Beside(own, tensors=head), Beside(config))) == []


def test_a_change_that_only_other_loaders_notice_is_a_warning():
    config = RELEASED["llama"]
    ((change, severity, _),) = configuration_changes(
        pair(changed(config, ("attention_bias",)), config)
    )
    assert (change.key, severity) == ("attention_bias", Severity.WARNING)


def test_no_value_of_an_artifact_is_printed_raw():
    config = RELEASED["llama"]
    for own in ({**config, "x\x1b[2J\u202e": "a\x07b\u2066"}, {**config, "vocab_size": 10**5000}):
        text = "".join(judged(own, config))
        assert text.isprintable()
        assert len(text) < 400
