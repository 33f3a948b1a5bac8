"""Quantization declared by a model directory: find the declaration, compare it with the tensors.

The tensors decide. If none is packed, the weights are plain numbers and any declaration is left over: a merged model
keeps the declaration of its base model, which was loaded in 4 bits for training. If some are packed, a declaration is
needed, and tools have written it in several places:

=========================================  ========================================================================
``config.json``: ``quantization_config``   all current tools; if it is not empty, nothing else is read
``config.json``: ``quantization``          mlx-lm; its older versions write only this
``config.json``: ``compression_config``    llm-compressor of 2024; directly, or in a ``quantization_config`` inside
the same within ``text_config`` and such   multimodal models, for their text model
``quantize_config.json``                   AutoGPTQ and GPTQModel; older versions write only this
``quant_config.json``                      AutoAWQ; older versions write only this
``quantization_config.json``               AutoRound
``hf_quant_config.json``                   NVIDIA's Model Optimizer
=========================================  ========================================================================

Each method lists the unquantized modules in its own way (`quantization_predicate`): by whole names or patterns
(compressed-tensors' ``ignore``), by parts of names (``modules_to_not_convert``), or by regular expressions (GPTQ's
``dynamic``). Readers differ, too: optimum ignores ``dynamic`` and reads only ``modules_in_block_to_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.match import ModelLayout, Role, holds_codes
from quantforge.errors import InputError
from quantforge.files.opener import FILES, read_object
from quantforge.files.reader import CONFIG_FILE, Checkpoint
from quantforge.formats import ModuleLayout, detect_format
from quantforge.formats.configuration import (
    find_quantization_keys,
    head_module,
    name_variants,
    name_within_block,
    quantization_config,
    string_list,
    strip_quantization_keys,
)
from quantforge.formats.patterns import ModulePatterns, config_pattern_matches
from quantforge.formats.read_checks import contradiction_error
from quantforge_files import roles

CONFIG_KEY = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"
# Endings of quantization parameters: a model with such a tensor keeps its declaration, even if no weight is packed.
_PARAMETER_SUFFIXES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".qzeros", ".absmax", ".SCB", ".k_scale", ".v_scale",
)  # fmt: skip
# Files that declare a quantization, each with the method to assume if the file names none, as the oldest do.
_METHOD_BY_FILE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "",
    _MODELOPT_FILE: "modelopt",
}
# The tool that writes tensors whose names end this way; the first match counts.
_TOOL_BY_SUFFIX = (
    (".g_idx", "AutoGPTQ or GPTQModel (GPTQ)"),
    (".qweight", "AutoAWQ (AWQ), or AutoRound"),
    (".weight_packed", "llm-compressor (compressed-tensors)"),
    (".SCB", "bitsandbytes (8 bits)"),
    (".absmax", "bitsandbytes (4 bits)"),
    (".weight_scale_inv", "DeepSeek's converter (fp8)"),
    (".weight_scale_2", "NVIDIA's Model Optimizer (NVFP4)"),
    (".weight_scale", "llm-compressor (compressed-tensors), or NVIDIA's Model Optimizer"),
    (".biases", "mlx-lm (MLX)"),
    ("_blocks", "OpenAI's converter (MXFP4)"),
    (".W_q", "HQQ"),
    ("._data", "optimum-quanto"),
    (".codebooks", "AQLM"),
    (".Qidxs", "QuIP#"),
    (".trellis", "ExLlamaV3"),
    (".q_weight", "ExLlamaV2"),
    (".centroids.weight", "VPTQ"),
)
_MAX_SHOWN = 4  # names in an error
QuantizationPredicate = Callable[[str], Set[bool]]


def resolve_declaration(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its declaration in ``quantization_config``, or without one if no tensor is packed.

    A declaration in another place is moved there, and one that is left over is dropped. Zero biases, which AutoGPTQ of
    2023 stored for every linear, are dropped where the family has no bias. `Checkpoint.declaration_note` records what
    was dropped, and the place of a declaration unless it is usual for its tool.

    Raises:
        InputError: tensors are packed and nothing declares how, several places declare it differently and
            ``quantization_config`` is empty, or a file that declares it cannot be read.
    """
    checkpoint = _declared_once(checkpoint)
    added_biases = _added_biases(checkpoint)
    if not added_biases:
        return checkpoint
    note = f"{len(added_biases)} biases of zeros, which GPTQ tools add, are left out"
    return replace(
        checkpoint,
        entries={
            name: entry for name, entry in checkpoint.entries.items() if name not in added_biases
        },
        declaration_note="; ".join(filter(None, (checkpoint.declaration_note, note))),
    )


