"""Compare configuration, tokenizer, chat templates and generation settings with the source's.

QuantForge's own results contain these files unchanged. Other tools rewrite them with transformers, which adds or omits
defaults and renames keys. So every file is compared in the same way:

1. Both sides are read as transformers reads them (`read_config`, `load_tokenizer`), so that spellings and defaults no
   longer matter. No code of a model is run: keys that load code are removed from what transformers receives.
2. `iterate_changes` compares the two trees, key by key and in both directions.
3. The first matching row of `RULES` decides why a change is allowed or unusual. A change without a matching row is an
   error: a loader reads something else than the source declares.

All other file names in the artifact are checked too (`check_extra_files`). A file is part of the model (weights, index,
configuration), or a row of `LOADED` tells which loader would run it or read it instead of the model's own; no loader is
known to read any other file. A file that equals the source's, byte for byte, is at most a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from quantforge.architectures import text_config
from quantforge.artifacts import manifest
from quantforge.errors import InputError
from quantforge.files.disk import save_file
from quantforge.files.opener import FILES, parse_object
from quantforge.files.reader import CONFIG_FILE, INDEX_FILE, is_license
from quantforge.files.safetensors import TORCH_NAMES
from quantforge.formats.gguf.tokenizer import added_tokens, template_key
from quantforge.formats.open_model import tokenizer_side_files
from quantforge.verification.findings import Report, Severity
from quantforge.verification.json_diff import ABSENT, Change, iterate_changes, shorten, trees_equal
from quantforge.verification.opening import Artifact, SourceModel
from quantforge_calibration import chat_templates
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import is_library_error, silence_stderr
from quantforge_files.roles import SETTINGS as SETTINGS_ROLE
from quantforge_files.roles import TOKENIZER as TOKENIZER_ROLE

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
SETTINGS = "tokenizer_config.json"
# They repeat content of tokenizer.json or the configuration, and have to agree with it.
REDUNDANT_FILES = frozenset(
    {"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"}
)
QUANTIZATION_FILES = frozenset(
    {"quantize_config.json", "quant_config.json", "quantization_config.json"}
)
STORAGE_KEYS = frozenset({"quantization_config", "quantization", "gguf_types"})
CODE_LOADING_KEYS = (
    "auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
)  # fmt: skip
KNOWN_ATTENTION_KERNELS = (
    None,
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)
# Numbers that could make transformers build huge lists.
_LARGE_NUMBER = re.compile(r"(?<![.\d])(?:[2-9]\d{6}|\d{8,})")
_MAX_LISTED_CHANGES = 12  # changes of one file that are reported separately


# Checks.


def check_side_files(report: Report, artifact: Artifact, source: SourceModel) -> None:
    """Compare the side files of a directory with the source's; those of a GGUF file are its keys."""
    if not report.path.is_dir():
        report.skip("a GGUF file holds them as keys", "side-files")
        return
    try:
        artifact_files, source_files = read_side_files(artifact), read_side_files(source)
        if source.checkpoint.path.is_dir():
            compare_files(report, artifact_files, source_files)
        else:  # a GGUF file has tokens and templates, and not all that a tokenizer does with them
            tokens, expected = (
                token_ids(files.document(TOKENIZER)) for files in (artifact_files, source_files)
            )
            common_tokens = {token: tokens[token] for token in expected.keys() & tokens.keys()}
            changes = chain(
                iterate_changes(common_tokens, expected, (TOKENIZER,)),
                template_changes(artifact_files, source_files),
            )
            report_changes(report, changes, artifact_files, source_files)
    except (InputError, SourceError) as error:
        report.skip(f"files beside the weights cannot be read: {error.message}", "side-files")


