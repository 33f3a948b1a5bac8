"""Files beside the weights of a model, as transformers reads them: defaults filled in, older spellings renamed.

No code of a model is run: keys that load code are left out of what transformers gets, and kept as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quantforge.architectures import text_config
from quantforge.checkpoint.disk import save
from quantforge.checkpoint.files import FILES, parse_object
from quantforge.checkpoint.reader import CONFIG
from quantforge.errors import InputError
from quantforge.formats.opening import side_data
from quantforge.verification.loaded_files import COPIES, GENERATION, REPEATED, SETTINGS, TOKENIZER
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.structure import tokens_of
from quantforge.verification.trees import same, shorten
from quantforge_calibration.tokenizer import quiet, raised
from quantforge_files.roles import SETTINGS as SETTINGS_ROLE
from quantforge_files.roles import TOKENIZER as TOKENIZER_ROLE

STORAGE_KEYS = frozenset({"quantization_config", "quantization", "gguf_types"})
LOAD_CODE = (
    "auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
)  # fmt: skip
KERNELS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Sizes of lists that transformers would build.
_LARGE = re.compile(r"(?<![.\d])(?:[2-9]\d{6}|\d{8,})")


@dataclass
class SideFiles:
    """What a model has beside its weights.

    Attributes:
        config: the configuration.
        files: contents of the other files by name.
        tensors: the types of the stored tensors by name.
        documents: the files that are JSON objects, parsed.
        damaged: what is wrong with those that should be.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    damaged: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in (name for name in sorted(self.files) if name.endswith(".json")):
            try:
                data = self.files[name]
                self.documents[name] = parse_object(data, name, TOKENIZER_ROLE, loose=True)
            except InputError as error:
                self.damaged[name] = error.message

    def document(self, name: str) -> dict[str, Any]:
        """Return a parsed file, {} if there is none or it is damaged."""
        return self.documents.get(name, {})


def side_files_of(model: Artifact | Original) -> SideFiles:
    """Read what lies beside the weights of a model; of a GGUF file what its keys say.

    Raises:
        InputError: a file cannot be read.
    """
    checkpoint = model.checkpoint
    path = checkpoint.path
    files = checkpoint.side_data() if path.is_dir() else side_data(checkpoint)
    copies = {name for name in COPIES if (path / name).is_file()}
    files |= {name: FILES.read(path / name, SETTINGS_ROLE, path) for name in copies}
    tensors = {name: entry.dtype for name, entry in checkpoint.entries.items()}
    return SideFiles(checkpoint.config, files, tensors)


def read_config(config: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as its class in transformers reads it: with defaults, in today's spelling.

    No code of a model is run. Keys that load code are left as they are.

    Returns:
        The configuration, {} if transformers cannot read it, or if it has a large number that ``source`` lacks.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    large, usual = ({*_LARGE.findall(json.dumps(one))} for one in (config, source))
    if large - usual:
        return {}
    kind = config.get("model_type")
    try:
        known = kind in CONFIG_MAPPING
        family = CONFIG_MAPPING[kind] if known else PretrainedConfig
        with quiet():
            text = family.from_dict(_without_code(config)).to_json_string(use_diff=False)
        found: dict[str, Any] = json.loads(text)
    except Exception:  # transformers documents no errors here
        return {}
    return {**found, **{key: config[key] for key in LOAD_CODE if key in config}}


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        left_out = {*LOAD_CODE, *STORAGE_KEYS}
        return {key: _without_code(item) for key, item in value.items() if key not in left_out}
    return [_without_code(item) for item in value] if isinstance(value, list) else value


def read_generation(side: SideFiles) -> dict[str, Any]:
    """Return the settings of generation that do something; those of ``config.json`` if there is no file."""
    from transformers import GenerationConfig

    stated, idle = side.document(GENERATION), GenerationConfig._get_default_generation_params()
    if GENERATION not in side.files:
        known = generation_keys() - {"use_cache", "transformers_version"}
        parts = (text_config(side.config), side.config)
        stated = {key: part[key] for part in parts for key in known & part.keys()}
    return {
        key: [value] if key.endswith("_token_id") and type(value) is int else value
        for key, value in stated.items()
        if value is not None and not same(value, idle.get(key, False))
    }


def generation_keys() -> frozenset[str]:
    """Return the settings of generation that transformers knows."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def read_tokenizer(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer.json`` with merges as text, added tokens by id, and without what does nothing.

    That is nulls, flags that are off, a template that adds no token, and what a byte-level decoder does not read.

    Raises:
        InputError: it is not a tokenizer.
    """
    tokens_of(tokenizer)
    found = {key: value for key, value in tokenizer.items() if value not in (None, [])}
    model = {k: v for k, v in found["model"].items() if v not in (None, "") and v is not False}
    try:
        model["merges"] = [
            m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])
        ]
    except TypeError as error:
        raise InputError(f"{TOKENIZER}: its merges are not pairs of tokens") from error
    steps = found.get("post_processor")
    if isinstance(steps, Mapping) and steps.get("type") == "TemplateProcessing":
        parts = steps.get("single")
        if isinstance(parts, list) and all(
            isinstance(p, Mapping) and "Sequence" in p for p in parts
        ):
            del found["post_processor"]
    decoder = found.get("decoder")
    if isinstance(decoder, Mapping) and decoder.get("type") == "ByteLevel":
        found["decoder"] = {"type": "ByteLevel"}
    added = {str(item["id"]): item for item in found.get("added_tokens", [])}
    return {**found, "model": model, "added_tokens": added}


def load_tokenizer(side: SideFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a tokenizer that transformers loads, and its ``tokenizer.json`` as it would save it.

    No code of the model is run: only copies of its tables are loaded.

    Raises:
        InputError: transformers cannot load it so.
    """
    from transformers import AutoTokenizer

    settings, model = side.document(SETTINGS), {"model_type": side.config.get("model_type")}
    tables = {name: side.files[name] for name in (TOKENIZER, *REPEATED) if name in side.files}
    tables[SETTINGS] = json.dumps(_without_code(settings)).encode()
    tables[CONFIG] = json.dumps(model).encode()
    try:
        with TemporaryDirectory() as folder, quiet():
            for name, data in tables.items():
                save(Path(folder, name), data)
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        tree = read_tokenizer(json.loads(loaded.backend_tokenizer.to_str()))
    except BaseException as error:  # tokenizers documents no errors, and its compiled code panics
        if not raised(error):
            raise
        raise InputError(f"transformers cannot load it: {shorten(str(error))}") from error
    names = ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces",
             "split_special_tokens", "extra_special_tokens")  # fmt: skip
    more = {name: getattr(loaded, name, None) for name in names}
    code = {key: settings[key] for key in LOAD_CODE if key in settings}
    return {**loaded.special_tokens_map, **more, **code}, tree
