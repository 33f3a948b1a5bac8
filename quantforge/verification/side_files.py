"""Files beside the weights: configuration, tokenizer, chat templates and generation settings against the source's.

Our own results carry these files byte for byte. Other tools write them anew through transformers, which writes out
defaults, leaves them out, and renames keys. So every file goes the same way:

1. Both sides are read as transformers reads them (`quantforge.verification.reading`), after which spellings and
   defaults no longer count.
2. `changes` compares the two trees, key by key and in both directions.
3. The first row of `RULES` that fits a change says why it is allowed or unusual. A change that no row fits is an error:
   a loader reads something else than the source says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

from quantforge.checkpoint.reader import CONFIG, is_licence
from quantforge.checkpoint.safetensors import TORCH_NAMES
from quantforge.errors import InputError
from quantforge.formats.gguf.special import template_key
from quantforge.verification.findings import Report, Severity
from quantforge.verification.loaded_files import COPIES, GENERATION, REPEATED, SETTINGS, TOKENIZER
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.reading import (
    KERNELS,
    LOAD_CODE,
    STORAGE_KEYS,
    SideFiles,
    generation_keys,
    load_tokenizer,
    read_config,
    read_generation,
    read_tokenizer,
    side_files_of,
)
from quantforge.verification.structure import tokens_of
from quantforge.verification.trees import ABSENT, Change, changes, same
from quantforge_calibration import chat_templates
from quantforge_calibration.source_error import SourceError

_ERROR, _WARNING = Severity.ERROR, Severity.WARNING
_LISTED = 12  # changes of one file that are reported one by one


# What differs, file by file.


def _config_changes(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes of ``config.json``, by meaning if transformers reads both sides."""
    inner = other.get("text_config")
    if isinstance(inner, Mapping) and "text_config" not in own:  # of its language model alone
        other = {**{key: other[key] for key in ("dtype", "torch_dtype") if key in other}, **inner}
    first, second = read_config(own, other), read_config(other, other)
    bare = [{k: v for k, v in config.items() if k not in STORAGE_KEYS} for config in (own, other)]
    if not second:
        first, second = bare
    elif not first:  # a value that no loader takes: compare at least what is stated
        first = {**second, **bare[0]}
    yield from changes(first, second, (CONFIG,))
    rope = own.get("rope_parameters")
    newer = {"rope_theta": rope.get("rope_theta") if isinstance(rope, Mapping) else None,
             "torch_dtype": own.get("dtype")}  # fmt: skip
    for older, value in newer.items():  # which older loaders read
        if None not in (own.get(older), value) and not same(own[older], value):
            yield Change((CONFIG, older), own[older], value)


def _tokenizer_changes(own: SideFiles, other: SideFiles) -> Iterator[Change]:
    """Yield the changes of ``tokenizer.json``, part by part, and of what transformers makes of all files together.

    A part of ``tokenizer.json`` may also be what transformers makes of the source's.

    Raises:
        InputError: the artifact's tokenizer cannot be read.
    """
    names = (SETTINGS, *sorted(REPEATED), TOKENIZER)
    changed = [name for name in names if own.files.get(name) != other.files.get(name)]
    if not changed or TOKENIZER not in own.documents or TOKENIZER not in other.documents:
        return
    tree, source = (read_tokenizer(side.document(TOKENIZER)) for side in (own, other))
    settings, expected = own.document(SETTINGS), other.document(SETTINGS)
    loaded = saved = source
    try:
        expected, saved = load_tokenizer(other)
    except InputError:  # it needs code, or another library: compared as it stands
        pass
    else:
        settings, loaded = load_tokenizer(own)
    place = TOKENIZER if TOKENIZER in changed else changed[0]
    found = [
        change
        for part in {**source, **tree}
        if not same(tree.get(part), saved.get(part))
        for change in changes(tree.get(part, ABSENT), source.get(part, ABSENT), (place, part))
    ]
    yield from found or changes(loaded, saved, (place,))
    yield from changes(settings, expected, (changed[0],))