def compare_files(report: Report, artifact_files: SideFiles, source_files: SideFiles) -> None:
    """Compare all side files of two directories."""
    common_names = artifact_files.documents.keys() & source_files.documents.keys()
    ordinary_names = common_names - {
        TOKENIZER,
        SETTINGS,
        GENERATION,
        *REDUNDANT_FILES,
        *QUANTIZATION_FILES,
    }
    changes = chain(
        _config_changes(artifact_files.config, source_files.config),
        iterate_changes(
            read_generation_settings(artifact_files),
            read_generation_settings(source_files),
            (GENERATION,),
        ),
        *(
            iterate_changes(artifact_files.documents[n], source_files.documents[n], (n,))
            for n in sorted(ordinary_names)
        ),
    )
    report_changes(report, changes, artifact_files, source_files)
    try:
        report_changes(
            report, _tokenizer_changes(artifact_files, source_files), artifact_files, source_files
        )
        report_changes(
            report, template_changes(artifact_files, source_files), artifact_files, source_files
        )
    except (InputError, SourceError) as error:
        report.add("side-files", TOKENIZER, f"cannot be read: {error.message}")
    for name in sorted(
        source_files.files.keys()
        - artifact_files.files.keys()
        - REDUNDANT_FILES
        - QUANTIZATION_FILES
        - {GENERATION}
    ):
        if is_license(name):
            report.notes.append(f"{name!r} of the source is missing")
        elif not chat_templates.is_template(name):
            severity = Severity.ERROR if name in {TOKENIZER, SETTINGS} else Severity.WARNING
            text = "the source has this file, the artifact lacks it"
            report.add("side-files", name, text, severity)


def report_changes(
    report: Report, changes: Iterable[Change], artifact_files: SideFiles, source_files: SideFiles
) -> None:
    """Report the changes that are not allowed, errors first; of many, list the first and count the rest."""
    files: dict[str, list[tuple[Severity, str]]] = {}
    for change in changes:
        severity, reason = judge_change(change, artifact_files, source_files)
        if severity is not None:
            files.setdefault(change.path[0], []).append((severity, f"{change}: {reason}"))
    for name, texts in files.items():
        check = "configuration" if name == CONFIG_FILE else "side-files"
        texts.sort(key=lambda item: item[0] is not Severity.ERROR)
        unlisted = texts[_MAX_LISTED_CHANGES:]
        for severity, text in texts[:_MAX_LISTED_CHANGES]:
            report.add(check, name, text, severity)
        if unlisted:
            report.add(check, name, f"{len(unlisted)} more places differ", unlisted[0][0])


# Differences, file by file.


