"""Headers and the configuration of an artifact, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantforge.architectures.match import Role
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import parse_object
from quantforge.errors import InputError
from quantforge.formats import format_of
from quantforge.formats.configuration import head_of, quantization_config
from quantforge.formats.declared_modules import declared
from quantforge.formats.decoded import decoded
from quantforge.formats.engine_families import TRANSFORMERS, ModelToLoad, judged
from quantforge.formats.gguf.tokenizer_json import added_tokens
from quantforge.formats.opening import side_data
from quantforge.formats.targets import target_of
from quantforge.model.transformers_loading import Loading, compare
from quantforge.verification.artifact import Artifact
from quantforge.verification.findings import Report
from quantforge_files.roles import TOKENIZER

SHOWN = 6  # modules named in a finding


def check_structure(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check everything that needs no tensor's values; ``engine``: one that has to load it.

    Raises:
        UsageError: no engine has that name.
    """
    _check_quantized(report, artifact)
    _check_ignored(report, artifact)
    _check_siblings(report, artifact)
    _check_vocabulary(report, artifact)
    _check_engine(report, artifact, engine)


def _check_quantized(report: Report, artifact: Artifact) -> None:
    left_over = artifact.checkpoint.quantization or quantization_config(artifact.checkpoint.config)
    if not artifact.layouts and left_over:
        report.add(
            "nothing-quantized",
            report.path.name,
            "config.json speaks of quantization, and no tensor is quantized",
        )


def _check_ignored(report: Report, artifact: Artifact) -> None:
    """Check what the configuration says of each linear against what is stored."""
    try:
        said = declared(artifact.checkpoint.config)
    except InputError as error:
        report.add("ignore-list", "config.json", error.message)
        return
    if said is None or not artifact.layouts:
        report.skip("the format has no list of what is left out", "ignore-list")
        return
    config = artifact.checkpoint.config
    stored = {
        tensor.stored.name.removesuffix(".weight"): tensor for tensor in artifact.matched.tensors
    }
    linears = {
        module: artifact.layout(tensor) is not None
        for module, tensor in stored.items()
        if tensor.role is Role.LINEAR or artifact.layout(tensor) is not None
    }
    head = stored.get(head_of(config))
    if head is not None or artifact.matched.tied:  # loaders make a layer of a tied one too
        linears.setdefault(head_of(config), False)
    lies: dict[str, list[str]] = {}
    for module, packed in linears.items():
        try:
            answers = said(module)
        except InputError as error:
            report.add("ignore-list", "config.json", error.message)
            return
        if answers - {packed}:
            words = (
                "is quantized, config.json leaves it out"
                if packed
                else ("is not quantized, config.json says that it is")
            )
            lies.setdefault(words, []).append(module)
    for words, modules in lies.items():
        report.add("ignore-list", modules[0], f"{words} ({_counted(modules)})")


def _check_siblings(report: Report, artifact: Artifact) -> None:
    if not format_of(report.format).ABOUT.joined:
        report.skip("engines of the format load every matrix by itself", "siblings")
        return
    schemes: dict[str, dict[str, str]] = {}
    for tensor in artifact.matched.tensors:
        if tensor.role is Role.LINEAR and tensor.shared:
            layout = artifact.layout(tensor)
            module = tensor.stored.name.removesuffix(".weight")
            text = str(layout.scheme) if layout else "not quantized"
            schemes.setdefault(tensor.shared, {})[module] = text
    for modules in schemes.values():
        if len(set(modules.values())) > 1:
            text = ", ".join(f"{name.rpartition('.')[2]} {word}" for name, word in modules.items())
            report.add("siblings", next(iter(modules)), f"engines load them as one matrix: {text}")


