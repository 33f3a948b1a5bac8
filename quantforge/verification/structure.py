"""Check tensor headers, configuration and tokenizer against each other; of values, only a few scales are read.

A contradiction is an error if no loader can load the model correctly, and a warning if some loaders do.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.engines import target_of
from quantforge.errors import InputError
from quantforge.files.opener import FILES, parse_object
from quantforge.files.reader import CONFIG_FILE
from quantforge.formats import ModuleLayout
from quantforge.formats.configuration import head_module, quantization_config
from quantforge.formats.declared_quantization import quantization_predicate
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.engine_verdicts import TRANSFORMERS, ModelToLoad, engine_verdicts
from quantforge.formats.gguf.tokenizer import added_tokens
from quantforge.formats.open_model import tokenizer_side_files
from quantforge.model.transformers_loading import LoadingResult, check_loading, check_plain_loading
from quantforge.plans import StoredTensor
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact, SourceModel
from quantforge.verification.side_files import TOKENIZER as TOKENIZER_FILE
from quantforge.verification.side_files import token_ids
from quantforge_files.roles import TOKENIZER

MAX_SHOWN_NAMES = 6  # names listed in a finding


def check_structure(
    report: Report, artifact: Artifact, engine: str | None, source: SourceModel | None = None
) -> None:
    """Make all checks of the structure.

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
    """Check that the quantized layers are exactly those that the configuration declares."""
    config = artifact.checkpoint.config
    quantization = quantization_config(config)
    only_cache = not artifact.layouts and quantization.get("kv_cache_scheme") is not None
    if (
        not artifact.layouts
        and not only_cache
        and (artifact.checkpoint.declaration_note or quantization)
    ):
        text = f"{CONFIG_FILE} declares a quantization, but no tensor is quantized"
        report.add("nothing-quantized", report.path.name, text)
    linears = _quantized_by_module(artifact)
    try:
        predicate = quantization_predicate(config) if artifact.layouts or only_cache else None
        if predicate is None:
            report.skip("the format has no list of unquantized layers", "ignore-list")
            return
        answers = {module: predicate(module) for module in linears}
    except InputError as error:
        report.add("ignore-list", CONFIG_FILE, error.message)
        return
    contradictions: dict[tuple[str, Severity], list[str]] = {}
    for module, stored in linears.items():
        if answers[module] - {stored is True}:
            text = f"not quantized, but {CONFIG_FILE} declares that it is"
            if stored:
                text = f"quantized, but {CONFIG_FILE} excludes it"
            # Loaders disagree on the list, or use the embedding and never look for a head.
            is_ambiguous = len(answers[module]) > 1 or stored is None
            severity = Severity.WARNING if is_ambiguous else Severity.ERROR
            contradictions.setdefault((text, severity), []).append(module)
    for (text, severity), modules in contradictions.items():
        more_suffix = (
            f" and {len(modules) - MAX_SHOWN_NAMES} more" if len(modules) > MAX_SHOWN_NAMES else ""
        )
        listing = f"; {len(modules)} in all: {', '.join(modules[:MAX_SHOWN_NAMES])}{more_suffix}"
        detail = text + (listing if len(modules) > 1 else "")
        report.add("ignore-list", modules[0], detail, severity)


def _quantized_by_module(artifact: Artifact) -> dict[str, bool | None]:
    """Return whether each linear is quantized, by stored module name; None for a tied head without tensor."""
    result: dict[str, bool | None] = {}
    head = head_module(artifact.checkpoint.config)
    for tensor in artifact.model_layout.tensors:
        module, is_quantized = _module_name(tensor), artifact.layout(tensor) is not None
        if is_quantized or tensor.role is Role.LINEAR or module == head:
            result[module] = is_quantized
    return {head: None, **result} if artifact.model_layout.tied else result