def _config_changes(
    config: Mapping[str, Any], source_config: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield the changes of ``config.json``, by meaning if transformers can read both sides."""
    source_text_config = source_config.get("text_config")
    if isinstance(source_text_config, Mapping) and "text_config" not in config:
        # The artifact is the language model alone.
        source_config = {
            **{key: source_config[key] for key in ("dtype", "torch_dtype") if key in source_config},
            **source_text_config,
        }
    normalized, source_normalized = (
        read_config(config, source_config),
        read_config(source_config, source_config),
    )
    without_storage = [
        {k: v for k, v in values.items() if k not in STORAGE_KEYS}
        for values in (config, source_config)
    ]
    if not source_normalized:
        normalized, source_normalized = without_storage
    elif not normalized:  # a value that no loader takes: compare at least what is stated
        normalized = {**source_normalized, **without_storage[0]}
    yield from iterate_changes(normalized, source_normalized, (CONFIG_FILE,))
    rope = config.get("rope_parameters")
    replacements = {
        "rope_theta": rope.get("rope_theta") if isinstance(rope, Mapping) else None,
        "torch_dtype": config.get("dtype"),
    }
    for old_key, value in replacements.items():  # which older loaders read
        if None not in (config.get(old_key), value) and not trees_equal(config[old_key], value):
            yield Change((CONFIG_FILE, old_key), config[old_key], value)


def _tokenizer_changes(artifact_files: SideFiles, source_files: SideFiles) -> Iterator[Change]:
    """Yield the changes of ``tokenizer.json``, part by part, and of what transformers derives from all files.

    A part of ``tokenizer.json`` may also equal what transformers saves for the source.

    Raises:
        InputError: the artifact's tokenizer cannot be read.
    """
    names = (SETTINGS, *sorted(REDUNDANT_FILES), TOKENIZER)
    changed_sections = [
        name for name in names if artifact_files.files.get(name) != source_files.files.get(name)
    ]
    if (
        not changed_sections
        or TOKENIZER not in artifact_files.documents
        or TOKENIZER not in source_files.documents
    ):
        return
    tokenizer, source_tokenizer = (
        normalize_tokenizer(files.document(TOKENIZER)) for files in (artifact_files, source_files)
    )
    settings, source_settings = artifact_files.document(SETTINGS), source_files.document(SETTINGS)
    settings_tokenizer = saved = source_tokenizer
    try:
        source_settings, saved = load_tokenizer(source_files)
    except InputError:  # it needs code, or another library: compared as it stands
        pass
    else:
        settings, settings_tokenizer = load_tokenizer(artifact_files)
    file = TOKENIZER if TOKENIZER in changed_sections else changed_sections[0]
    tree_changes = [
        change
        for section in {**source_tokenizer, **tokenizer}
        if not trees_equal(tokenizer.get(section), saved.get(section))
        for change in iterate_changes(
            tokenizer.get(section, ABSENT), source_tokenizer.get(section, ABSENT), (file, section)
        )
    ]
    yield from tree_changes or iterate_changes(settings_tokenizer, saved, (file,))
    yield from iterate_changes(settings, source_settings, (changed_sections[0],))


def template_changes(artifact_files: SideFiles, source_files: SideFiles) -> Iterator[Change]:
    """Yield the chat templates that differ: the one that transformers uses, and those of all locations.

    A template in a location that the source does not use may also equal the one that transformers uses for the source.
    Templates are matched by their key in a GGUF file.

    Raises:
        SourceError: templates of one side cannot be read.
    """
    used_by_transformers, reported = _templates_by_name(source_files.files), set[str]()
    for layout in ("", *chat_templates.LAYOUTS):
        templates, source_templates = (
            _templates_by_name(side_files.files, layout)
            for side_files in (artifact_files, source_files)
        )
        for name in {**templates, **source_templates} if not layout else templates:
            file, text = templates.get(name, ("", ABSENT))
            accepted = [
                template_set[name]
                for template_set in (source_templates, used_by_transformers)
                if name in template_set
            ] or [("", ABSENT)]
            if name not in reported and text not in [expected for _, expected in accepted]:
                reported.add(name)
                source_file, expected = accepted[0]
                yield Change((file or source_file, f"chat template {name}"), text, expected)


def _templates_by_name(files: Mapping[str, bytes], layout: str = "") -> dict[str, tuple[str, Any]]:
    """Return file and text of each chat template of a layout, by default of the one that transformers uses."""
    if layout:
        is_directory = layout == chat_templates.TEMPLATE_FILE
        files = {
            name: data
            for name, data in files.items()
            if name == layout or (is_directory and chat_templates.is_template(name))
        }
    template_set, templates = chat_templates.choose_templates(files, ""), {}
    for name, text in template_set.templates.items():
        file = f"{chat_templates.TEMPLATE_FOLDER}/{name}{chat_templates.TEMPLATE_SUFFIX}"
        file = file if file in files else template_set.source_file
        templates[template_key(name)] = (file, text.removesuffix("\n") or ABSENT)
    return templates


# Allowed differences, and the reasons.


class Rule(NamedTuple):
    """A rule of `RULES`: which changes it matches, and how severe they are.

    Attributes:
        file: pattern of file names.
        keys: patterns of keys, separated by spaces; ``*dtype`` also matches ``text_config.dtype``.
        severity: severity of the change; None if it is allowed.
        reason: the reason.
        applies: a further condition on the change and on the side files of artifact and source.
    """

    file: str
    keys: str
    severity: Severity | None
    reason: str
    applies: Callable[[Change, SideFiles, SideFiles], bool] = lambda _change, _own, _other: True


def _is_stored_type(change: Change, artifact_files: SideFiles, source_files: SideFiles) -> bool:
    names = {
        TORCH_NAMES.get(kind)
        for files in (artifact_files, source_files)
        for kind in files.tensors.values()
    }
    return change.value is ABSENT or change.value in names


def _is_untied(change: Change, artifact_files: SideFiles, _: SideFiles) -> bool:
    return change.value is False and any("lm_head." in name for name in artifact_files.tensors)


def _is_sampling_intended(
    change: Change, artifact_files: SideFiles, source_files: SideFiles
) -> bool:
    """Return whether sampling was switched on for a source with settings of it, or by GPTQModel, which always does."""
    sampling_settings = {"temperature", "top_p", "top_k", "min_p"} & source_files.document(
        GENERATION
    ).keys()
    always = "gptqmodel:" in str(artifact_files.config.get("quantization_config"))
    return change.value is True and change.added and bool(sampling_settings or always)


RULES: tuple[Rule, ...] = (
    Rule("*", "*", None, "a null is no value", lambda change, *_: change.added and change.value in (None, ABSENT)),
    Rule("*", "*transformers_version *_name_or_path _commit_hash _from_model_config *_autoset", None, "a note"),
    Rule("*", "chat_template", None, "templates are compared by themselves"),
    Rule("*", "*attn_implementation*", None, "a choice of kernels",
         lambda change, *_: change.value in KNOWN_ATTENTION_KERNELS),
    Rule("*", " ".join(CODE_LOADING_KEYS), Severity.ERROR, "a loader runs code or loads kernels by it"),
    Rule("*", "*pad_token *pad_token_id", None, "padding is masked", lambda change, *_: change.added),
    Rule(CONFIG_FILE, "*dtype", None, "the type that the rest is computed in", _is_stored_type),
    Rule(CONFIG_FILE, "*dtype", Severity.WARNING, "no stored tensor has this type"),
    Rule(CONFIG_FILE, "*tie_word_embeddings", None, "the head was quantized by itself", _is_untied),
    Rule(CONFIG_FILE, "*rope*.type", None, "rope_type says it",
         lambda change, *_: ABSENT in (change.value, change.source_value)),
    Rule(CONFIG_FILE, "*dropout* *pdrop *initializer_* pretraining_tp *output_attentions *output_hidden_states"
         " *return_dict *num_labels *id2label* *label2id* problem_type *task_specific_params"
         " *use_cache", Severity.WARNING,
         "it does not concern the numbers of text generation"),
    Rule(CONFIG_FILE, "*", Severity.WARNING, "transformers does not know this key, other loaders may",
         lambda change, *_: ABSENT in (change.value, change.source_value)),
    Rule(GENERATION, "do_sample", None, "a temperature is meant to be used", _is_sampling_intended),
    Rule(GENERATION, "bos_token_id pad_token_id", Severity.WARNING, "text generation rarely uses it"),
    Rule(GENERATION, "*", Severity.WARNING, "transformers does not know this key",
         lambda change, *_: change.path[1] not in generation_keys()),
    Rule("*processor_config.json", "*", Severity.WARNING, "its class may have this default",
         lambda change, *_: change.added),
)  # fmt: skip


def judge_change(
    change: Change, artifact_files: SideFiles, source_files: SideFiles
) -> tuple[Severity | None, str]:
    """Return the severity of a change, None if it is allowed, and the reason."""
    for rule in RULES:
        is_matching = any(fnmatchcase(change.key, key) for key in rule.keys.split())
        if (
            is_matching
            and fnmatchcase(change.path[0], rule.file)
            and rule.applies(change, artifact_files, source_files)
        ):
            return rule.severity, rule.reason
    return Severity.ERROR, "a loader reads something else than the source says"


# Files as transformers reads them.


@dataclass
class SideFiles:
    """Side files of a model: everything besides its weights.

    Attributes:
        config: the configuration.
        files: contents of the other files by name.
        tensors: types of the stored tensors by name.
        documents: parsed JSON objects by file name.
        damaged: errors by file name, for JSON files that cannot be parsed.
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
        """Return a parsed file, {} if it is missing or damaged."""
        return self.documents.get(name, {})


def read_side_files(model: Artifact | SourceModel) -> SideFiles:
    """Read the side files of a model; for a GGUF file, those that its keys describe.

    Raises:
        InputError: a file cannot be read.
    """
    checkpoint = model.checkpoint
    path = checkpoint.path
    files = checkpoint.read_side_files() if path.is_dir() else tokenizer_side_files(checkpoint)
    copies = {name for name in QUANTIZATION_FILES if (path / name).is_file()}
    files |= {name: FILES.read(path / name, SETTINGS_ROLE, path) for name in copies}
    tensors = {name: entry.dtype for name, entry in checkpoint.entries.items()}
    return SideFiles(checkpoint.config, files, tensors)


def read_config(config: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration with its class in transformers: with defaults and current key names.

    No code of a model is run. Keys that load code are kept unchanged.

    Returns:
        The configuration; {} if transformers cannot read it, or if it has a large number that ``source`` lacks.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    large, source_large = (
        {*_LARGE_NUMBER.findall(json.dumps(document))} for document in (config, source)
    )
    if large - source_large:
        return {}
    model_type = config.get("model_type")
    try:
        is_known_type = model_type in CONFIG_MAPPING
        config_class = CONFIG_MAPPING[model_type] if is_known_type else PretrainedConfig
        with silence_stderr():
            text = config_class.from_dict(_without_code(config)).to_json_string(use_diff=False)
        normalized: dict[str, Any] = json.loads(text)
    except Exception:  # transformers documents no errors here
        return {}
    return {**normalized, **{key: config[key] for key in CODE_LOADING_KEYS if key in config}}


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        left_out = {*CODE_LOADING_KEYS, *STORAGE_KEYS}
        return {key: _without_code(item) for key, item in value.items() if key not in left_out}
    return [_without_code(item) for item in value] if isinstance(value, list) else value


def read_generation_settings(side_files: SideFiles) -> dict[str, Any]:
    """Return the generation settings that have an effect; those of ``config.json`` if there is no file."""
    from transformers import GenerationConfig

    settings, defaults = (
        side_files.document(GENERATION),
        GenerationConfig._get_default_generation_params(),
    )
    if GENERATION not in side_files.files:
        known_keys = generation_keys() - {"use_cache", "transformers_version"}
        configs = (text_config(side_files.config), side_files.config)
        settings = {key: config[key] for config in configs for key in known_keys & config.keys()}
    return {
        key: [value] if key.endswith("_token_id") and type(value) is int else value
        for key, value in settings.items()
        if value is not None and not trees_equal(value, defaults.get(key, False))
    }


def generation_keys() -> frozenset[str]:
    """Return the names of the generation settings of transformers."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def normalize_tokenizer(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer.json`` with merges as text, added tokens by id, and without settings that have no effect.

    These are nulls, flags that are off, a template that adds no token, and settings that a byte-level decoder ignores.

    Raises:
        InputError: it is not a tokenizer.
    """
    token_ids(tokenizer)
    normalized = {key: value for key, value in tokenizer.items() if value not in (None, [])}
    model = {k: v for k, v in normalized["model"].items() if v not in (None, "") and v is not False}
    try:
        model["merges"] = [
            m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])
        ]
    except TypeError as error:
        raise InputError(f"{TOKENIZER}: its merges are not pairs of tokens") from error
    post_processor = normalized.get("post_processor")
    if isinstance(post_processor, Mapping) and post_processor.get("type") == "TemplateProcessing":
        single_template = post_processor.get("single")
        if isinstance(single_template, list) and all(
            isinstance(p, Mapping) and "Sequence" in p for p in single_template
        ):
            del normalized["post_processor"]
    decoder = normalized.get("decoder")
    if isinstance(decoder, Mapping) and decoder.get("type") == "ByteLevel":
        normalized["decoder"] = {"type": "ByteLevel"}
    tokens_by_id = {str(item["id"]): item for item in normalized.get("added_tokens", [])}
    return {**normalized, "model": model, "added_tokens": tokens_by_id}