def template_changes(own: SideFiles, other: SideFiles) -> Iterator[Change]:
    """Yield the chat templates that differ: those that transformers takes, and those of every place of the artifact.

    A template that a place of the source does not have may also be the one that transformers takes of the source.
    Names count as a key of a GGUF file has them.

    Raises:
        SourceError: templates of one side cannot be read.
    """
    taken, told = _templates(other.files), set[str]()
    for layout in ("", *chat_templates.LAYOUTS):
        mine, theirs = (_templates(side.files, layout) for side in (own, other))
        for name in {**mine, **theirs} if not layout else mine:
            place, text = mine.get(name, ("", ABSENT))
            allowed = [one[name] for one in (theirs, taken) if name in one] or [("", ABSENT)]
            if name not in told and text not in [expected for _, expected in allowed]:
                told.add(name)
                where, expected = allowed[0]
                yield Change((place or where, f"chat template {name}"), text, expected)


def _templates(files: Mapping[str, bytes], layout: str = "") -> dict[str, tuple[str, Any]]:
    """Return the file and the text of each chat template of a layout, by default of the one that transformers takes."""
    if layout:
        pages = layout == chat_templates.FILE
        files = {name: data for name, data in files.items()
                 if name == layout or (pages and chat_templates.is_template(name))}  # fmt: skip
    chosen, found = chat_templates.choose(files, ""), {}
    for name, text in chosen.named.items():
        place = f"{chat_templates.FOLDER}/{name}{chat_templates.SUFFIX}"
        place = place if place in files else chosen.place
        found[template_key(name)] = (place, text.removesuffix("\n") or ABSENT)
    return found


# What may differ, and why.


class Rule(NamedTuple):
    """A row of `RULES`.

    Attributes:
        file: a pattern.
        keys: patterns of places, separated by spaces; ``*dtype`` is also ``text_config.dtype``.
        severity: None if the change is allowed.
        why: the reason.
        holds: a further condition on the change and the files of the artifact and the source.
    """

    file: str
    keys: str
    severity: Severity | None
    why: str
    holds: Callable[[Change, SideFiles, SideFiles], bool] = lambda _change, _own, _other: True


def _is_stored_type(change: Change, own: SideFiles, other: SideFiles) -> bool:
    names = {TORCH_NAMES.get(kind) for side in (own, other) for kind in side.tensors.values()}
    return change.own is ABSENT or change.own in names


def _is_untied(change: Change, own: SideFiles, _: SideFiles) -> bool:
    return change.own is False and any("lm_head." in name for name in own.tensors)


def _sampling_is_meant(change: Change, own: SideFiles, other: SideFiles) -> bool:
    """Return whether sampling was switched on for a source with settings of it, or by GPTQModel, which always does."""
    meant = {"temperature", "top_p", "top_k", "min_p"} & other.document(GENERATION).keys()
    always = "gptqmodel:" in str(own.config.get("quantization_config"))
    return change.own is True and change.added and bool(meant or always)


RULES: tuple[Rule, ...] = (
    Rule("*", "*", None, "a null is no value", lambda change, *_: change.added and change.own in (None, ABSENT)),
    Rule("*", "*transformers_version *_name_or_path _commit_hash _from_model_config *_autoset", None, "a note"),
    Rule("*", "chat_template", None, "templates are compared by themselves"),
    Rule("*", "*attn_implementation*", None, "a choice of kernels", lambda change, *_: change.own in KERNELS),
    Rule("*", " ".join(LOAD_CODE), _ERROR, "a loader runs code or loads kernels by it"),
    Rule("*", "*pad_token *pad_token_id", None, "padding is masked", lambda change, *_: change.added),
    Rule(CONFIG, "*dtype", None, "the type that the rest is computed in", _is_stored_type),
    Rule(CONFIG, "*dtype", _WARNING, "no stored tensor has this type"),
    Rule(CONFIG, "*tie_word_embeddings", None, "the head was quantized by itself", _is_untied),
    Rule(CONFIG, "*rope*.type", None, "rope_type says it", lambda change, *_: ABSENT in (change.own, change.other)),
    Rule(CONFIG, "*dropout* *pdrop *initializer_* pretraining_tp *output_attentions *output_hidden_states *return_dict"
         " *num_labels *id2label* *label2id* problem_type *task_specific_params *use_cache", _WARNING,
         "it does not concern the numbers of text generation"),
    Rule(CONFIG, "*", _WARNING, "transformers does not know this key, other loaders may",
         lambda change, *_: ABSENT in (change.own, change.other)),
    Rule(GENERATION, "do_sample", None, "a temperature is meant to be used", _sampling_is_meant),
    Rule(GENERATION, "bos_token_id pad_token_id", _WARNING, "text generation rarely uses it"),
    Rule(GENERATION, "*", _WARNING, "transformers does not know this key",
         lambda change, *_: change.path[1] not in generation_keys()),
    Rule("*processor_config.json", "*", _WARNING, "its class may have this default", lambda change, *_: change.added),
)  # fmt: skip


