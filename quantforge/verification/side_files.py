"""Files beside the weights: configuration, tokenizer, chat templates and generation settings against the source's.

Our own results carry these files byte for byte. Other tools write them anew through transformers, which writes out
defaults, leaves them out, and renames keys. So every file goes the same way:

1. Both sides are read as transformers reads them (`read_config`, `_read_generation`, `_load_tokenizer`), after which
   spellings and defaults no longer count.
2. `changes` compares the two trees, key by key and in both directions.
3. The first row of `RULES` that fits a change says why it is allowed or unusual. A change that no row fits is an error:
   a loader reads something else than the source says.

`check_within` needs no source: it compares the files of one model with each other and with its tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from quantforge.architectures import text_config
from quantforge.architectures.match import Role
from quantforge.architectures.positions import embedding_rows
from quantforge.checkpoint.disk import save
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.reader import CONFIG, is_licence
from quantforge.checkpoint.safetensors import TORCH_NAMES
from quantforge.errors import InputError
from quantforge.formats import format_of, kv_scales
from quantforge.formats.gguf.special import template_key
from quantforge.formats.opening import side_data
from quantforge.verification.findings import Report, Severity
from quantforge.verification.loaded_files import (
    COPIES,
    GENERATION,
    REPEATED,
    SETTINGS,
    TOKENIZER,
    is_processor,
)
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.structure import tokens_of
from quantforge_calibration import chat_templates
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import quiet, raised
from quantforge_files.roles import SETTINGS as SETTINGS_ROLE
from quantforge_files.roles import TOKENIZER as TOKENIZER_ROLE

STORAGE_KEYS = frozenset({"quantization_config", "quantization", "gguf_types"})
_ERROR, _WARNING = Severity.ERROR, Severity.WARNING
_SHOWN = 60  # characters of a value
_LISTED = 12  # changes of one file that are reported one by one
_LARGEST = 1 << 20  # a size that the source does not have; transformers builds lists of that length


# Two JSON trees.


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


class Change(NamedTuple):
    """A place where the artifact's tree (``own``) is not the source's (``other``); `ABSENT`: it has nothing there."""

    path: tuple[str, ...]
    own: Any
    other: Any

    @property
    def key(self) -> str:
        """Return the place as text: ``text_config.rope_parameters.factor``."""
        return ".".join(self.path)

    @property
    def added(self) -> bool:
        """Return whether the source has nothing, or a null."""
        return self.other is ABSENT or self.other is None

    def __str__(self) -> str:
        return f"{plain(self.key)} = {shown(self.own)}, the source has {shown(self.other)}"


def changes(own: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield every place that differs; a table or list that only one side has is one place."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*other, *own)):
            yield from changes(own.get(key, ABSENT), other.get(key, ABSENT), (*path, key))
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for number, (first, second) in enumerate(zip(own, other, strict=True)):
            yield from changes(first, second, (*path, str(number)))
    elif not same(own, other):
        yield Change(path, own, other)


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in kind and value; real numbers are compared in single precision."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, float) or isinstance(second, float):
        try:
            return math.isclose(first, second, rel_tol=1.2e-7)
        except (OverflowError, TypeError):
            return False
    return type(first) is type(second) and bool(first == second)


def at(tree: Any, path: Iterable[str]) -> Any:
    """Return the value at a place, `ABSENT` where there is none."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key, ABSENT)
        elif isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return ABSENT
    return tree


