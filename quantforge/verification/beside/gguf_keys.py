"""The keys of a GGUF file against those that follow from the source: what llama.cpp reads, both ways.

What is expected is derived as when a file is written (`parameters`, `vocabulary`). Other converters leave out what
llama.cpp takes for granted and state what it would take anyway: `gguf_defaults` says what that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from quantforge.architectures.match import Role
from quantforge.checkpoint.safetensors import read_tensor
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.container import Value
from quantforge.formats.gguf.families import family_of
from quantforge.formats.gguf.parameters import Parameters, parameters
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.source import GgufCheckpoint
from quantforge.formats.gguf.vocabulary import Kind, vocabulary
from quantforge.verification.beside import gguf_defaults
from quantforge.verification.beside.trees import plain, same, shown
from quantforge.verification.findings import Report
from quantforge.verification.opening import Artifact, Original

TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
_RULE = "llama.cpp obeys it"
_SHOWN = 12


def check_gguf_keys(report: Report, artifact: Artifact, source: Original) -> None:
    """Report every key of the file that says something else than the source, or that the source does not say."""
    checkpoint = artifact.checkpoint
    if not isinstance(checkpoint, GgufCheckpoint):
        return
    file, name = checkpoint.file, report.path.name
    try:
        expected, computed = expected_keys(file, source)
    except (InputError, RefusedError) as error:
        report.skip(
            f"the keys of a GGUF file cannot be derived from the source: {plain(error.message)}",
            "keys",
        )
        return
    own = {key: value.value for key, value in file.metadata.items()}
    for text in key_differences(own, expected):
        report.add("keys", plain(name), text)
    if computed is not None:
        _check_computed(report, file, computed)
        _check_tensors(report, artifact, source)


def key_differences(own: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for every difference."""
    model = gguf_defaults.Model(own, expected)
    for key in dict.fromkeys((*expected, *own)):
        if key not in own:
            default = model.default(key)
            if not model.optional(key) and not same(default, expected[key]):
                yield f"{plain(key)} is missing, the source has {shown(expected[key])} ({_RULE})"
        elif key not in expected:
            if not model.idle(key, own[key]):
                yield f"{plain(key)} = {shown(own[key])}, nothing of the source says so ({_RULE})"
        elif difference := _difference(key, own[key], expected[key], own):
            yield f"{plain(key)}: {difference} ({_RULE})"


def _difference(key: str, own: Any, other: Any, whole: Mapping[str, Any]) -> str:
    """Return the difference as a text, "" where both values mean the same to llama.cpp."""
    if key in {TOKENS, KINDS, MERGES} and isinstance(own, list) and isinstance(other, list):
        if len(own) != len(other):
            return f"{len(own)} entries, the source has {len(other)}"
        tokens = whole.get(TOKENS)
        places = [
            n for n, (a, b) in enumerate(zip(own, other, strict=True))
            if a != b and not (key == KINDS and gguf_defaults.kinds_alike(a, b, tokens, n))
        ]  # fmt: skip
        first = (
            f"{shown(own[places[0]])} at {places[0]}, the source has {shown(other[places[0]])}"
            if places
            else ""
        )
        return f"{len(places)} entries differ, e.g. {first}" if places else ""
    if key == SCORES:
        return "" if _same_order(own, other, whole) else "other pieces would be joined first"
    if key == gguf_defaults.PRE and gguf_defaults.alike(own, other):
        return ""
    if (
        isinstance(own, str)
        and isinstance(other, str)
        and key.startswith("tokenizer.chat_template")
    ):
        own, other = own.removesuffix("\n"), other.removesuffix("\n")
    return "" if same(own, other) else f"{shown(own)}, the source has {shown(other)}"


def _same_order(own: Any, other: Any, whole: Mapping[str, Any]) -> bool:
    """Return whether the scores rank the pieces that are joined as the source does."""
    tokens, kinds = whole.get(TOKENS), whole.get(KINDS)
    if not all(isinstance(item, list) and len(item) == len(other) for item in (own, tokens, kinds)):
        return False
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    joined = [
        n for n, piece in enumerate(tokens)
        if kinds[n] == Kind.NORMAL and isinstance(piece, str) and len(piece) > 1
    ]  # fmt: skip
    joined.sort(key=lambda n: -other[n])
    return all(
        own[a] > own[b] if other[a] > other[b] else own[a] == own[b] for a, b in pairwise(joined)
    )


def expected_keys(file: GgufFile, source: Original) -> tuple[dict[str, Any], Parameters | None]:
    """Return the keys that follow from the source, and what is computed from its configuration.

    Raises:
        InputError, RefusedError: as `parameters` and `vocabulary`.
    """
    checkpoint = source.checkpoint
    if isinstance(checkpoint, GgufCheckpoint):
        keys = {key: value.value for key, value in checkpoint.file.metadata.items()}
        return {key: value for key, value in keys.items() if gguf_defaults.obeyed(key)}, None
    config = source.matched.config
    family = family_of(config)
    found = parameters(config, family)
    rows = next(t.stored.shape[0] for t in source.matched.tensors if t.role is Role.EMBEDDING)
    try:
        words = vocabulary(checkpoint.path, rows, config)
    except RefusedError:
        pre = file.value(gguf_defaults.PRE, str, "default")
        words = vocabulary(checkpoint.path, rows, config, pre)
    keys_: dict[str, Value] = {**found.keys, **words.keys()}
    plain_keys = {key: value.value for key, value in keys_.items()}
    return {
        "general.architecture": family.arch,
        **{k: _listed(v) for k, v in plain_keys.items()},
    }, found


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_computed(report: Report, file: GgufFile, found: Parameters) -> None:
    """Check tables of frequencies: those that follow from the configuration, and no others."""
    expected = {tensor.name: tensor for tensor in found.computed}
    for name in sorted(
        {name for name in file.tensors if name.startswith("rope_f")} | expected.keys()
    ):
        if name not in expected or name not in file.tensors:
            there = "is there" if name in file.tensors else "is missing"
            report.add("keys", name, f"{there}, against the source's rotary embedding ({_RULE})")
            continue
        raw = read_tensor(file.tensors[name].raw()).float().flatten().tolist()
        wanted = memoryview(expected[name].fixed or b"").cast("f").tolist()
        if len(raw) != len(wanted) or not all(
            abs(a - b) <= 1e-5 * abs(b) for a, b in zip(raw, wanted, strict=True)
        ):
            report.add("keys", name, f"is not the source's rotary embedding ({_RULE})")


def _check_tensors(report: Report, artifact: Artifact, source: Original) -> None:
    """Report tensors that the engine would use and that the source does not have."""
    heads = {tensor.name for tensor in artifact.matched.tensors if tensor.role is Role.HEAD}
    for tensor in artifact.matched.tensors:
        if tensor.name not in source.matched.by_name and tensor.name not in heads:
            report.add(
                "keys", plain(tensor.stored.name), f"the source has no such tensor ({_RULE})"
            )