def load_tokenizer(files: SideFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a tokenizer with transformers; return its settings, and the ``tokenizer.json`` that it would save.

    No code of the model is run: only copies of its tables are loaded.

    Raises:
        InputError: transformers cannot load it.
    """
    from transformers import AutoTokenizer

    settings, model = files.document(SETTINGS), {"model_type": files.config.get("model_type")}
    tables = {
        name: files.files[name] for name in (TOKENIZER, *REDUNDANT_FILES) if name in files.files
    }
    tables[SETTINGS] = json.dumps(_without_code(settings)).encode()
    tables[CONFIG_FILE] = json.dumps(model).encode()
    try:
        with TemporaryDirectory() as folder, silence_stderr():
            for name, data in tables.items():
                save_file(Path(folder, name), data)
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        tree = normalize_tokenizer(json.loads(loaded.backend_tokenizer.to_str()))
    except BaseException as error:  # tokenizers documents no errors, and its compiled code panics
        if not is_library_error(error):
            raise
        raise InputError(f"transformers cannot load it: {shorten(str(error))}") from error
    names = (
        "model_max_length",
        "padding_side",
        "truncation_side",
        "clean_up_tokenization_spaces",
        "split_special_tokens",
        "extra_special_tokens",
    )
    attributes = {name: getattr(loaded, name, None) for name in names}
    code = {key: settings[key] for key in CODE_LOADING_KEYS if key in settings}
    return {**loaded.special_tokens_map, **attributes, **code}, tree


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of every token of ``tokenizer.json``, including added tokens.

    Raises:
        InputError: it is not a tokenizer.
    """
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: pieces with their scores
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        tokens = {**vocabulary, **{item["content"]: item["id"] for item in added_tokens(tokenizer)}}
        numbers = {type(number) for number in tokens.values()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{TOKENIZER}: not a tokenizer: {error!r:.60}") from error
    if numbers - {int}:
        raise InputError(f"{TOKENIZER}: not a tokenizer: an id is not a number")
    return tokens


# Files that a loader would run, or read instead of the model's own.


class LoadedFile(NamedTuple):
    """Files that some loader reads or runs.

    Attributes:
        effect: what loaders do with them, for messages.
        severity_without_source: severity if there is no source to compare with; None for no finding.
        patterns: patterns of their names, separated by spaces.
    """

    effect: str
    severity_without_source: Severity | None
    patterns: str


LOADED: tuple[LoadedFile, ...] = (
    LoadedFile("loaders apply an adapter that lies beside a model", Severity.ERROR,
        "adapter_config.json adapter_model.* *adapter*.safetensors"),
    LoadedFile("code, which loaders run when they are allowed to", Severity.WARNING,
        "*.py *.pyc *.so *.dll *.dylib *.sh *.cu custom_generate*"),
    LoadedFile("pickled or other weights, or an index of them, which some loaders prefer", Severity.ERROR,
        "*.bin *.pt *.pth *.pkl *.pickle *.ckpt *.ckpt.* *.joblib *.npz *.npy *.h5 *.msgpack *.ot *.nemo *.dill"
        " *.safetensors *.index.json consolidated* *.gguf *.ggml *.onnx *.onnx_data *.tflite *.mlmodel *.engine"
        " *.llamafile *.pt2 openvino*"),
    LoadedFile("a description of the quantization that vLLM and TensorRT-LLM read", Severity.ERROR,
        "hf_quant_config.json"),
    LoadedFile("another tokenizer, template or processor, which some loaders read", None,
        "tokenizer.* tokenizer_*.json *.tiktoken *.model *.model.v* *.spm vocab*.* merges.txt spiece* *.vocab bpe.codes"
        " sentencepiece* chat_template* *.jinja *.jinja2 *processor_config.json"),
    LoadedFile("another configuration, which some loaders read", Severity.WARNING,
        "config.*.json configuration*.json config_*.json *_config.json *-config.json *.config config.y*ml params*.json"
        " tekken.json modelfile *.modelfile modules.json model_index.json *cache*.json *_description.json [0-9]_*/*"),
)  # fmt: skip


def check_extra_files(report: Report, artifact: Artifact, source: SourceModel | None) -> None:
    """Report every file that a loader reads and that belongs neither to the model nor to the source."""
    root = report.path
    if not root.is_dir():
        report.skip("only in directories", "unexpected-files")
        return
    source_directory = (
        source.checkpoint.path if source and source.checkpoint.path.is_dir() else None
    )
    model_files = {str(path.relative_to(root)) for path in artifact.checkpoint.shards}
    model_files |= {
        CONFIG_FILE,
        INDEX_FILE,
        GENERATION,
        TOKENIZER,
        SETTINGS,
        *REDUNDANT_FILES,
        *QUANTIZATION_FILES,
    }
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        row = find_loaded_file(name)
        directory = path.is_dir() and not path.is_symlink()
        if row is None or directory or name in model_files or chat_templates.is_template(name):
            continue
        if source_directory is None:
            if row.severity_without_source:
                report.add(
                    "unexpected-files",
                    name,
                    f"{row.effect}; it is not part of this model",
                    row.severity_without_source,
                )
        elif not (source_directory / name).is_file():
            report.add("unexpected-files", name, f"{row.effect}; the source has no such file")
        elif name.endswith("processor_config.json") or name == "chat_template.json":
            continue  # compared by `side_files`
        elif not _files_equal(root, source_directory, name):
            report.add("unexpected-files", name, f"{row.effect}; it differs from the source's")
        elif row.severity_without_source is Severity.ERROR:
            report.warn(
                "unexpected-files", name, f"{row.effect}; it is the source's, not quantized"
            )


def find_loaded_file(name: str) -> LoadedFile | None:
    """Return the first row of `LOADED` with a pattern that matches a name or its last component."""
    file_names = (name.lower(), name.lower().rpartition("/")[2])
    patterns = ((row, pattern) for row in LOADED for pattern in row.patterns.split())
    return next(
        (
            row
            for row, pat in patterns
            if any(fnmatchcase(file_name, pat) for file_name in file_names)
        ),
        None,
    )


def _files_equal(directory: Path, other_directory: Path, name: str) -> bool:
    """Return whether a file has the same bytes in two directories."""
    try:
        return manifest.sha256(directory / name, directory) == manifest.sha256(
            other_directory / name, other_directory
        )
    except (InputError, OSError):
        return False
