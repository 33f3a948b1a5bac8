"""What loaders read of an artifact, and in what a damaged copy differs from the healthy one.

Configuration, generation settings and the quantization's configuration are read by transformers, tokenizers by
transformers and tokenizers, keys by gguf-py; a file that was added counts if some loader reads or runs a file of that
name. Keys that no engine acts on do not count, nor do choices that any writer may make.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from scripts.defects.files import Copy
from scripts.defects.llama_reader import understood

# Nothing that is computed, tokenized or generated depends on these.
INERT = {
    "transformers_version", "_name_or_path", "initializer_range", "attention_dropout", "pretraining_tp", "use_cache",
    "x_note", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "problem_type", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "finetuning_task",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "_from_model_config", "is_decoder", "custom_pipelines", "decoder_start_token_id", "_attn_implementation",
    "attn_implementation", "tokenizer_class", "cross_attention_hidden_size", "add_cross_attention",
}  # fmt: skip
# Of a quantization's configuration: how it was made, or a choice of whoever runs it.
CHOICES = {
    "damp_percent", "dataset", "meta", "quantizer", "observer", "observer_kwargs", "quantization_status", "version",
    "global_compression_ratio", "bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight", "bnb_4bit_quant_storage", "damp_auto_increment", "static_groups", "true_sequential",
    "mse", "model_name_or_path", "model_file_base_name", "pack_dtype", "x_note", "exllama_config", "use_cuda_fp16",
    "cache_block_outputs", "batch_size", "block_name_to_quantize", "max_input_length", "use_exllama", "backend",
    "modules_in_block_to_quantize", "module_name_preceding_first_block", "tokenizer", "model_seqlen", "pad_token_id",
    "fuse_max_seq_len", "do_fuse", "modules_to_fuse", "exllama_version", "actorder", "_load_in_4bit", "_load_in_8bit",
}  # fmt: skip
# What is read of a file that repeats it.
BESIDE = {"bits", "group_size", "desc_act", "sym", "checkpoint_format", "lm_head", "dynamic", "quant_method", "w_bit",
          "q_group_size", "zero_point", "modules_to_not_convert"}  # fmt: skip
# Of GGUF: what a person reads.
PROSE = ("general.name", "general.author", "general.organization", "general.description", "general.license",
         "general.url", "general.repo_url", "general.basename", "general.finetune", "general.size_label",
         "general.tags",
         "general.languages", "general.base_model", "general.source", "general.dataset", "general.quantized_by",
         "general.version", "general.doi", "general.uuid", "quantforge.", "x.note", "quantize.imatrix")  # fmt: skip
# Files that no loader looks for.
UNREAD = {"notes.txt", "picture.png", ".gitattributes", "NOTICE", "LICENSE", "README.md", "training_args.bin",
          "setup.py", "recipe.yaml", "quantforge.manifest.json", "model.onnx", "training_log.jsonl"}  # fmt: skip
# Files whose effect is seen by asking the readers below.
ASKED = {"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
         "generation_config.json", "chat_template.jinja", "tokenizer_config.json"}  # fmt: skip
PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?  Two  spaces\n\n\ttabs 1234567 3.14",
    "naïve café 東京 😀👩‍👩‍👧 \u200b\ufb01 e\u0301 İstanbul \x00 ▁ Ġ <s> </s> <unk> <|endoftext|> <0x41>",
    " leading", "trailing ", "", "the", " of the ing", "def f(x):\n    return x ** 2  # comment",
)  # fmt: skip


def difference(copy: Copy, healthy: Path) -> str:
    """In what a loader sees a difference beside the numbers; empty if in nothing."""
    if copy.one_file:
        return _gguf(copy.path, healthy)
    for name in sorted(copy.changed):
        new = (copy.path / name).exists() and not (healthy / name).exists()
        if new and name not in UNREAD | ASKED:
            return f"{name} is read by a loader"
    texts = (
        _differs("configuration", _config, copy.path, healthy, copy.changed, ("config.json",)),
        _differs("quantization", _quantization, copy.path, healthy, copy.changed, ("config.json", "quant")),
        _differs("generation settings", _generation, copy.path, healthy, copy.changed, ("generation_config.json",)),
        _differs("tokenizer", _tokenizer, copy.path, healthy, copy.changed,
                 ("token", "vocab", "merges", "template", "special")),
    )  # fmt: skip
    return next(filter(None, texts), "")


def _differs(
    what: str, read: Any, path: Path, healthy: Path, changed: set[str], files: tuple[str, ...]
) -> str:
    if not any(part in name for name in changed for part in files):
        return ""
    expected = read(healthy)
    try:
        found = read.__wrapped__(path)
    except BaseException as error:  # libraries raise what they like at what is broken
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return f"{what} cannot be read: {type(error).__name__}: {error}"[:140]
    keys = [k for k in sorted(found.keys() | expected.keys()) if found.get(k) != expected.get(k)]
    return f"{what}: {keys[0]} is read as {str(found.get(keys[0]))[:60]}" if keys else ""


@cache
def _config(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    raw = json.loads((path / "config.json").read_bytes())
    with tempfile.TemporaryDirectory() as folder:  # alone, and never the code that it names
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    found["auto_map"] = raw.get("auto_map")
    known = _known_keys(found, raw)
    return {key: json.dumps(v, default=str) for key, v in found.items() if key in known}


def _known_keys(found: dict[str, Any], raw: dict[str, Any]) -> set[str]:
    """Keys that something acts on: transformers carries any other along."""
    from scripts.defects.beside import CONFIGURATION

    own = set(found) - set(raw)
    return (own | set(CONFIGURATION) | set(raw)) - INERT - {"quantization_config", "quantization"}


@cache
def _quantization(path: Path) -> dict[str, Any]:
    raw = json.loads((path / "config.json").read_bytes())
    found = {"config.json": raw.get("quantization_config") is None}
    if held := raw.get("quantization_config"):
        found |= _flat(_parsed(held))
    if held := raw.get("quantization"):  # of MLX, whose loader takes keys with dots for layers
        mine = {"group_size", "bits", "mode"}
        found |= _flat({k: v for k, v in held.items() if k in mine or "." in k}, "mlx")
    # A file beside it goes first; readers of such files go by the configuration where there is none.
    repeated = raw.get("quantization_config") or {}
    for name in ("quantize_config.json", "quant_config.json"):
        if (path / name).exists():
            repeated = repeated | json.loads((path / name).read_bytes())
    return found | _flat({k: v for k, v in repeated.items() if k in BESIDE}, "beside")


def _parsed(held: dict[str, Any]) -> dict[str, Any]:
    """A quantization's configuration as transformers understands it; that of MLX as it stands."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    if "quant_method" not in held and set(held) <= {"group_size", "bits", "mode"}:
        return held
    try:
        parsed: dict[str, Any] = AutoQuantizationConfig.from_dict(dict(held)).to_dict()
    except ImportError:  # a library that is not here reads it
        return held
    if held.get("quant_method") == "gptq":
        parsed |= {key: held.get(key) for key in ("dynamic", "checkpoint_format", "desc_act")}
        parsed["lm_head"] = bool(held.get("lm_head"))  # missing is false to GPTQModel and vLLM
    return parsed


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    """Leaves by their place, without those that are choices; null and a missing key are the same."""
    if isinstance(value, dict) and (value or not at):
        found: dict[str, Any] = {}
        for key, item in value.items():
            if key not in CHOICES:
                found |= _flat(item, f"{at}.{key}")
        return found
    return {} if value is None or value == [] else {at: json.dumps(value, default=str)}


