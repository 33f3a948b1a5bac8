"""Check the headers of the tensors, the configuration and the tokenizer against each other; no values are read.

A contradiction is an error if no loader can get the model right, and a warning if some loaders do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import parse_object
from quantforge.errors import InputError
from quantforge.formats.configuration import head_of, quantization_config
from quantforge.formats.declared_modules import declared
from quantforge.formats.decoded import decoded
from quantforge.formats.engine_families import TRANSFORMERS, ModelToLoad, judged
from quantforge.formats.gguf.tokenizer_json import added_tokens
from quantforge.formats.opening import side_data
from quantforge.formats.targets import target_of
from quantforge.model.transformers_loading import Loading, compare, compare_plain
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact, Original
from quantforge_files.roles import TOKENIZER

TOKENIZER_FILE = "tokenizer.json"
SHOWN = 6  # names in a finding


def check_structure(
    report: Report, artifact: Artifact, engine: str | None, source: Original | None = None
) -> None:
    """Make all checks that need no values.

    Args:
        report: gets the findings.
        artifact: the opened artifact.
        engine: name of an engine that has to load it.
        source: the model that it is compared with.

    Raises:
        UsageError: no engine has that name.
    """
    _check_quantized(report, artifact)
    _check_siblings(report, artifact, engine)
    _check_vocabulary(report, artifact)
    _check_engine(report, artifact, engine)
    _check_towers(report, artifact, source)


def _check_quantized(report: Report, artifact: Artifact) -> None:
    """Check that something is quantized if the configuration declares it, and that it declares what is."""
    checkpoint = artifact.checkpoint
    quantization = quantization_config(checkpoint.config)
    only_cache = not artifact.layouts and quantization.get("kv_cache_scheme") is not None
    if not artifact.layouts and not only_cache and (checkpoint.quantization or quantization):
        text = "config.json declares a quantization, but no tensor is quantized"
        report.add("nothing-quantized", report.path.name, text)
    try:
        says = declared(checkpoint.config) if artifact.layouts or only_cache else None
        if says is None:
            report.skip("the format has no list of unquantized layers", "ignore-list")
            return
        answers = {module: says(module) for module in _linears(artifact)}
    except InputError as error:
        report.add("ignore-list", "config.json", error.message)
        return
    wrong: dict[tuple[str, Severity], list[str]] = {}
    for module, stored in _linears(artifact).items():
        if answers[module] - {stored is True}:
            text = (
                "quantized, but config.json excludes it"
                if stored
                else "not quantized, but config.json declares that it is"
            )
            # Loaders disagree on the list, or use the embedding and never look for a head.
            unsure = len(answers[module]) > 1 or stored is None
            severity = Severity.WARNING if unsure else Severity.ERROR
            wrong.setdefault((text, severity), []).append(module)
    for (text, severity), modules in wrong.items():
        report.add("ignore-list", modules[0], f"{text}{_others(modules)}", severity)


def _linears(artifact: Artifact) -> dict[str, bool | None]:
    """Return whether each linear is quantized, by module as stored; None for a tied head, which has no tensor."""
    found: dict[str, bool | None] = {}
    head = head_of(artifact.checkpoint.config)
    for tensor in artifact.matched.tensors:
        module, packed = _module(tensor), artifact.layout(tensor) is not None
        if packed or tensor.role is Role.LINEAR or module == head:
            found[module] = packed
    if artifact.matched.tied:
        found.setdefault(head, None)
    return found


def _check_siblings(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check that matrices that engines join have one scheme: transformers does not join them, others do."""
    if not artifact.form.ABOUT.joined:
        report.skip("engines of the format load every matrix separately", "siblings")
        return
    schemes: dict[str, dict[str, str]] = {}
    for tensor in artifact.matched.tensors:
        if tensor.role is Role.LINEAR and tensor.shared:
            layout = artifact.layout(tensor)
            scheme = str(layout.scheme) if layout else "not quantized"
            schemes.setdefault(tensor.shared, {})[_module(tensor)] = scheme
    severity = Severity.WARNING if engine in {None, TRANSFORMERS} else Severity.ERROR
    for modules in schemes.values():
        if len(set(modules.values())) > 1:
            text = ", ".join(f"{name.rpartition('.')[2]} {word}" for name, word in modules.items())
            text = f"vLLM and others load these as one matrix and need one scheme: {text}"
            report.add("siblings", next(iter(modules)), text, severity)


def _check_vocabulary(report: Report, artifact: Artifact) -> None:
    """Check that every token has a row in the embedding.

    Models are published with added tokens beyond it, which no text contains unless it names them: a warning. A piece of
    the vocabulary beyond it is an error: the tokenizer belongs to another model.
    """
    try:
        tokenizer = _tokenizer(artifact)
    except InputError as error:
        report.warn("vocabulary", report.path.name, f"its tokens cannot be read: {error.message}")
        return
    if tokenizer is None:
        report.skip(f"there is no {TOKENIZER_FILE}", "vocabulary")
        return
    try:
        tokens = tokens_of(tokenizer)
        added = {item["content"] for item in added_tokens(tokenizer)}
    except (InputError, ValueError, AttributeError, TypeError, KeyError):
        report.skip(f"{TOKENIZER_FILE} cannot be read", "vocabulary")
        return
    found = [t for t in artifact.matched.tensors if t.role in {Role.EMBEDDING, Role.HEAD}]
    if artifact.matched.architecture is None:  # names alone cannot tell it from tables of positions
        most = max((tensor.stored.shape[0] for tensor in found), default=0)
        found = [tensor for tensor in found if tensor.stored.shape[0] == most]
    for tensor in found:
        rows = tensor.stored.shape[0]
        beyond = sorted((number, text) for text, number in tokens.items() if number >= rows)
        pieces = [(number, text) for number, text in beyond if text not in added]
        if beyond:
            shown = ", ".join(
                f"{text!a:.60} (id {number})" for number, text in (pieces or beyond)[:3]
            )
            text = f"{rows} rows, but the tokenizer has {len(beyond)} token(s) beyond them: {shown}"
            severity = Severity.ERROR if pieces else Severity.WARNING
            report.add("vocabulary", tensor.stored.name, text, severity)