def shown(value: Any) -> str:
    """Return a value for people, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping | list) and len(value) > _SHOWN:
        return f"{len(value)} entries"
    text = repr(value[: 4 * _SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def plain(text: str) -> str:
    """Return a name from a file, shortened, with whatever is not printable escaped."""
    text = text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN - 3]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# What lies beside the weights of a model.


class DocumentError(ValueError):
    """A file is not what its name says, or not understood alike by all readers."""


@dataclass(frozen=True)
class SideFiles:
    """Files beside the weights by name, the configuration, and the stored tensors: their names and types."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()

    @cached_property
    def _parsed(self) -> dict[str, dict[str, Any]]:
        return {}

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON file, {} if it does not exist; raise `DocumentError` if it is not an object."""
        if name not in self._parsed:
            self._parsed[name] = parse(self.files[name]) if name in self.files else {}
        return self._parsed[name]

    def readable(self, name: str) -> dict[str, Any]:
        """Return `document`, or {} if the file is damaged."""
        try:
            return self.document(name)
        except DocumentError:
            return {}


class Pair(NamedTuple):
    """The side files of an artifact, those of its source, and the artifact's format."""

    own: SideFiles
    other: SideFiles
    form: str = ""


def side_files_of(model: Artifact | Original) -> SideFiles:
    """Read what lies beside the weights of a model; of a GGUF file what its keys say.

    Raises:
        InputError: a file of a directory cannot be read.
    """
    checkpoint = model.checkpoint
    try:
        files = checkpoint.side_data() if checkpoint.path.is_dir() else side_data(checkpoint)
    except InputError:
        if checkpoint.path.is_dir():
            raise
        files = {}
    stored = checkpoint.entries
    dtypes = {entry.dtype for name, entry in stored.items() if name.endswith(("weight", "bias"))}
    return SideFiles(checkpoint.config, files, frozenset(stored), frozenset(dtypes))


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object whose keys are unique at every level.

    Raises:
        DocumentError: it is none, or too large or deep for a tokenizer.
    """
    try:
        FILES.check_json(data, "document", TOKENIZER_ROLE)
        found = json.loads(data.decode(), object_pairs_hook=_unique)
    except (InputError, ValueError, RecursionError) as error:
        raise DocumentError(str(error)) from error
    if not isinstance(found, dict):
        raise DocumentError("not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DocumentError("a key occurs twice")
    return found


# Step 1: each file as transformers reads it.

_LOAD_CODE = (
    "auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "attn_implementation",
    "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
)  # fmt: skip
_KERNELS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_LABELS = ("num_labels", "id2label", "label2id")  # transformers allocates by them


def read_config(config: Mapping[str, Any], known: frozenset[int] | None = None) -> dict[str, Any]:
    """Return a configuration as its class in transformers reads it: with defaults, in today's spelling.

    No code of a model is run. Keys that load code are left as they are.

    Args:
        config: the configuration.
        known: integers of the source; others may not be large. None allows all.

    Returns:
        The configuration, {} if transformers cannot read it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if known is not None and any(size > _LARGEST for size in _integers(config) - known):
        return {}
    kind = config.get("model_type")
    try:
        named = isinstance(kind, str) and kind in CONFIG_MAPPING
        family = CONFIG_MAPPING[kind] if named else PretrainedConfig
        with quiet():
            found = family.from_dict(_without_code(deepcopy(dict(config)))).to_dict()
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
            StrictDataclassError, TypeError, ValueError):  # fmt: skip
        return {}
    raw = {key: config[key] for key in (*_LOAD_CODE, *_LABELS) if key in config}
    return {**_without_code(_as_json(found)), **raw}


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = {*_LOAD_CODE, *_LABELS, *STORAGE_KEYS}
        return {key: _without_code(item) for key, item in value.items() if key not in left_out}
    return [_without_code(item) for item in value] if isinstance(value, list) else value


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it, without a ``type`` of a rotary embedding that repeats its ``rope_type``."""
    if isinstance(value, Mapping):
        twice = "rope_type" in value and value.get("type") == value["rope_type"]
        return {str(k): _as_json(item) for k, item in value.items() if k != "type" or not twice}
    return [_as_json(v) for v in value] if isinstance(value, list | tuple | set) else value


def _integers(value: Any) -> frozenset[int]:
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(inner, Iterable) and not isinstance(inner, str):
        return frozenset().union(*map(_integers, inner))
    return frozenset({abs(value)} if isinstance(value, int) else ())


def _config_changes(pair: Pair) -> Iterator[Change]:
    """Yield the changes of ``config.json``, by meaning if transformers reads both sides."""
    own, other = (dict(side.config) for side in (pair.own, pair.other))
    inner = other.get("text_config")
    if isinstance(inner, Mapping) and "text_config" not in own:  # of its language model alone
        other = {**{key: other[key] for key in ("dtype", "torch_dtype") if key in other}, **inner}
    first, second = read_config(own, _integers(other)), read_config(other)
    bare = [{k: v for k, v in config.items() if k not in STORAGE_KEYS} for config in (own, other)]
    if not second:
        first, second = bare
    elif not first:  # a value that no loader takes: compare at least what is stated
        first = {**second, **bare[0]}
    yield from changes(first, second)
    rope, theta = own.get("rope_parameters"), own.get("rope_theta")
    newer = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    if None not in (theta, newer) and not same(theta, newer):  # older loaders read the older key
        yield Change(("rope_theta",), theta, newer)


# Settings of generation that do nothing, whether a file states them or not; transformers 5 no longer writes them.
_IDLE: Mapping[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "use_cache": True, "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1, "min_length": 0, "early_stopping": False, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "remove_invalid_values": False, "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "output_logits": False, "return_dict_in_generate": False, "renormalize_logits": False, "low_memory": False,
}  # fmt: skip


def _read_generation(side: SideFiles) -> dict[str, Any]:
    """Return the settings of generation, as transformers derives them from ``config.json`` if there is no file."""
    stated = side.readable(GENERATION)
    if GENERATION not in side.files:
        known = generation_keys() - {"use_cache", "transformers_version"}
        parts = (text_config(side.config), side.config)
        stated = {key: part[key] for part in parts for key in known & part.keys()}
    return {
        key: [value] if key.endswith("_token_id") and type(value) is int else value
        for key, value in stated.items()
        if value is not None and not same(value, _IDLE.get(key))
    }


def generation_keys() -> frozenset[str]:
    """Return the settings of generation that transformers knows."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def read_tokenizer(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer.json`` with merges as pairs, added tokens by id, and without nulls and flags that are off."""
    found = {key: value for key, value in tokenizer.items() if value not in (None, [])}
    if isinstance(model := found.get("model"), Mapping):
        found["model"] = {k: v for k, v in model.items() if v not in (None, "") and v is not False}
        if isinstance(merges := model.get("merges"), list):
            found["model"]["merges"] = [
                m.split(" ", 1) if isinstance(m, str) else m for m in merges
            ]
    if isinstance(added := found.get("added_tokens"), list):
        found["added_tokens"] = {str(item["id"]): item for item in added}
        if len(found["added_tokens"]) != len(added):
            raise DocumentError("two added tokens have one id")
    return found