def _check_vocabulary(report: Report, artifact: Artifact) -> None:
    """Check the ids of the tokenizer against the rows of the embedding.

    Added tokens past the rows are a warning: models are published so, and no text has these tokens unless it names
    them. Pieces of the vocabulary past the rows are of another model.
    """
    found_tokens = _tokens(report.path, artifact)
    if found_tokens is None:
        report.skip("there is no tokenizer.json", "vocabulary")
        return
    pieces, added = found_tokens
    known = artifact.matched.architecture is not None
    found = [t for t in artifact.matched.tensors if t.role in {Role.EMBEDDING, Role.HEAD}]
    most = max((tensor.stored.shape[0] for tensor in found), default=0)
    for tensor in found:
        # By names alone, tables of segments and positions are taken for embeddings too.
        rows = tensor.stored.shape[0]
        past = sorted((number, text) for text, number in pieces.items() if number >= rows)
        more = sorted((number, text) for text, number in added.items() if number >= rows)
        if (past or more) and (known or rows == most):
            shown = ", ".join(f"{text!a:.60} (id {number})" for number, text in (past or more)[:3])
            count = len(past) + len(more)
            say = report.add if past else report.warn
            say(
                "vocabulary",
                tensor.stored.name,
                f"{rows} rows, and {count} token(s) of the tokenizer past them: {shown}",
            )


def _tokens(path: Path, artifact: Artifact) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return pieces and added tokens of ``tokenizer.json`` with their ids, or None without one that can be read."""
    file = path / "tokenizer.json"
    if path.is_dir():
        if not file.is_file():
            return None
        data = FILES.read(file, TOKENIZER, path)
    else:
        found = side_data(artifact.checkpoint).get("tokenizer.json")
        if found is None:
            return None
        data = found
    try:
        document = parse_object(data, file, TOKENIZER)
        tokens = tokens_of(document)
        added = {item["content"]: item["id"] for item in added_tokens(document)}
        return {text: tokens[text] for text in tokens.keys() - added.keys()}, added
    except (InputError, ValueError, AttributeError, TypeError, KeyError):
        return None


def tokens_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return every token of ``tokenizer.json``, added ones too, with its id.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no tokenizer.
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
        raise TypeError("an id is no number")
    return tokens


def _check_engine(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check that an engine loads the artifact: by the rules of its format; of transformers, by its own loader too."""
    if engine is None:
        report.skip("no engine was named (--for)", "engine")
        return
    about, model = artifact.form.ABOUT, _model_of(artifact)
    of = engine if engine in about.engines else target_of(engine).judged
    loading = Loading()
    if of == TRANSFORMERS and not (about.one_file or model.draft):
        loading = _loading(artifact)
        model = replace(model, compared=not loading.untried)
    found = next(item for item in judged(about, model) if item.engine == of)
    refused = found.reason if found.loads is False else ""
    if refused or loading.obstacle:
        report.add("engine", engine, "; ".join(filter(None, (loading.obstacle, refused))))
    elif loading.untried:
        report.skip(f"not tried: {loading.untried}", "engine")


def _loading(artifact: Artifact) -> Loading:
    """Return what transformers' own loader makes of the names and shapes of an artifact."""
    checkpoint = artifact.checkpoint
    return compare(
        checkpoint.config,
        [entry.stored() for entry in checkpoint.entries.values()],
        checkpoint.read,
        lambda: [entry.stored() for entry in decoded(checkpoint).entries.values()],
    )


def _model_of(artifact: Artifact) -> ModelToLoad:
    matched, config = artifact.matched, artifact.checkpoint.config
    return ModelToLoad(
        {module: (item.scheme, item.shape) for module, item in artifact.layouts.items()},
        (matched.model_type, str(config.get("model_type"))),
        transposed=matched.architecture is not None and matched.architecture.transposed,
        turned=any(item.turned for item in artifact.layouts.values()),
        unstacked=matched.architecture is not None
        and matched.architecture.stacks_experts
        and not matched.architecture.joins_experts,
        kept=tuple(t.stored.name for t in matched.tensors if artifact.layout(t) is None),
        embedding=any(
            tensor.role is Role.EMBEDDING and artifact.layout(tensor) for tensor in matched.tensors
        ),
        running=artifact.running,
        draft=matched.draft,
    )


def _counted(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)}: {', '.join(names[:SHOWN])}{more}"