def _tokenizer(artifact: Artifact) -> dict[str, Any] | None:
    """Return ``tokenizer.json``, of a GGUF file that which its keys describe; None without a readable one.

    Raises:
        InputError: the keys of a GGUF file describe none.
    """
    path = artifact.checkpoint.path
    file = path / TOKENIZER_FILE
    if path.is_dir():
        data = FILES.read(file, TOKENIZER, path) if file.is_file() else None
    else:
        data = side_data(artifact.checkpoint).get(TOKENIZER_FILE)
    try:
        return None if data is None else parse_object(data, file, TOKENIZER)
    except InputError:
        return None


def tokens_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of every token of ``tokenizer.json``, including added tokens.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not a tokenizer.
    """
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram: pieces with their scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    try:
        added = {item["content"]: item["id"] for item in added_tokens(tokenizer)}
    except InputError as error:
        raise ValueError(error.message) from error
    tokens = {**vocabulary, **added}
    if not all(type(number) is int for number in tokens.values()):
        raise TypeError("an id is not a number")
    return tokens


def _check_towers(report: Report, artifact: Artifact, source: Original | None) -> None:
    """Check that another tower, or a head for further tokens, is there whole or not at all.

    Its tensors are those of the source; without a source, those that transformers expects.
    """
    own = {_running(tensor.name) for tensor in artifact.matched.foreign}
    towers = {name.partition(".")[0] for name in own}
    if source is not None:
        expected = [tensor.name for tensor in source.matched.foreign]
    elif any(not tensor.further for tensor in artifact.matched.foreign):
        checkpoint = artifact.checkpoint
        plain = [entry.stored() for entry in decoded(checkpoint).entries.values()]
        expected = [*compare_plain(checkpoint.config, plain).missing]
    else:
        return
    for name in expected:
        if _running(name) not in own and _running(name).partition(".")[0] in towers:
            report.add(
                "incomplete", name, "missing, but other tensors of this part of the model are there"
            )


def _running(name: str) -> str:
    """Return the name of a tensor without the prefix that some files leave out."""
    return name.removeprefix("model.")


def _check_engine(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check that an engine loads the artifact, by the rules of its format; for transformers, by its own loader too."""
    if engine is None:
        report.skip("no engine was named (--for)", "engine")
        return
    about, model = artifact.form.ABOUT, _model_of(artifact)
    name = engine if engine in about.engines else target_of(engine).judged
    loading = Loading()
    if name == TRANSFORMERS and not (about.one_file or model.draft):
        loading = _loading(artifact)
        model = replace(model, compared=not loading.untried)
    verdict = next(item for item in judged(about, model) if item.engine == name)
    refused = verdict.reason if verdict.loads is False else ""
    if refused or loading.obstacle:
        report.add("engine", engine, "; ".join(filter(None, (loading.obstacle, refused))))
    elif loading.untried:
        report.skip(f"not tried: {loading.untried}", "engine")


def _loading(artifact: Artifact) -> Loading:
    """Return what transformers' own loader makes of the names and shapes of the tensors."""
    checkpoint = artifact.checkpoint
    return compare(
        checkpoint.config,
        [entry.stored() for entry in checkpoint.entries.values()],
        checkpoint.read,
        lambda: [entry.stored() for entry in decoded(checkpoint).entries.values()],
    )


def _model_of(artifact: Artifact) -> ModelToLoad:
    matched, family = artifact.matched, artifact.matched.architecture
    layouts = artifact.layouts
    return ModelToLoad(
        {module: (layout.scheme, layout.shape) for module, layout in layouts.items()},
        (matched.model_type, str(artifact.checkpoint.config.get("model_type"))),
        transposed=family is not None and family.transposed,
        turned=any(layout.turned for layout in layouts.values()),
        unstacked=family is not None and family.stacks_experts and not family.joins_experts,
        kept=tuple(t.stored.name for t in matched.tensors if artifact.layout(t) is None),
        embedding=any(t.role is Role.EMBEDDING and artifact.layout(t) for t in matched.tensors),
        running=artifact.running,
        draft=matched.draft,
    )


def _module(tensor: MatchedTensor) -> str:
    return tensor.stored.name.removesuffix(".weight")


def _others(modules: list[str]) -> str:
    """Return the modules after the first, for the end of a finding."""
    if len(modules) == 1:
        return ""
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    return f"; {len(modules)} in all: {', '.join(modules[:SHOWN])}{more}"