def _load_tokenizer(side: SideFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a tokenizer that transformers loads, and its ``tokenizer.json`` as it would save it.

    No code of the model is run: only copies of its tables are loaded.

    Raises:
        DocumentError: transformers cannot load it so.
    """
    from transformers import AutoTokenizer

    settings = side.readable(SETTINGS)
    code = {key: settings[key] for key in _LOAD_CODE if key in settings}
    settings = {key: value for key, value in settings.items() if key not in code}
    tables = {name: side.files[name] for name in (TOKENIZER, *REPEATED) if name in side.files}
    tables |= {SETTINGS: json.dumps(settings).encode()} if SETTINGS in side.files else {}
    tables |= {CONFIG: json.dumps({"model_type": side.config.get("model_type")}).encode()}
    try:
        with TemporaryDirectory() as folder, quiet():
            for name, data in tables.items():
                save(Path(folder, name), data)
            loaded = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        tree = read_tokenizer(parse(loaded.backend_tokenizer.to_str().encode()))
    except BaseException as error:  # a library raises what it likes, and compiled code panics
        if not raised(error):
            raise
        raise DocumentError(f"transformers cannot load it: {error}") from error
    names = ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces",
             "split_special_tokens", "extra_special_tokens")  # fmt: skip
    more = {name: getattr(loaded, name, None) for name in names}
    return {**loaded.special_tokens_map, **more, **code}, tree


def _tokenizer_changes(pair: Pair) -> Iterator[tuple[str, Change]]:
    """Yield the changes of ``tokenizer.json`` itself, and of what transformers makes of it, with the file to look at.

    A place of ``tokenizer.json`` may also be what transformers makes of the source's.

    Raises:
        DocumentError: the artifact's tokenizer cannot be read.
    """
    own, other = pair.own, pair.other
    names = (SETTINGS, *sorted(REPEATED), TOKENIZER)
    changed = [name for name in names if own.files.get(name) != other.files.get(name)]
    if not changed or TOKENIZER not in own.files or TOKENIZER not in other.files:
        return
    try:
        tokens_of(own.document(TOKENIZER))
        trees = [read_tokenizer(own.document(TOKENIZER)), read_tokenizer(other.readable(TOKENIZER))]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(str(error)) from error
    found = list(changes(trees[0], trees[1]))
    try:
        expected, saved = _load_tokenizer(other)
    except DocumentError:  # it needs code, or another library
        settings, expected = own.readable(SETTINGS), other.readable(SETTINGS)
    else:
        settings, tree = _load_tokenizer(own)
        found = [change for change in found if not same(at(saved, change.path), change.own)]
        found = found or list(changes(tree, saved))
    yield from ((TOKENIZER if TOKENIZER in changed else changed[0], change) for change in found)
    yield from ((changed[0], change) for change in changes(settings, expected))


def _read_templates(side: SideFiles, *, processor: bool, keys: bool) -> dict[str, tuple[str, str]]:
    """Return the chat templates that transformers' tokenizers or processors take: file and text by name.

    ``keys``: by names that a key of a GGUF file can have. The last newline is left out, as Jinja does.
    """
    try:
        templates = chat_templates.choose(side.files, "", processor=processor)
    except SourceError as error:
        raise DocumentError(error.message) from error
    found = {}
    for name, text in templates.named.items():
        place = f"{chat_templates.FOLDER}/{name}{chat_templates.SUFFIX}"
        place = place if place in side.files else templates.place
        called = template_key(name) if keys and name != chat_templates.DEFAULT else name
        if text:
            found[called] = (place, text.removesuffix("\n"))
    return found


# Step 3: what may differ, and why.


class Rule(NamedTuple):
    """A row of `RULES`.

    Attributes:
        file: a pattern.
        keys: patterns of places, separated by spaces; ``*dtype`` is also ``text_config.dtype``.
        severity: None if the change is allowed.
        why: the reason.
        holds: a further condition.
    """

    file: str
    keys: str
    severity: Severity | None
    why: str
    holds: Callable[[Change, Pair], bool] | None = None


def _computed_in(change: Change, pair: Pair) -> bool:
    """Return whether the type is that of a stored tensor or of the source, or what kernels of the format compute in."""
    places = (at(pair.other.config, (*change.path[:-1], key)) for key in ("dtype", "torch_dtype"))
    names = {TORCH_NAMES.get(name) for name in pair.own.dtypes | pair.other.dtypes} | {
        *map(str, places)
    }
    half = {"float16"} if pair.form and format_of(pair.form).ABOUT.half else set()
    return change.own is ABSENT or str(change.own).removeprefix("torch.") in names | half


def _special_of_source(change: Change, pair: Pair) -> bool:
    """Return whether a token or its id, which the source does not name, is another special token of the source."""
    ids = (text_config(pair.other.config), pair.other.config)
    roles = ("bos_token", "eos_token", "unk_token")
    known = [part.get(f"{role}_id") for role in roles for part in ids]
    known += [pair.other.readable(SETTINGS).get(role) for role in roles]
    named = [item for value in known for item in _texts(value)]
    own = _texts(change.own)
    return change.added and len(own) == 1 and any(same(own[0], item) for item in named)


def _untied(change: Change, pair: Pair) -> bool:
    stored = any(re.match(r"(.*\.)?lm_head\.", name) for name in pair.own.tensors)
    return change.own is False and stored


def _sampling_meant(change: Change, pair: Pair) -> bool:
    """Return whether sampling was switched on for a source with settings of it, or by GPTQModel, which always does."""
    other = pair.other.readable(GENERATION)
    maker = at(pair.own.config, ("quantization_config", "meta", "quantizer"))
    meant = any(other.get(key) is not None for key in ("temperature", "top_p", "top_k", "min_p"))
    return change.own is True and change.other is ABSENT and (meant or "gptqmodel:" in str(maker))


RULES: tuple[Rule, ...] = (
    Rule("*", "*", None, "a null is no value", lambda change, _: change.added and change.own in (None, ABSENT)),
    Rule("*", "*transformers_version *_name_or_path _commit_hash _from_model_config", None, "a note"),
    Rule("*", "*attn_implementation*", None, "a choice of kernels", lambda change, _: change.own in _KERNELS),
    Rule("*", " ".join(_LOAD_CODE), _ERROR, "a loader runs code or loads kernels by it"),
    Rule("*", "*pad_token *pad_token_id", None, "padding with a token of the source", _special_of_source),
    Rule(CONFIG, "*dtype", None, "the type that the rest is computed in", _computed_in),
    Rule(CONFIG, "*dtype", _WARNING, "neither the source nor the stored tensors have this type"),
    Rule(CONFIG, "*tie_word_embeddings", None, "the head was quantized by itself", _untied),
    Rule(CONFIG, "num_labels id2label label2id", None, "a default", lambda change, _: change.own is ABSENT),
    Rule(CONFIG, "*use_cache", _WARNING, "without a cache decoding is slow"),
    Rule(CONFIG, "*dropout* *pdrop *initializer_* pretraining_tp *output_attentions *output_hidden_states *return_dict"
         " num_labels id2label label2id problem_type *task_specific_params", _WARNING,
         "it concerns training or other tasks than text generation"),
    Rule(CONFIG, "*", _WARNING, "transformers does not know this key, other loaders may",
         lambda change, _: ABSENT in (change.own, change.other)),
    Rule(GENERATION, "do_sample", None, "a temperature is meant to be used", _sampling_meant),
    Rule(GENERATION, "bos_token_id pad_token_id", _WARNING, "text generation rarely uses it",
         lambda change, _: change.own is ABSENT),
    Rule(GENERATION, "*", _WARNING, "transformers does not know this key",
         lambda change, _: change.path[0] not in generation_keys()),
    Rule("*processor_config.json", "chat_template", None, "compared as a template"),
    Rule("*processor_config.json", "*", _WARNING, "its class may have this default", lambda change, _: change.added),
)  # fmt: skip


def judge(name: str, change: Change, pair: Pair) -> tuple[Severity | None, str]:
    """Return how bad a change of a file is, None if it is allowed, and why."""
    for rule in RULES:
        fits = fnmatchcase(name, rule.file) and any(
            fnmatchcase(change.key, k) for k in rule.keys.split()
        )
        if fits and (rule.holds is None or rule.holds(change, pair)):
            return rule.severity, rule.why
    return _ERROR, "a loader reads something else than the source says"


# The checks.


def check_side_files(report: Report, artifact: Artifact, source: Original) -> None:
    """Compare the files beside the weights with the source's."""
    pair = Pair(side_files_of(artifact), side_files_of(source), report.format)
    if report.path.is_dir() and source.checkpoint.path.is_dir():
        compare_files(report, pair)
    else:
        _check_restated(report, pair, embedding_rows(artifact.checkpoint.config))


def compare_files(report: Report, pair: Pair) -> None:
    """Compare all files of two directories."""
    own, other = pair.own, pair.other
    for name in sorted(name for name in own.files if name.endswith(".json") and name != TOKENIZER):
        try:
            own.document(name)
        except DocumentError as error:
            report.add("side-files", plain(name), f"is damaged: {plain(str(error))}")
    report_changes(report, ((CONFIG, change) for change in _config_changes(pair)), pair)
    report_changes(report, _named(GENERATION, *map(_read_generation, (own, other))), pair)
    for name in filter(is_processor, own.files.keys() & other.files.keys()):
        report_changes(report, _named(name, own.readable(name), other.readable(name)), pair)
    try:
        report_changes(report, _tokenizer_changes(pair), pair)
    except DocumentError as error:
        report.add("side-files", TOKENIZER, f"cannot be read: {plain(str(error))}")
    check_templates(report, pair)
    for name in sorted(own.files.keys() & REPEATED):
        if own.files[name] != other.files.get(name):
            for text in contradictions_of(own, name)[:_LISTED]:
                report.add("side-files", name, text)
    for name in sorted(other.files.keys() - REPEATED - {GENERATION}):
        if is_licence(name):
            if own.files.get(name) != other.files[name]:
                report.notes.append(f"{plain(name)} of the source is missing or differs")
        elif name not in own.files and not chat_templates.is_template(name):
            severity = _ERROR if name in {TOKENIZER, SETTINGS} else _WARNING
            text = "the source has this file, the artifact lacks it"
            report.add("side-files", plain(name), text, severity)


def _named(name: str, own: Any, other: Any) -> Iterator[tuple[str, Change]]:
    return ((name, change) for change in changes(own, other))


def report_changes(report: Report, found: Iterable[tuple[str, Change]], pair: Pair) -> None:
    """Report the changes that are not allowed; of a large table, such as a vocabulary, one and the number of others."""
    tables: dict[tuple[str, ...], list[tuple[str, Severity]]] = {}
    for name, change in found:
        severity, why = judge(name, change, pair)
        if severity is not None:
            table = (name, *change.path[:2]) if len(change.path) > 2 else (name,)
            tables.setdefault(table, []).append((f"{change}: {why}", severity))
    for (name, *path), texts in tables.items():
        check = "configuration" if name == CONFIG else "side-files"
        most = 1 if path else _LISTED
        for text, severity in texts[:most]:
            report.add(check, plain(name), text, severity)
        if len(texts) > most:
            severity = min(severity for _, severity in texts)  # "error" is before "warning"
            text = f"{len(texts) - most} more places {'of ' if path else ''}{'.'.join(path)} differ"
            report.add(check, plain(name), plain(text), severity)


def check_templates(report: Report, pair: Pair, *, keys: bool = False) -> None:
    """Report every chat template that is not the source's, is missing, or was added, wherever a loader takes it from.

    ``keys``: one side is a GGUF file.
    """
    found: dict[tuple[str, str], tuple[str, str]] = {}
    try:
        for processor in (False,) if keys else (False, True):
            own, other = (
                _read_templates(side, processor=processor, keys=keys) for side in pair[:2]
            )
            for name in {**own, **other}:
                (place, text), (where, expected) = (
                    side.get(name, ("", "")) for side in (own, other)
                )
                if text != expected:
                    found.setdefault((place or where, name), (text, expected))
    except DocumentError as error:
        report.add("side-files", chat_templates.FILE, plain(str(error)))
    for (place, name), (text, expected) in found.items():
        both = enumerate(zip(text, expected, strict=False))
        count = next((n for n, (a, b) in both if a != b), min(len(text), len(expected)))
        first, second = (shown(whole[count : count + 24]) for whole in (text, expected))
        what = f"has {first} at character {count}, the source has {second}"
        what = what if text else "is missing"
        what = what if expected else "does not exist in the source"
        report.add("side-files", plain(place), f"the chat template {shown(name)} {what}")


def _check_restated(report: Report, pair: Pair, rows: int | None) -> None:
    """Compare tokens, merges and template if one side is a GGUF file; it holds no tokens past the embedding's rows."""
    trees = [side.readable(TOKENIZER) for side in pair[:2]]
    if not all(trees):
        return
    try:
        tokens, expected = map(tokens_of, trees)
        past = {t for t, n in (tokens | expected).items() if rows is not None and n >= rows}
        merges = [read_tokenizer(tree)["model"].get("merges", []) for tree in trees]
        kept = [[pair for pair in pairs if "".join(pair) not in past] for pairs in merges]
    except (AttributeError, KeyError, TypeError, ValueError):
        report.add("side-files", TOKENIZER, "is not a tokenizer")
        return
    differ = [t for t in (tokens | expected).keys() - past if tokens.get(t) != expected.get(t)]
    if differ:
        text = f"{len(differ)} token(s) differ from the source, e.g. {min(differ)!r}"
        report.add("side-files", TOKENIZER, text)
    if kept[0] != kept[1]:
        report.add("side-files", TOKENIZER, "the merges differ from the source's")
    check_templates(report, pair, keys=True)


# One model by itself.

# What decides how codes are read, and what loaders assume if a description leaves it out: GPTQModel reads
# quantize_config.json before config.json, vLLM and transformers read config.json.
_DECISIVE: Mapping[str, Any] = {
    "bits": None, "group_size": None, "sym": True, "zero_point": True, "desc_act": False, "lm_head": False,
    "dynamic": {}, "extra_config": {}, "format": None, "checkpoint_format": None, "quant_method": None,
}  # fmt: skip
_MAY_BE_LEFT_OUT = {"format", "checkpoint_format", "quant_method"}
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
_TWINS = (("quantization",), ("compression_config",), ("compression_config", "quantization_config"),
          ("text_config", "quantization_config"))  # fmt: skip


def check_within(report: Report, artifact: Artifact) -> None:
    """Report what contradicts itself beside the weights of one model."""
    if not report.path.is_dir():
        return
    try:
        own = side_files_of(artifact)
    except InputError as error:
        report.add("unreadable", plain(error.file or ""), error.message)
        return
    for text in quantization_contradictions(own.config, own.tensors):
        report.add("settings", CONFIG, text)
    for name in sorted(name for name in COPIES if (report.path / name).is_file()):
        try:
            texts = disagreements(
                parse(FILES.read(report.path / name, SETTINGS_ROLE, report.path)), own.config
            )
        except (InputError, DocumentError) as error:
            texts = [f"is damaged: {plain(str(error))}"]
        for text in texts:
            report.add("settings", name, text)
    rows = [t.stored.shape[0] for t in artifact.matched.tensors if t.role is Role.EMBEDDING]
    _check_tokens(report, own, min(rows, default=None))


def quantization_contradictions(
    config: Mapping[str, Any], tensors: frozenset[str]
) -> Iterator[str]:
    """Yield what contradicts the ``quantization_config``: a second description, or the stored tensors."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return
    for path in _TWINS:
        twin = at(config, path)
        described = isinstance(twin, Mapping) and "quantization_config" not in twin
        if described and not same(twin, found):
            yield f"{'.'.join(path)} = {shown(twin)}, quantization_config = {shown(found)}: a loader reads one of them"
    packed = found.get("quant_method") in ("gptq", "awq")
    for second, first in {**_ALIASES, "checkpoint_format": "format"}.items():
        values = found.get(first), found.get(second)
        if packed and None not in values and not same(*values):
            yield f"quantization_config: {first} = {shown(values[0])}, {second} = {shown(values[1])}"
    for key in ("transform_config", "sparsity_config"):
        value = found.get(key)
        if value and at(value, ("format",)) != "dense":
            yield f"quantization_config.{key} = {shown(value)}: loaders transform weights by it"
    groups, form = found.get("config_groups"), found.get("format")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if form != "mixed-precision" and at(group, ["format"]) not in (None, ABSENT, form):
            yield f"config_groups.{plain(name)}.format = {shown(group['format'])}, the format is {shown(form)}"
    announced = found.get("kv_cache_scheme") or found.get("quant_method") != "compressed-tensors"
    if not announced and (scales := kv_scales.named(tensors)):
        yield f"kv_cache_scheme is missing, but {scales[0]} is a scale of a KV cache ({len(scales)} in all)"
    kinds = {name.rpartition("__")[2] for name in tensors if "quant_state.bitsandbytes__" in name}
    nested = any(name.endswith("nested_absmax") for name in tensors)
    bnb: dict[str, tuple[Any, set[Any]]] = {
        "bnb_4bit_quant_type": ("fp4", kinds), "bnb_4bit_use_double_quant": (False, {nested})}  # fmt: skip
    for key, (usual, stored) in bnb.items():
        value = found.get(key, usual)
        if kinds and not any(same(value, item) for item in stored):
            yield f"quantization_config.{key} = {shown(value)}, the tensors say {', '.join(map(str, stored))}"


def disagreements(copy: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return what a second description of the quantization says otherwise, so that a loader reads other numbers."""
    stated = config.get("quantization_config")
    first, second = (
        {_ALIASES.get(key, key): value for key, value in found.items()}
        for found in (stated if isinstance(stated, Mapping) else {}, copy)
    )
    texts = []
    for key, usual in _DECISIVE.items():
        if key in _MAY_BE_LEFT_OUT and (key in first) != (key in second):
            continue
        one, two = first.get(key), second.get(key)
        both = key in first and key in second
        if not same(one, two) and (both or not same(one or two or usual, usual)):
            texts.append(f"{key} = {shown(two)}, config.json has {shown(one)}")
    return texts


def contradictions_of(own: SideFiles, name: str) -> list[str]:
    """Describe where a file that repeats a part of ``tokenizer.json`` contradicts it."""
    if TOKENIZER not in own.files:
        return []
    try:
        tokenizer = own.document(TOKENIZER)
        tokens = tokens_of(tokenizer)
        if name == "merges.txt":
            lines = own.files[name].decode(errors="replace").splitlines()
            stated = [line for line in lines if line and not line.startswith("#version")]
            merges = read_tokenizer(tokenizer)["model"].get("merges", [])
            return (
                []
                if stated == [" ".join(m) for m in merges]
                else [f"the merges are not those of {TOKENIZER}"]
            )
        pieces = own.document(name).items()
        if name != "special_tokens_map.json":
            return [f"{shown(piece)} = {shown(number)}, {TOKENIZER} has {shown(tokens.get(piece))}"
                    for piece, number in pieces if tokens.get(piece) != number]  # fmt: skip
        settings = own.readable(SETTINGS)
        return [f"{role} = {shown(text)}, {SETTINGS} has {shown(other)}"
                for role, value in pieces
                for text, other in zip(_texts(value), _texts(settings.get(role, value)), strict=False)
                if text not in tokens or text != other]  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"is damaged: {plain(str(error))}"]


