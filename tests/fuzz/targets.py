"""Every parser of foreign input as a function of bytes that returns or raises a typed refusal.

A target raises nothing for bad input: `QuantForgeError` and `SourceError` are answers, whatever else comes out of it
is a finding. ``corpus/NAME/`` holds its seeds, among them every input that once was a finding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.artifacts import manifest
from quantforge.artifacts.card import source_card_fields
from quantforge.errors import InputError, QuantForgeError
from quantforge.execution.journal import Journal
from quantforge.files.opener import FILES, parse_object
from quantforge.files.reader import INDEX_FILE, open_checkpoint, read_weights
from quantforge.files.safetensors import TORCH_NAMES, read_header, read_tensor
from quantforge.files.writer import header_bytes, plan_files
from quantforge.formats import detect_format
from quantforge.formats.gguf.importance_file import read_imatrix
from quantforge.formats.gguf.source import open_gguf
from quantforge.formats.gguf.tokenizer_files import tokenizer_files
from quantforge.formats.gguf.vocabulary import vocabulary
from quantforge.formats.match_quantized import match_quantized
from quantforge.notation import parse_layer
from quantforge.planning.scheme_rules import matches
from quantforge.plans import StoredTensor
from quantforge.recipe import from_toml
from quantforge.verification.files import check_manifest
from quantforge.verification.findings import Report
from quantforge_calibration.readers import RowReader, read_jsonl, read_text
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import parse_sources

CORPUS = Path(__file__).parent / "corpus"
Target = Callable[[bytes, Path], None]


def safetensors(data: bytes, directory: Path) -> None:
    """The header, and then every tensor that it promises."""
    entries = read_header(save_bytes(directory / "model.safetensors", data))
    for entry in entries.values():
        if entry.dtype in TORCH_NAMES:
            read_tensor(entry)


def index(data: bytes, directory: Path) -> None:
    """The shard index, beside two shards."""
    for name, tensor in (("model-00001-of-00002", "a"), ("model-00002-of-00002", "b")):
        shard = directory / f"{name}.safetensors"
        if not shard.exists():
            shard.write_bytes(header_bytes([StoredTensor(tensor, "U8", (1,))]) + b"\0")
    save_bytes(directory / INDEX_FILE, data)
    read_weights(directory, FILES.list_names(directory, None))


def strict_json(data: bytes, directory: Path) -> None:
    """Accepted JSON equals what `json.loads` reads."""
    parsed = parse_object(data, directory)
    assert parsed == json.loads(data)


def config(data: bytes, directory: Path) -> None:
    """``{"config": ..., "tensors": {name: [dtype, shape]}}``: sizes, declarations, and every format's configuration."""
    document = parse_object(data, directory)
    listed = document.get("tensors")
    tensors = [
        StoredTensor(name, item[0], tuple(item[1]))
        for name, item in (listed.items() if isinstance(listed, Mapping) else ())
        if _is_tensor(item)
    ]
    configuration = document.get("config")
    save_bytes(directory / "config.json", json.dumps(configuration).encode())
    (plan,) = plan_files((tensors,))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(plan.fixed[0][1])
        file.truncate(plan.size)
    checkpoint = open_checkpoint(directory)
    stored = checkpoint.stored_tensors()
    file_format = detect_format(checkpoint.config)
    layouts = {item.module: item for item in file_format.find_layouts(checkpoint.config, stored)}
    match_quantized(checkpoint, layouts, stored)


def _is_tensor(item: object) -> bool:
    """Return whether an item describes a small valid tensor; headers are another target."""
    return (
        isinstance(item, list)
        and len(item) == 2
        and isinstance(item[0], str)
        and item[0] in TORCH_NAMES
        and isinstance(item[1], list)
        and len(item[1]) < 5
        and all(type(size) is int and 0 <= size < 1 << 12 for size in item[1])
    )


def gguf(data: bytes, directory: Path) -> None:
    """The header, the model behind it, its tensors and its tokenizer."""
    checkpoint = open_gguf(save_bytes(directory / "m.gguf", data))
    with suppress(QuantForgeError):
        tokenizer_files(checkpoint.file)
    file_format = detect_format(checkpoint.config)
    file_format.find_layouts(
        checkpoint.config, {n: entry.to_stored_tensor() for n, entry in checkpoint.entries.items()}
    )
    for name in islice(checkpoint.entries, 4):
        checkpoint.read(name)


def imatrix(data: bytes, directory: Path) -> None:
    """Either imatrix format, by the first bytes of the file."""
    read_imatrix(save_bytes(directory / "imatrix", data))


def recipe(data: bytes, directory: Path) -> None:
    """TOML, and back."""
    text = data.decode("utf-8", "replace")
    parsed = from_toml(text)
    assert from_toml(parsed.to_toml()) == parsed


def scheme(data: bytes, directory: Path) -> None:
    """The notation of a layer, and back."""
    parsed = parse_layer(data.decode("utf-8", "replace"))
    assert parse_layer(str(parsed)) == parsed


def pattern(data: bytes, directory: Path) -> None:
    """Match a layer name against a pattern."""
    name = "model.layers.10.mlp.down_proj.weight"
    tensor = MatchedTensor(name, StoredTensor(name, "F32", (1, 1)), Role.LINEAR)
    matches(data.decode("utf-8", "replace"), tensor)


def release(data: bytes, directory: Path) -> None:
    """The manifest of a foreign release, against its files."""
    save_bytes(directory / manifest.NAME, data)
    save_bytes(directory / "model.safetensors", b"")
    check_manifest(Report(directory))


def card(data: bytes, directory: Path) -> None:
    """The front matter of a model card."""
    source_card_fields(save_bytes(directory / "README.md", data))


def tokenizer(data: bytes, directory: Path) -> None:
    """``{file name: its content}``: everything that a vocabulary in GGUF is made from."""
    try:
        document = dict(json.loads(data))
    except (TypeError, ValueError, RecursionError) as error:  # numbers may be larger than elsewhere
        raise InputError("no bundle of files") from error
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        save_bytes(directory / name, json.dumps(document.get(name)).encode())
    vocabulary(directory, 320, {"bos_token_id": 0, "eos_token_id": [1]})


def journal(data: bytes, path: Path) -> None:
    """The journal of an interrupted run; a disk may have damaged it."""
    directory = path / "journal"
    work = Journal(directory, {"a": "1"})
    work.close()
    save_bytes(directory / "journal.jsonl", data)
    Journal(directory, {"a": "1"}).close()


def jsonl(data: bytes, directory: Path) -> None:
    """Calibration text as lines of JSON, and as plain text."""
    path = save_bytes(directory / "text.jsonl", data)
    with suppress(SourceError):
        read_text(path, 1000)
    for _ in read_jsonl(path, RowReader(chat=True)):
        pass


def source(data: bytes, directory: Path) -> None:
    """The calibration sources of the command line."""
    parse_sources(data.decode("utf-8", "replace"))


TARGETS: Mapping[str, Target] = {
    function.__name__: function
    for function in (
        safetensors, index, strict_json, config, gguf, imatrix, recipe, scheme, pattern, release, card, tokenizer,
        journal, jsonl, source,
    )
}  # fmt: skip


def is_accepted(target: Target, data: bytes, directory: Path) -> bool:
    """Return whether a target accepts the input; other exceptions propagate."""
    try:
        target(data, directory)
    except (QuantForgeError, SourceError):
        return False
    return True


def seeds(name: str) -> list[bytes]:
    """The corpus of a target, in the order of names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def save_bytes(path: Path, data: bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(data)
    return path
