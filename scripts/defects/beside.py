"""Defects beside the weights of a directory: configuration, tokenizer, settings, files added and removed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from scripts.defects.files import Copy, Shard
from scripts.defects.values import mutated

# Keys that a configuration may gain, with values that some loader acts on.
CONFIGURATION: dict[str, Any] = {
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 500000.0,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 131072,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention"] * 6,
    "bos_token_id": 5,
    "eos_token_id": [0, 7],
    "pad_token_id": 3,
    "decoder_start_token_id": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-3,
    "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 100,
    "logit_scale": 0.5,
    "head_dim": 32,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "dtype": "float16",
    "attn_implementation": "eager",
    "_attn_implementation": "someone/kernel",
    "custom_pipelines": {"text-generation": {"impl": "x.Pipeline"}},
    "pretraining_tp": 2,
    "initializer_range": 0.5,
    "use_cache": False,
    "is_decoder": False,
    "tokenizer_class": "BertTokenizer",
    "text_config": {"rope_theta": 5.0},
    "x_note": "harmless",
}
QUANTIZATION: dict[str, Any] = {
    "ignore": ["lm_head", "model.layers.0.mlp.down_proj"],
    "modules_to_not_convert": ["down_proj"],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    },
    "bits": 8,
    "group_size": 64,
    "desc_act": True,
    "sym": False,
    "checkpoint_format": "gptq_v2",
    "zero_point": False,
    "version": "gemv",
    "dynamic": {"-:.*down_proj": {}},
    "sparsity_config": {"format": "sparse-24-bitmask"},
    "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}},
    "activation_scheme": "static",
    "weight_block_size": [64, 64],
    "llm_int8_skip_modules": ["lm_head", "o_proj"],
    "load_in_8bit": True,
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": True,
    "mode": "mxfp4",
    "quant_method": "awq",
}
TOKENIZER_SETTINGS: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": True,
    "add_prefix_space": True,
    "model_max_length": 16,
    "padding_side": "left",
    "truncation_side": "left",
    "clean_up_tokenization_spaces": True,
    "bos_token": "the",
    "eos_token": "the",
    "unk_token": "the",
    "pad_token": "the",
    "additional_special_tokens": ["the"],
    "extra_special_tokens": {"image_token": "the"},
    "added_tokens_decoder": {"300": {"content": "the", "special": True, "lstrip": True, "normalized": False,
                                     "rstrip": True, "single_word": False}},
    "chat_template": "{{ 'visit' }}",
    "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
    "tokenizer_class": "BertTokenizer",
    "split_special_tokens": True,
    "spaces_between_special_tokens": True,
    "x_note": "harmless",
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "eos_token_id": [0, 5], "bos_token_id": 7, "pad_token_id": 9, "temperature": 5.0, "top_k": 1, "top_p": 0.1,
    "do_sample": True, "max_new_tokens": 3, "max_length": 3, "repetition_penalty": 3.0, "suppress_tokens": [1, 2],
    "forced_eos_token_id": 4, "forced_bos_token_id": 4, "bad_words_ids": [[5]], "begin_suppress_tokens": [4],
    "stop_strings": ["the"], "num_beams": 4, "custom_generate": "x", "cache_implementation": "quantized",
    "min_new_tokens": 9, "no_repeat_ngram_size": 1, "typical_p": 0.2, "x_note": "harmless",
}  # fmt: skip
SPECIAL: dict[str, Any] = {
    "bos_token": "the", "eos_token": "the", "unk_token": "the", "pad_token": "a",
    "additional_special_tokens": ["the", "a"],
    "eos_token_": "harmless",
}  # fmt: skip
CODE = b"raise SystemExit('code of a model was run')\n"
PICKLE = (
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\x05print\x94\x93\x94."
)
# Files that may be added.
ADDED: dict[str, bytes] = {
    "modeling_x.py": CODE,
    "configuration_x.py": CODE,
    "tokenization_x.py": CODE,
    "handler.py": CODE,
    "custom_generate/generate.py": CODE,
    "pytorch_model.bin": PICKLE,
    "model.pt": PICKLE,
    "training_args.bin": PICKLE,
    "consolidated.00.pth": PICKLE,
    "pytorch_model.bin.index.json": b'{"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}',
    "model.safetensors.index.json": b'{"metadata": {}, "weight_map": {"lm_head.weight": "x.safetensors"}}',
    "adapter_config.json": b'{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path":1}',
    "adapter_model.bin": PICKLE,
    "chat_template.jinja": b"{{ 'visit' }}",
    "chat_template.json": b'{"chat_template": "{{ 1 }}"}',
    "additional_chat_templates/tool_use.jinja": b"{{ 'visit' }}",
    "generation_config.json": b'{"eos_token_id": 3, "do_sample": true, "temperature": 9.0}',
    "special_tokens_map.json": b'{"eos_token": "the", "bos_token": "a"}',
    "added_tokens.json": b'{"the": 300, "<evil>": 301}',
    "vocab.json": b'{"a": 0, "b": 1}',
    "merges.txt": b"#version: 0.2\na b\n",
    "vocab.txt": b"a\nb\n",
    "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
    "tekken.json": b'{"config": {}, "vocab": []}',
    "quantize_config.json": b'{"bits": 8, "group_size": 32, "desc_act": true, "sym": false}',
    "quant_config.json": b'{"w_bit": 8, "q_group_size": 32, "zero_point": true}',
    "hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}',
    "params.json": b'{"dim": 64, "n_layers": 1}',
    "preprocessor_config.json": b'{"processor_class": "X", "auto_map": {"AutoProcessor": "x.X"}}',
    "processor_config.json": b'{"processor_class": "X"}',
    "config_sentence_transformers.json": b'{"prompts": {"query": "x"}}',
    "modules.json": b'[{"idx": 0, "name": "0", "path": "", "type": "x.X"}]',
    "model.gguf": b"GGUF\x03\x00\x00\x00",
    "model.onnx": b"\x08\x07",
    "flax_model.msgpack": b"\x80",
    "tf_model.h5": b"\x89HDF",
    "setup.py": CODE,
    "x.so": b"\x7fELF",
    "notes.txt": b"harmless\n",
    "picture.png": b"\x89PNG",
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "NOTICE": b"harmless\n",
}
WEIGHTS = ("model-00002-of-00002.safetensors", "consolidated.safetensors", "adapter_model.safetensors",
           "model.fp16.safetensors", "extra.safetensors")  # fmt: skip


# Kinds of files that may be added, each as often as the others.
SORTS: dict[str, tuple[str, ...]] = {
    "pickled weights": ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "adapter_model.bin"),
    "second weights": WEIGHTS,
    "index": ("pytorch_model.bin.index.json", "model.safetensors.index.json"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "code": ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "handler.py", "custom_generate/generate.py"),
    "tokenizer": ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "added_tokens.json",
                  "special_tokens_map.json"),
    "template": ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    "configuration": ("generation_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
                      "params.json", "preprocessor_config.json", "processor_config.json", "modules.json"),
    "any": (*ADDED, *WEIGHTS),
}  # fmt: skip


def configuration(copy: Copy, chance: random.Random) -> str | None:
    """Change, add or remove a key of ``config.json`` that does not speak of quantization."""
    document = copy.json("config.json")
    if document is None:
        return None
    held = {
        key: document.pop(key) for key in ("quantization_config", "quantization") if key in document
    }
    text = mutated(document, chance, CONFIGURATION)
    copy.write_json("config.json", {**document, **held})
    return text and f"config.json: {text}"


def quantization(copy: Copy, chance: random.Random) -> str | None:
    """Change what ``config.json`` or a file beside it says of the quantization."""
    document = copy.json("config.json")
    if document is None:
        return None
    name, outer = "config.json", document
    keys = [key for key in ("quantization_config", "quantization") if key in document]
    beside = [n for n in ("quantize_config.json", "quant_config.json") if n in copy.names()]
    if beside and chance.random() < 0.25:
        name = chance.choice(beside)
        outer = held = copy.json(name)
    elif keys:
        held = document[chance.choice(keys)]
    else:
        return None
    text = mutated(held, chance, QUANTIZATION)
    copy.write_json(name, outer)
    return text and f"{name}: quantization: {text}"


def settings(copy: Copy, chance: random.Random) -> str | None:
    """Change settings of the tokenizer or of generation, special tokens, or a template."""
    tables = {"tokenizer_config.json": TOKENIZER_SETTINGS, "generation_config.json": GENERATION,
              "special_tokens_map.json": SPECIAL}  # fmt: skip
    there = [name for name in (*tables, "chat_template.jinja") if name in copy.names()]
    if not there:
        return None
    name = chance.choice(there)
    if name == "chat_template.jinja":
        text = copy.read(name).decode()
        at = chance.randrange(len(text) + 1)
        piece = chance.choice(("{{ 'visit' }}", " ", "\n", "{# note #}", "x"))
        copy.write(name, (text[:at] + piece + text[at:]).encode())
        return f"{name}: {piece!r} at {at}"
    document = copy.json(name)
    text = mutated(document, chance, tables[name])
    copy.write_json(name, document)
    return text and f"{name}: {text}"


def added(copy: Copy, chance: random.Random) -> str | None:
    """Add a file that some loader reads or runs, or one that none does."""
    if copy.one_file:
        return None
    names = [n for n in SORTS[chance.choice(sorted(SORTS))] if n not in copy.names()]
    if not names:
        return None
    name = chance.choice(names)
    if name in WEIGHTS:
        first = next(n for n in copy.names() if n.endswith(".safetensors"))
        shard = Shard(copy, first)
        flat = np.frombuffer(shard.data, "u1")
        flat[:: chance.choice((7, 97))] ^= 1
        shard.save()
        data = copy.read(first)
        copy.write(first, (copy.original / first).read_bytes())
        copy.changed.discard(first)
        copy.write(name, data)
    else:
        copy.write(name, ADDED[name])
    return f"{name} added"


def removed(copy: Copy, chance: random.Random) -> str | None:
    """Remove a file, but for the weights of a model that has one."""
    shards = [name for name in copy.names() if name.endswith(".safetensors")]
    names = [name for name in copy.names() if name not in shards or len(shards) > 1]
    if copy.one_file or not names:
        return None
    name = chance.choice(names)
    copy.remove(name)
    return f"{name} removed"