def judge(change: Change, own: SideFiles, other: SideFiles) -> tuple[Severity | None, str]:
    """Return how bad a change is, None if it is allowed, and why."""
    for rule in RULES:
        fits = any(fnmatchcase(change.key, key) for key in rule.keys.split())
        if fits and fnmatchcase(change.path[0], rule.file) and rule.holds(change, own, other):
            return rule.severity, rule.why
    return _ERROR, "a loader reads something else than the source says"


# The checks.


def check_side_files(report: Report, artifact: Artifact, source: Original) -> None:
    """Compare the files beside the weights of a directory with the source's; those of a GGUF file are its keys."""
    if not report.path.is_dir():
        report.skip("a GGUF file holds them as keys", "side-files")
        return
    try:
        own, other = side_files_of(artifact), side_files_of(source)
        if source.checkpoint.path.is_dir():
            compare_files(report, own, other)
        else:  # a GGUF file has tokens and templates, and not all that a tokenizer does with them
            tokens, expected = (tokens_of(side.document(TOKENIZER)) for side in (own, other))
            there = {token: tokens[token] for token in expected.keys() & tokens.keys()}
            found = chain(changes(there, expected, (TOKENIZER,)), template_changes(own, other))
            report_changes(report, found, own, other)
    except (InputError, SourceError) as error:
        report.skip(f"files beside the weights cannot be read: {error.message}", "side-files")


def compare_files(report: Report, own: SideFiles, other: SideFiles) -> None:
    """Compare all files of two directories."""
    both = own.documents.keys() & other.documents.keys()
    plain = both - {TOKENIZER, SETTINGS, GENERATION, *REPEATED, *COPIES}
    found = chain(
        _config_changes(own.config, other.config),
        changes(read_generation(own), read_generation(other), (GENERATION,)),
        *(changes(own.documents[n], other.documents[n], (n,)) for n in sorted(plain)),
    )
    report_changes(report, found, own, other)
    try:
        report_changes(report, _tokenizer_changes(own, other), own, other)
        report_changes(report, template_changes(own, other), own, other)
    except (InputError, SourceError) as error:
        report.add("side-files", TOKENIZER, f"cannot be read: {error.message}")
    for name in sorted(other.files.keys() - own.files.keys() - REPEATED - COPIES - {GENERATION}):
        if is_licence(name):
            report.notes.append(f"{name!r} of the source is missing")
        elif not chat_templates.is_template(name):
            severity = _ERROR if name in {TOKENIZER, SETTINGS} else _WARNING
            text = "the source has this file, the artifact lacks it"
            report.add("side-files", name, text, severity)


def report_changes(
    report: Report, found: Iterable[Change], own: SideFiles, other: SideFiles
) -> None:
    """Report the changes that are not allowed, errors first; of many, the first and the number of the others."""
    files: dict[str, list[tuple[Severity, str]]] = {}
    for change in found:
        severity, why = judge(change, own, other)
        if severity is not None:
            files.setdefault(change.path[0], []).append((severity, f"{change}: {why}"))
    for name, texts in files.items():
        check = "configuration" if name == CONFIG else "side-files"
        texts.sort(key=lambda item: item[0] is not _ERROR)
        rest = texts[_LISTED:]
        for severity, text in texts[:_LISTED]:
            report.add(check, name, text, severity)
        if rest:
            report.add(check, name, f"{len(rest)} more places differ", rest[0][0])