def _check_siblings(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check that matrices that engines join have the same scheme, and the same scale where the joined one has one.

    Transformers does not join them, other engines do. vLLM takes the largest of several global scales for all of them,
    with a warning in its log, and so computes with other weights than the file holds.
    """
    if not artifact.format.INFO.fuses_shared_inputs:
        report.skip("engines of the format load every matrix separately", "fused-layers")
        return
    schemes: dict[str, dict[str, str]] = {}
    scales: dict[str, dict[str, float]] = {}
    for tensor in artifact.model_layout.tensors:
        if tensor.role is Role.LINEAR and tensor.shared_input:
            layout = artifact.layout(tensor)
            scheme = str(layout.scheme) if layout else "not quantized"
            schemes.setdefault(tensor.shared_input, {})[_module_name(tensor)] = scheme
            for suffix, scale in _fused_scales(artifact, layout).items():
                scales.setdefault(tensor.shared_input + suffix, {})[_module_name(tensor)] = scale
    severity = Severity.WARNING if engine in {None, TRANSFORMERS} else Severity.ERROR
    for modules in schemes.values():
        if len(set(modules.values())) > 1:
            text = ", ".join(
                f"{name.rpartition('.')[2]} {precision}" for name, precision in modules.items()
            )
            text = f"vLLM and others load these as one matrix and need one scheme: {text}"
            report.add("fused-layers", next(iter(modules)), text, severity)
    for key, module_scales in scales.items():
        if len(set(module_scales.values())) > 1:
            text = ", ".join(
                f"{name.rpartition('.')[2]} {scale:g}" for name, scale in module_scales.items()
            )
            suffix = next(s for s in artifact.format.INFO.fused_scale_suffixes if key.endswith(s))
            text = f"vLLM and others load these as one matrix and need one {suffix[1:]}: {text}"
            report.add("fused-layers", next(iter(module_scales)), text, severity)


def _fused_scales(artifact: Artifact, layout: ModuleLayout | None) -> dict[str, float]:
    """Return the scales of a quantized linear that must be equal in fused linears, by suffix.

    Scales that cannot be read are left out: the checks of tensors report them.
    """
    scales: dict[str, float] = {}
    if layout is None:
        return scales
    for suffix in artifact.format.INFO.fused_scale_suffixes:
        name = f"{layout.module}{suffix}"
        if name in layout.tensor_names:
            with suppress(InputError):
                value = artifact.checkpoint.read(name)
                if value.numel() == 1:
                    scales[suffix] = float(value)
    return scales


def _check_vocabulary(report: Report, artifact: Artifact) -> None:
    """Check that every token has a row in the embedding.

    Some models are published with added tokens beyond the embedding, which no ordinary text contains: a warning. A
    vocabulary piece beyond it is an error: the tokenizer belongs to another model.
    """
    path = artifact.checkpoint.path
    file = path / TOKENIZER_FILE
    try:
        if path.is_dir():
            data = FILES.read(file, TOKENIZER, path) if file.is_file() else None
        else:  # what the keys of a GGUF file describe
            data = tokenizer_side_files(artifact.checkpoint).get(TOKENIZER_FILE)
        if data is None:
            report.skip(f"there is no {TOKENIZER_FILE}", "vocabulary")
            return
        tokenizer = parse_object(data, file, TOKENIZER)
        tokens = token_ids(tokenizer)
        added_texts = {item["content"] for item in added_tokens(tokenizer)}
    except InputError as error:
        if path.is_dir():  # `side_files` and `consistency` tell what is wrong with it
            report.skip(f"{TOKENIZER_FILE} cannot be read", "vocabulary")
        else:
            report.warn("vocabulary", path.name, f"its tokens cannot be read: {error.message}")
        return
    tables = [t for t in artifact.model_layout.tensors if t.role in {Role.EMBEDDING, Role.HEAD}]
    if (
        artifact.model_layout.architecture is None
    ):  # names alone cannot tell it from tables of positions
        max_rows = max((tensor.header.shape[0] for tensor in tables), default=0)
        tables = [tensor for tensor in tables if tensor.header.shape[0] == max_rows]
    for tensor in tables:
        rows = tensor.header.shape[0]
        beyond_rows = sorted((number, text) for text, number in tokens.items() if number >= rows)
        vocabulary_pieces = [
            (number, text) for number, text in beyond_rows if text not in added_texts
        ]
        if beyond_rows:
            first = [
                f"{text!a:.60} (id {number})"
                for number, text in (vocabulary_pieces or beyond_rows)[:3]
            ]
            text = f"{rows} rows, but the tokenizer has {len(beyond_rows)} token(s) beyond them: {', '.join(first)}"
            severity = Severity.ERROR if vocabulary_pieces else Severity.WARNING
            report.add("vocabulary", tensor.header.name, text, severity)


def _check_engine(report: Report, artifact: Artifact, engine: str | None) -> None:
    """Check that an engine loads the artifact, by the rules of its format, or with transformers' own loader."""
    if engine is None:
        report.skip("no engine was named (--for)", "engine")
        return
    info, model = artifact.format.INFO, _model_to_load(artifact)
    name = engine if engine in info.engines else target_of(engine).verdict_engine
    loading = LoadingResult()
    if name == TRANSFORMERS and not (info.is_single_file or model.draft_kind):
        checkpoint = artifact.checkpoint
        stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
        loading = check_loading(
            checkpoint.config, stored, checkpoint.read, lambda: _decoded_headers(artifact)
        )
        model = replace(model, names_compared=not loading.not_tried)
    verdict = next(item for item in engine_verdicts(info, model) if item.engine == name)
    refusal = verdict.reason if verdict.loads is False else ""
    if refusal or loading.reason:
        report.add("engine", engine, "; ".join(filter(None, (loading.reason, refusal))))
    elif loading.not_tried:
        report.skip(f"not tried: {loading.not_tried}", "engine")


def _check_towers(report: Report, artifact: Artifact, source: SourceModel | None) -> None:
    """Check that other towers, and a draft head, are complete or missing as a whole.

    Their expected tensors are those of the source; without a source, those that transformers expects.
    """
    foreign = artifact.model_layout.foreign_tensors
    has_towers = any(not tensor.draft_head for tensor in foreign)  # a model with its towers
    names = {_without_model_prefix(tensor.name) for tensor in foreign}
    towers = {_tower_name(name) for name in names}
    ambiguous_towers = {
        _tower_name(t.header.name)
        for t in artifact.model_layout.tensors
        if t.role is not Role.FOREIGN
    }
    if source is not None:
        expected = {
            tensor.name: tensor.draft_head for tensor in source.model_layout.foreign_tensors
        }
        ambiguous_towers |= {
            _tower_name(name) for name in names - {*map(_without_model_prefix, expected)}
        }  # renamed by a tool
    elif has_towers:
        headers = _decoded_headers(artifact)
        expected = dict.fromkeys(
            check_plain_loading(artifact.checkpoint.config, headers).missing, False
        )
    else:
        return
    for name, is_draft_head in expected.items():
        if _without_model_prefix(name) in names or _tower_name(name) in ambiguous_towers:
            continue
        if _tower_name(name) in towers:
            text = "missing, but other tensors of this part of the model are there"
            report.add("incomplete", name, text)
        elif has_towers and not is_draft_head:
            report.warn("incomplete", name, "missing, but other towers of the model are there")


def _without_model_prefix(name: str) -> str:
    """Return the name of a tensor without the prefix that some files omit."""
    return name.removeprefix("model.")


def _tower_name(name: str) -> str:
    return _without_model_prefix(name).partition(".")[0]


def _decoded_headers(artifact: Artifact) -> list[StoredTensor]:
    """Return the headers of the tensors after decoding, as if no weight were quantized."""
    return [
        entry.to_stored_tensor()
        for entry in decode_checkpoint(artifact.checkpoint).entries.values()
    ]


def _model_to_load(artifact: Artifact) -> ModelToLoad:
    model_layout, family = artifact.model_layout, artifact.model_layout.architecture
    layouts = artifact.layouts
    return ModelToLoad(
        {module: (layout.scheme, layout.shape) for module, layout in layouts.items()},
        (model_layout.model_type, str(artifact.checkpoint.config.get("model_type"))),
        transposed=family is not None and family.transposed,
        transposed_codes=any(layout.transposed for layout in layouts.values()),
        unstacked_experts=family is not None
        and family.publishes_stacked_experts
        and not family.loads_single_experts,
        unquantized=tuple(
            t.header.name for t in model_layout.tensors if artifact.layout(t) is None
        ),
        quantized_embedding=any(
            t.role is Role.EMBEDDING and artifact.layout(t) for t in model_layout.tensors
        ),
        running_layout=artifact.uses_running_layout,
        draft_kind=model_layout.draft_kind,
    )


def _module_name(tensor: MatchedTensor) -> str:
    return tensor.header.name.removesuffix(".weight")
