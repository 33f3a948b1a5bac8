"""LoRA adapters as PEFT saves them: low-rank updates of linears and embeddings, and replaced tensors.

For a module ``M`` of the model that was trained, ``adapter_model.safetensors`` holds, under ``base_model.model.``:

==================================  ==========================  ==============================================
``M.lora_A.weight``                 ``[r, in]``                 with ``M.lora_B.weight`` ``[out, r]``
``M.lora_embedding_A``              ``[r, tokens]``             with ``M.lora_embedding_B`` ``[hidden, r]``
``M.lora_magnitude_vector.weight``  ``[out]``                   DoRA: the length of every row
``M.lora_B.bias``                   ``[out]``                   added to the bias, scaled likewise
``M.weight``, ``M.bias``            those of the module         in the place of the model's (``modules_to_save``)
==================================  ==========================  ==============================================

``adapter_config.json`` says how much of the product counts: ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with
``use_rslora``; ``rank_pattern`` and ``alpha_pattern`` have other numbers for single modules. What changes the meaning
of these tensors and is not known here is refused by its key. PEFT takes any value for true that is not false; a word in
the place of ``true`` is a damaged file here, since the one reading and the other are two different models. PEFT may
save a module that was replaced as well (``M.original_module.weight``): it is left out. A pickled adapter is never read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from quantforge.errors import InputError
from quantforge.files.checksums import compute_checksums
from quantforge.files.opener import FILES, parse_object
from quantforge.files.safetensors import TensorEntry, read_header
from quantforge.formats import patterns
from quantforge_files import roles

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_FLOATS = frozenset(("F32", "F16", "BF16"))
_PART_BY_SUFFIX = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
}


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """Low-rank update of one weight: ``scaling * b @ a``.

    Attributes:
        a: ``[r, in]``.
        b: ``[out, r]``.
        scaling: of the product.
        magnitude: of DoRA, the length that every row is given.
        bias: what is added to the bias, times ``scaling``.
        embedding: the weight is a table, ``[in, out]``.
    """

    a: TensorEntry
    b: TensorEntry
    scaling: float
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None
    embedding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Return ``(out, in)``."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter; later reads are checked against the digests of its files.

    Attributes:
        path: its directory.
        digests: ``SHA-256  NAME`` of its files.
        low_rank_updates: by module of the trained model.
        replaced_tensors: by tensor of the trained model.
        fan_in_fan_out: what ``fan_in_fan_out`` says, for families without declarations.
        replaces_tied_head: whether an embedding that it replaces is the head's too.
        trained_on: which model, as a hint.
        always_adapted: names of linears, or their ends, of which it changes every one; empty where its configuration
            chooses among them.
    """

    path: Path
    digests: tuple[str, ...]
    low_rank_updates: Mapping[str, LowRankUpdate]
    replaced_tensors: Mapping[str, TensorEntry]
    fan_in_fan_out: bool
    replaces_tied_head: bool
    trained_on: str
    always_adapted: tuple[str, ...]

    @property
    def cited_name(self) -> str:
        """Return the directory name with the digest of the weights, for reports."""
        return f"{self.path.resolve().name} (SHA-256 {self.digests[-1].partition(' ')[0]})"


def open_adapter(path: Path) -> Adapter:
    """Open an adapter directory and compute the digests of its files.

    Raises:
        InputError: no adapter of LoRA that can be merged; says what is in the way.
    """
    names = FILES.list_names(path, None)
    for name in (CONFIG, WEIGHTS):
        if name not in names:
            pickled = name == WEIGHTS and PICKLE in names
            raise InputError(
                f"{PICKLE} is a pickle, which is never read" if pickled else f"{path}: no {name}",
                "save it with safetensors: model.save_pretrained(DIR, safe_serialization=True)"
                if pickled
                else "give the directory that PEFT's save_pretrained wrote",
                file=str(path / name),
                subject=str(path),
            )
    text = FILES.read(path / CONFIG, roles.SETTINGS, path)
    config = parse_object(text, path / CONFIG, roles.SETTINGS)
    check_config(path / CONFIG, config)
    # Looked at before gigabytes are digested, and taken as it is afterwards.
    _sort_tensors(path, config, read_header(path / WEIGHTS, path))
    checksums = compute_checksums(path / WEIGHTS, path)
    tensor_entries = read_header(path / WEIGHTS, path)
    entries = {name: replace(entry, checksums=checksums) for name, entry in tensor_entries.items()}
    changes, replaced = _sort_tensors(path, config, entries)
    return Adapter(
        path,
        (f"{hashlib.sha256(text).hexdigest()}  {CONFIG}", f"{checksums.sha256}  {WEIGHTS}"),
        changes,
        replaced,
        config.get("fan_in_fan_out") is True,
        config.get("ensure_weight_tying") is True,
        trained_on(config),
        target_modules(config),
    )