@cache
def _generation(path: Path) -> dict[str, Any]:
    from transformers import GenerationConfig, PretrainedConfig

    if (path / "generation_config.json").exists():
        read = GenerationConfig.from_pretrained(path)
    else:  # as a loader makes it up
        config = PretrainedConfig(**json.loads((path / "config.json").read_bytes()))
        read = GenerationConfig.from_model_config(config)
    found = read.to_dict()
    return {
        k: json.dumps(v, default=str)
        for k, v in found.items()
        if k not in INERT and not k.startswith("_")
    }


@cache
def _tokenizer(path: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:  # without weights and configuration of generation
        for file in path.rglob("*"):
            if (
                file.is_file()
                and file.suffix in {".json", ".txt", ".jinja", ".model"}
                and "index" not in file.name
            ):
                place = Path(folder) / file.relative_to(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
        raw = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        found |= {f"raw {k}": v for k, v in _behaviour(raw).items()}
        fast = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    found |= {f"fast {k}": v for k, v in _behaviour(fast._tokenizer).items()}
    found["special"] = json.dumps(fast.special_tokens_map, default=str, sort_keys=True)
    found["settings"] = (fast.model_max_length, fast.padding_side, fast.truncation_side,
                         fast.clean_up_tokenization_spaces, getattr(fast, "split_special_tokens", None))  # fmt: skip
    found["template"] = json.dumps(fast.chat_template, default=str)
    found["ids"] = [fast(text).input_ids for text in PROBES]
    settings = path / "tokenizer_config.json"
    found["auto_map"] = (
        json.loads(settings.read_bytes()).get("auto_map") if settings.exists() else None
    )
    return found


def _behaviour(tokenizer: Any) -> dict[str, Any]:
    """Everything that a tokenizer says of texts that use all of its tokens."""
    from scripts.defects.judge import text

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = [*PROBES, text()[:8_000], *(text()[n : n + 80] for n in range(8_000, 40_000, 400))]
    texts += [token.replace("Ġ", " ").replace("▁", " ") for token in sorted(vocabulary)[::3]]
    encoded = [item.ids for item in tokenizer.encode_batch(texts)]
    longest = max(vocabulary.values(), default=0)
    numbers = [
        list(range(first, min(first + 7, longest + 1))) for first in range(0, longest + 1, 7)
    ]
    return {
        "vocabulary": vocabulary,
        "encoded": encoded,
        "again": [
            item.ids for item in tokenizer.encode_batch(texts[:100])
        ],  # differs under dropout
        "decoded": tokenizer.decode_batch(encoded[:80] + numbers, skip_special_tokens=True),
        "whole": tokenizer.decode_batch(encoded[:80] + numbers, skip_special_tokens=False),
        "truncation": str(tokenizer.truncation),
        "padding": str(tokenizer.padding),
    }


def _gguf(path: Path, healthy: Path) -> str:
    expected = _fields(healthy)
    try:
        found = _fields.__wrapped__(path)
    except Exception as error:  # gguf-py documents none; whatever it is, the file is not read
        return f"gguf-py cannot read it: {type(error).__name__}: {error}"[:140]
    keys = [k for k in sorted(found.keys() | expected.keys())
            if found.get(k) != expected.get(k) and not k.startswith(PROSE)]  # fmt: skip
    # What is merely removed counts if the engine takes something else instead.
    if keys and not any(key in found or "chat_template" in key for key in keys):
        read, known = understood(path), understood(healthy)
        keys = [
            key for key in sorted(read.keys() | known.keys()) if read.get(key) != known.get(key)
        ]
    return f"key {keys[0]}" if keys else ""


@cache
def _fields(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    found: dict[str, Any] = {
        name: (tuple(field.types), tuple(part.tobytes() for part in field.parts[3:]))
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    found |= {
        f"tensor {t.name}": (int(t.tensor_type), tuple(map(int, t.shape))) for t in reader.tensors
    }
    return found