def _texts(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item.get("content") if isinstance(item, Mapping) else item for item in items]


def _check_tokens(report: Report, own: SideFiles, rows: int | None) -> None:
    """Check ids of special tokens against the embedding, and names of tokens against the vocabulary."""
    ids = [
        (place, key, number)
        for place, document in ((CONFIG, text_config(own.config)), (GENERATION, own.readable(GENERATION)))
        for key, value in document.items() if key.endswith("_token_id")
        for number in _texts(value) if isinstance(number, int)
    ]  # fmt: skip
    for place, key, number in ids:
        if rows is not None and not -1 <= number < rows:
            report.warn(
                "settings", place, f"{plain(key)} = {shown(number)}, the embedding has {rows} rows"
            )
    try:
        tokens = tokens_of(own.readable(TOKENIZER))
    except (AttributeError, KeyError, TypeError, ValueError):
        return
    for name in sorted(REPEATED & own.files.keys()):
        for text in contradictions_of(own, name)[:1]:
            report.warn("settings", name, plain(text))
    settings = own.readable(SETTINGS)
    for role in ("bos", "eos", "pad", "unk"):
        (text,) = _texts(settings.get(f"{role}_token"))[:1] or [None]
        if isinstance(text, str) and text not in tokens:
            report.warn(
                "settings", SETTINGS, f"{role}_token = {shown(text)} is not a token of {TOKENIZER}"
            )