def _sort_tensors(
    path: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, LowRankUpdate], dict[str, TensorEntry]]:
    """Return the low-rank updates by module, and the replacing tensors by name."""
    entries_by_module: dict[str, dict[str, TensorEntry]] = {}
    replaced: dict[str, TensorEntry] = {}
    tables: set[str] = set()
    for name, entry in entries.items():
        if not name.startswith(PREFIX):
            raise _tensor_error(path, name, f"the name does not begin with {PREFIX}")
        inner = name.removeprefix(PREFIX)
        ending = next((end for end in _PART_BY_SUFFIX if inner.endswith(end)), "")
        if ending:
            module = inner.removesuffix(ending).removesuffix(".base_layer")
            entries_by_module.setdefault(module, {})[_PART_BY_SUFFIX[ending]] = entry
            tables |= {module} if "embedding" in ending else set()
        elif "lora_" in inner:
            raise _tensor_error(path, name, "a tensor of no kind that is merged here")
        elif ".original_module." not in inner:  # what a saved module replaced
            replaced[inner.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = entry
        if entry.dtype not in _FLOATS:
            raise _tensor_error(path, name, f"{entry.dtype} is no type of an adapter")
    if not entries_by_module and not replaced:
        raise InputError("the adapter holds nothing", "fetch it again", subject=str(path / WEIGHTS))
    replaced_names = "".join(f".{inner}\n" for inner in replaced)
    for name in modules_saved_whole(config):
        if f".{name}." not in replaced_names:
            raise _tensor_error(path, name, f"missing, although {CONFIG} has it in modules_to_save")
    changes = {
        module: _read_update(path, config, module, entries_of_module, module in tables)
        for module, entries_of_module in sorted(entries_by_module.items())
    }
    return changes, dict(sorted(replaced.items()))


def _read_update(
    path: Path,
    config: Mapping[str, Any],
    module: str,
    entries: Mapping[str, TensorEntry],
    embedding: bool,
) -> LowRankUpdate:
    if not {"a", "b"} <= entries.keys():
        raise _tensor_error(
            path,
            next(iter(entries.values())).name,
            "the other half of the product is missing",
            "the adapter is damaged: fetch it again",
        )
    a, b = entries["a"], entries["b"]
    rank = module_number(path / CONFIG, config, "r", "rank_pattern", module)
    alpha = module_number(path / CONFIG, config, "lora_alpha", "alpha_pattern", module)
    if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == rank:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        message = f"A and B are {shapes}, {CONFIG} says rank {rank:g}"
        raise _tensor_error(
            path, a.name, message, f"correct r or rank_pattern in {CONFIG}, or fetch both again"
        )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") is True else alpha / rank
    magnitude, bias = entries.get("magnitude"), entries.get("bias")
    if (config.get("use_dora") is True) != (magnitude is not None):
        raise _tensor_error(
            path,
            a.name,
            "use_dora and the magnitude vectors disagree",
            f"correct use_dora in {CONFIG}, or fetch both again",
        )
    for vector in (magnitude, bias):
        if vector is not None and vector.shape != (b.shape[0],):
            raise _tensor_error(path, vector.name, f"{list(vector.shape)}, expected [{b.shape[0]}]")
    return LowRankUpdate(a, b, scaling, magnitude, bias, embedding)


_UNKNOWN = "the adapter is damaged, or of a kind that is not merged here: merge it with PEFT, then quantize the result"


def _tensor_error(path: Path, name: str, problem: str, hint: str = _UNKNOWN) -> InputError:
    return InputError(
        f"tensor {name!r}: {problem}",
        hint,
        file=str(path / WEIGHTS),
        tensor=name,
        subject=str(path / WEIGHTS),
    )


# The configuration

# Keys that say how it was trained, where it applies (the names of its tensors say that too) and of whom it is.
_KNOWN_KEYS = frozenset(
    ("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
     "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
     "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
     "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
     "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora")
)  # fmt: skip
# Ways to begin that take a part of the model's weights into the adapter.
_WEIGHT_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Kinds that PEFT cannot merge.
_UNMERGEABLE_TYPES = frozenset(
    ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")
)  # fmt: skip
_OPTIONAL_BOOL = (bool, NoneType)
_MOST_SHOWN = 100  # characters of a name
# Entries of `modules_to_save`, each looked for among all tensors; PEFT writes a few
_MOST_SAVED = 1000
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying", "lora_bias"),
        _OPTIONAL_BOOL,
    ),
    "init_lora_weights": (bool, str, NoneType),
    "modules_to_save": (list, NoneType),
    "target_modules": (list, str, NoneType),
}


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raise `InputError` unless the adapter is LoRA with settings that can be merged."""
    kind, init_method = config.get("peft_type"), config.get("init_lora_weights")
    unknown = sorted(key for key, value in config.items() if value and key not in _KNOWN_KEYS)
    invalid_keys = [key for key, kinds in _TYPES.items() if not isinstance(config.get(key), kinds)]
    unsupported = ""
    if kind != "LORA":
        unsupported = f"peft_type {kind!r}"
    elif unknown:
        unsupported = f"{unknown[0]} = {str(config[unknown[0]])[:60]}"
    elif isinstance(init_method, str) and init_method.lower().startswith(_WEIGHT_CHANGING_INITS):
        unsupported = (
            f"init_lora_weights = {init_method!r} has changed the weights of the model as well"
        )
    elif invalid_keys:
        unsupported = f"{invalid_keys[0]} = {str(config[invalid_keys[0]])[:60]!r} is of another type than PEFT writes"
    elif len(config.get("modules_to_save") or ()) > _MOST_SAVED:
        unsupported = f"modules_to_save of more than {_MOST_SAVED} entries"
    if unsupported:
        raise InputError(
            f"{unsupported}: not merged here",
            "PEFT merges no such adapter either: what it learned are inputs, not weights"
            if kind in _UNMERGEABLE_TYPES
            else merge_steps("MODEL", str(file.parent)),
            file=str(file),
            subject=str(file),
        )


def merge_steps(model: str, adapter: str, rows: int | None = None) -> str:
    """Return a hint with Python code that merges an adapter with PEFT; ``rows`` is a new vocabulary size."""
    resized = "" if rows is None else f"model.resize_token_embeddings({rows}); "
    return (
        f"merge it with PEFT first: model = AutoModelForCausalLM.from_pretrained({model!r}); {resized}"
        f"PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload().save_pretrained('merged');"
        " save the tokenizer that it was trained with there too, and quantize 'merged'"
    )


def trained_on(config: Mapping[str, Any]) -> str:
    """Return the model that an adapter was trained on, as a hint."""
    base_name = config.get("base_model_name_or_path")
    name = repr(base_name[:_MOST_SHOWN]) if isinstance(base_name, str) and base_name else "no model"
    return f"{CONFIG} names {name} as the model that it was trained on"


def modules_saved_whole(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of ``modules_to_save``; empty for tied weights, where PEFT may leave one out."""
    if config.get("ensure_weight_tying") is True:
        return ()
    return tuple(dict.fromkeys(map(str, config.get("modules_to_save") or ())))


def target_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names, or suffixes, of linears that are all changed; empty if other keys restrict them."""
    names = config.get("target_modules")
    is_restricted = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    return tuple(map(str, names)) if isinstance(names, list) and not is_restricted else ()


def module_number(
    file: Path, config: Mapping[str, Any], key: str, table: str, module: str
) -> float:
    """Return a number of the configuration for a module: that of the first matching pattern, else the default."""
    default, special = config.get(key), config.get(table) or {}
    if not isinstance(special, Mapping):
        raise InputError(f"{table} is no table", file=str(file), subject=str(file))
    for pattern, value in special.items():
        if patterns.matches_pattern(rf"(.*\.)?({pattern})", module, full_match=True):
            default = value
            break
    min_number = 0 if key == "r" else -(2**31)
    if (
        isinstance(default, bool)
        or not isinstance(default, int | float)
        or default == 0
        or not min_number < default < 2**31
    ):
        raise InputError(
            f"{key} = {default!r} of {module}",
            "the product is times lora_alpha / r, or over the root of r: r is a whole number of at least 1, the number"
            " of rows of lora_A; lora_alpha any number but 0, with which the adapter changes nothing",
            file=str(file),
            subject=str(file),
        )
    return default