def _added_biases(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of the biases that GPTQ tools added; none if a bias that the family lacks is not all zeros."""
    biases = [
        name
        for name in checkpoint.entries
        if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in checkpoint.entries
    ]
    text = text_config(checkpoint.config)
    family = architecture_of(checkpoint.config) or architecture_of(text)
    if not biases or family is None:
        return frozenset()
    kinds = family.layer_kinds(text, family.dimensions(text))
    declared = [{item.stored or item.name for item in kind.parameters} for kind in kinds]
    added = set()
    for name in biases:
        local_name = name_within_block(name)
        block = (
            int(name.removesuffix(f".{local_name}").rpartition(".")[2])
            if local_name
            else len(declared)
        )
        if block >= len(declared) or local_name in declared[block]:
            continue
        if bool(checkpoint.read(name).any()):
            return frozenset()  # trained biases: `match` refuses the model and names them
        added.add(name)
    return frozenset(added)


def _declared_once(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with at most one declaration, in ``quantization_config``."""
    config = checkpoint.config
    packed = [
        name for name, entry in checkpoint.entries.items() if holds_codes(entry.to_stored_tensor())
    ]
    if not packed and not any(name.endswith(_PARAMETER_SUFFIXES) for name in checkpoint.entries):
        return _drop_declarations(checkpoint)
    declaration = config.get(CONFIG_KEY)
    if isinstance(declaration, Mapping) and declaration:
        method = _missing_modelopt_method(checkpoint) if "quant_method" not in declaration else {}
        return (
            replace(checkpoint, config={**config, CONFIG_KEY: {**declaration, **method}})
            if method
            else checkpoint
        )
    if isinstance(config.get("quantization"), Mapping) and config["quantization"]:
        return replace(checkpoint, config={**config, CONFIG_KEY: config["quantization"]})
    declarations = dict(_other_declarations(checkpoint))
    if not declarations:
        if packed:
            raise _undeclared_error(checkpoint, packed)
        return _drop_declarations(checkpoint)
    first, declared = next(iter(declarations.items()))
    for location, other in declarations.items():
        if other != declared:
            raise InputError(
                f"{first} and {location} declare different quantizations",
                f"put the right one into {CONFIG_FILE} as {CONFIG_KEY}",
                file=str(checkpoint.path),
                subject=str(checkpoint.path),
            )
    config = {**strip_quantization_keys(config), CONFIG_KEY: declared}
    usual = first == _MODELOPT_FILE
    note = "" if usual else f"read from {first}, because {CONFIG_FILE} has no {CONFIG_KEY}"
    return replace(checkpoint, config=config, declaration_note=note)


def _drop_declarations(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint in which no tensor is packed, with every declaration of a quantization removed."""
    config = strip_quantization_keys(checkpoint.config)
    unused = {
        path: declarations
        for path, declarations in find_quantization_keys(checkpoint.config)
        if declarations is not None
    }
    if not unused:
        return checkpoint if config == checkpoint.config else replace(checkpoint, config=config)
    methods = {
        str(declarations.get("quant_method")) if isinstance(declarations, Mapping) else "None"
        for declarations in unused.values()
    }
    method_names = sorted(methods - {"None"})
    suffix = f" ({', '.join(method_names)})" if method_names else ""
    return replace(
        checkpoint,
        config=config,
        declaration_note=f"{', '.join(unused)}{suffix} in {CONFIG_FILE} is left over and not read: no tensor is packed",
    )


def _other_declarations(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield other places that declare a quantization, each with the declaration; files only if no key declares one."""
    has_modelopt_file = False
    for path, declaration in find_quantization_keys(checkpoint.config):
        if not isinstance(declaration, Mapping) or not declaration or path.endswith("quantization"):
            continue
        inner = declaration.get(CONFIG_KEY)
        has_modelopt_file = True
        yield (
            f"{path} of {CONFIG_FILE}",
            {**declaration, **inner} if isinstance(inner, Mapping) else {**declaration},
        )
    if has_modelopt_file or not checkpoint.path.is_dir():
        return
    names = FILES.list_names(checkpoint.path, None)
    for name, method in _METHOD_BY_FILE.items():
        if name in names:
            yield name, _read_declaration_file(checkpoint, name, method)


def _read_declaration_file(checkpoint: Checkpoint, name: str, method: str) -> dict[str, Any]:
    """Return the declaration in a file, with its method; for Model Optimizer, only its ``quantization`` object."""
    declaration = read_object(checkpoint.path / name, roles.CONFIG, checkpoint.path)
    inner = declaration.get("quantization")
    if method == "modelopt":
        declaration = inner if isinstance(inner, dict) else {}
    elif "w_bit" in declaration or "q_group_size" in declaration:
        method = "awq"
    return {**({"quant_method": method} if method else {}), **declaration}


def _missing_modelopt_method(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the missing ``quant_method`` to add: ``modelopt`` if the directory has that tool's file, else nothing."""
    has_modelopt_file = _MODELOPT_FILE in FILES.list_names(checkpoint.path, None)
    return {"quant_method": "modelopt"} if has_modelopt_file else {}


def _undeclared_error(checkpoint: Checkpoint, packed: list[str]) -> InputError:
    tool = next(
        (
            tool
            for end, tool in _TOOL_BY_SUFFIX
            if any(name.endswith(end) for name in checkpoint.entries)
        ),
        "",
    )
    kinds = sorted({checkpoint.entries[name].dtype for name in packed})
    more_suffix = f" and {len(packed) - _MAX_SHOWN} more" if len(packed) > _MAX_SHOWN else ""
    tool_text = f"; {tool} writes such names" if tool else ""
    message = f"{len(packed)} tensor(s) are packed ({', '.join(kinds)}: {', '.join(packed[:_MAX_SHOWN])}{more_suffix})"
    return InputError(
        f"{message}, and neither {CONFIG_FILE} nor a file beside it declares how{tool_text}",
        f"fetch {CONFIG_FILE} again: its {CONFIG_KEY} is missing",
        file=str(checkpoint.path),
        tensor=packed[0],
        subject=str(checkpoint.path),
    )


# Which linears


def quantization_predicate(config: Mapping[str, Any]) -> QuantizationPredicate | None:
    """Return a function that tells whether the module with a name is quantized; None if the method has no such list.

    It returns the set of the answers that readers give: one if they agree, both if they differ, empty if uncertain.

    Raises:
        InputError: a list of modules is malformed; some errors are raised only when the function is called.
    """
    declaration = quantization_config(config)
    method = declaration.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors_predicate(
            declaration, lambda module: name_variants(module, config)
        )
    if method == "gptq":
        return lambda module: _gptq_answers(declaration, module, head_module(config))
    key = detect_format(config).INFO.skip_list_key if method else ""
    if not key:
        return None
    names = string_list(declaration, key) or string_list(declaration, "ignored_layers")
    return lambda module: _answers_by_name_parts(
        names, name_variants(module, config), head_module(config)
    )


def check_declared_modules(
    config: Mapping[str, Any], model_layout: ModelLayout, layouts: Mapping[str, ModuleLayout]
) -> None:
    """Check that exactly the linears that the configuration declares as quantized are packed.

    Raises:
        InputError: all readers would take a packed linear for an unpacked one, or the other way around.
    """
    answers = (
        quantization_predicate(config)
        if layouts and model_layout.architecture is not None
        else None
    )
    if answers is None:
        return
    modules_by_packing: dict[bool, list[str]] = {}
    for tensor in model_layout.tensors:
        if tensor.role is Role.LINEAR and tensor.block >= 0 and not tensor.draft_head:
            module = tensor.header.name.removesuffix(".weight")
            packed = module in layouts
            if answers(module) == {not packed}:
                modules_by_packing.setdefault(packed, []).append(module)
    for packed, modules in modules_by_packing.items():
        more_suffix = f" and {len(modules) - _MAX_SHOWN} more" if len(modules) > _MAX_SHOWN else ""
        declared_state, actual_state = (
            ("not quantized", "packed") if packed else ("quantized", "not packed")
        )
        raise contradiction_error(
            f"quantization_config says that {modules[0]} is {declared_state}",
            f"{len(modules)} such modules are {actual_state}: {', '.join(modules[:_MAX_SHOWN])}{more_suffix}",
            modules[0],
        )


def _compressed_tensors_predicate(
    config: Mapping[str, Any], names_of: Callable[[str], list[str]]
) -> QuantizationPredicate:
    """Return the predicate for compressed-tensors: a linear is quantized if a group targets it and ``ignore`` does not.

    ``names_of`` returns all names under which a module may be listed.
    """
    groups = config.get("config_groups")
    targets = [
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in string_list(group, "targets")
    ]
    targeted, ignored = ModulePatterns(targets), ModulePatterns(string_list(config, "ignore"))

    def quantized(name: str) -> set[bool]:
        names = names_of(name)
        if any(ignored.match_rank(item) is not None for item in names):
            return {False}
        return {"Linear" in targets or any(targeted.match_rank(item) is not None for item in names)}

    return quantized


def _gptq_answers(config: Mapping[str, Any], module: str, head: str) -> set[bool]:
    if module == head:
        return {config.get("lm_head") is True}
    answers = set()
    rules = config.get("dynamic")
    for pattern in rules if isinstance(rules, Mapping) else ():
        if config_pattern_matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            answers.add(not pattern.startswith("-:"))
            break
    listed_modules = config.get("modules_in_block_to_quantize") or []
    if not isinstance(listed_modules, list):
        raise InputError(
            f"modules_in_block_to_quantize = {str(listed_modules)[:60]} is no list",
            subject="config.json",
        )
    names = [
        name for group in listed_modules for name in (group if isinstance(group, list) else [group])
    ]
    if names:
        answers.add(module in names or name_within_block(module) in names)
    return answers or {True}


def _answers_by_name_parts(entries: Iterable[str], names: Iterable[str], head: str) -> set[bool]:
    """Return the answers for a module with these names: unquantized if an entry is part of one of them.

    The head is uncertain where no entry names it: most readers leave it unquantized, but not all.
    """
    names = list(names)
    if any(_is_part(str(entry), name) for entry in entries for name in names):
        return {False}
    return set() if head in names else {True}


def _is_part(entry: str, name: str) -> bool:
    """Return whether an entry is the whole name, or consecutive parts of it, split at dots."""
    return f".{entry}." in f".{name}."
