"""A source edited during a run, with its time set back, is detected: only digested bytes are published."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from safetensors import safe_open

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError
from quantforge.files import checksums, safetensors
from quantforge.files.checksums import Checksums, compute_checksums
from quantforge.files.opener import changed_error
from quantforge.files.reader import open_checkpoint
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.plans import Plan
from quantforge.progress import Progress
from quantforge.settings import Settings
from quantforge_files import system
from tests.runs import copy_model, fast_recipe, leftovers, quantize, recipe
from tests.thorough import parametrize_each_value

GGUF = recipe(type="Q8_0", format="gguf", scales="absmax")


def edit_file(path: Path, at: int, data: bytes | None = None) -> None:
    """Flip a byte of a file, or write some, drop cached chunks, and restore its modification time."""
    checksums._CACHE.clear()
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([before[0] ^ 1]) if data is None else data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def last_byte(model: Path, name: str) -> tuple[Path, int]:
    """Return the file of a tensor and the offset of its last byte."""
    if model.is_file():
        entry = read_gguf(model).tensors[name]
        return entry.file, entry.end - 1
    tensor = open_checkpoint(model).entries[name]
    return tensor.file, tensor.end - 1


def edit_after(part: str, work: Callable[[], object]) -> Callable[[Progress], None]:
    """Return a progress callback that calls ``work`` when a part is done."""

    def progress(done: Progress) -> None:
        if done.part == part:
            work()

    return progress


# Source, the tensor that is edited, and after which part.
WEIGHTS = {
    "the last block": ("m", "model.layers.1.mlp.down_proj.weight", "block 0", recipe()),
    "a norm": ("m", "model.layers.1.input_layernorm.weight", "block 0", recipe()),
    "the last block, with data": ("m", "model.layers.1.mlp.up_proj.weight", "block 0", fast_recipe("gptq")),
    "the head, late": (
        "m", "lm_head.weight", "block 1", fast_recipe("gptq", lm_head="int8:g128:sym"),
    ),
    "shards": ("shards", "model.layers.1.mlp.down_proj.weight", "block 0", recipe()),
    "into a file": ("m", "model.layers.1.mlp.down_proj.weight", "block 0", GGUF),
    "from a file": ("m.gguf", "blk.1.ffn_down.weight", "block 0", recipe(bits=4, scales="absmax")),
}  # fmt: skip


@pytest.fixture
def sources(model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a source: a directory, its shards, or a GGUF file."""

    def make(kind: str) -> Path:
        path = tmp_path / kind
        if kind == "m":
            return copy_model(model, path)
        if kind == "m.gguf":
            quantize(model, path, recipe(format="gguf", type="F16"))
            return path
        api.export(str(model), recipe(format="plain", max_shard_bytes=200_000), path, Settings())
        return path

    return make


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_edited_during_a_run_are_detected(
    sources: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    kind, tensor, part, recipe = WEIGHTS[case]
    source = sources(kind)
    out = tmp_path / ("out.gguf" if recipe.format == "gguf" else "out")
    file, offset = last_byte(source, tensor)
    with pytest.raises(IntegrityError, match="changed") as noticed:
        quantize(source, out, recipe, progress=edit_after(part, lambda: edit_file(file, offset)))
    assert noticed.value.file == str(file)
    assert not out.exists()
    edit_file(file, offset)  # as it was: the run goes on
    assert quantize(source, out, recipe).resumed


def test_weights_edited_during_an_export_are_detected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "m"
    quantize(model, source, recipe(bits=4))
    file, offset = last_byte(source, "model.layers.1.mlp.down_proj.weight_packed")
    module = import_module("quantforge.api.export")
    check = module.check_values

    def checked(conversion: Any, **options: Any) -> str:
        verdict = check(conversion, **options)
        edit_file(file, offset)
        return verdict

    monkeypatch.setattr(module, "check_values", checked)
    for name, format_key in (("out", "gptq"), ("out.gguf", "gguf")):
        with pytest.raises(IntegrityError, match="changed"):
            api.export(
                str(source),
                recipe(format=format_key),
                tmp_path / name,
                Settings(),
                allow_inexact=True,
            )
    assert leftovers(tmp_path / "out") == set()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "part"),
    [("tokenizer.json", "outer"), ("generation_config.json", "block 1"), ("LICENSE", "head")],
)
def test_side_files_edited_during_a_run_are_copied_as_digested(
    model: Path, tmp_path: Path, name: str, part: str
) -> None:
    source, out = copy_model(model, tmp_path / "m"), tmp_path / "out"
    (source / "LICENSE").write_text("terms")
    before = (source / name).read_bytes()
    quantize(
        source,
        out,
        recipe(),
        progress=edit_after(part, lambda: edit_file(source / name, 0, b"????")),
    )
    document = manifest.read_manifest(out) or {}
    assert (out / name).read_bytes() == before
    recorded = [document["source"]["files"][name], document["outputs"][name]]
    assert [entry["sha256"] for entry in recorded] == [digest(out / name)] * 2


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("recipe_used", [recipe(), GGUF], ids=["directory", "file"])
def test_side_files_edited_after_the_plan_are_detected(
    model: Path, tmp_path: Path, name: str, recipe_used: object
) -> None:
    """A file replaced between the plan and the digest is detected."""
    source, out = copy_model(model, tmp_path / "m"), tmp_path / "out.gguf"
    document = json.loads((source / name).read_text())
    document["added"] = 1

    def announce(_plan: Plan, _out: Path) -> None:
        (source / name).write_text(json.dumps(document))

    with pytest.raises(IntegrityError, match="changed"):
        quantize(source, out, recipe_used, announce=announce)
    assert leftovers(out) == set()


def test_a_header_edited_after_the_plan_is_detected(model: Path, tmp_path: Path) -> None:
    source, out = copy_model(model, tmp_path / "m"), tmp_path / "out"
    file = source / "model.safetensors"
    data = file.read_bytes()
    up, gate = (f'"model.layers.0.mlp.{name}_proj.weight"'.encode() for name in ("up", "gate"))
    k, v = (f'"model.layers.0.self_attn.{name}_proj.weight"'.encode() for name in "kv")
    assert len(k) == len(v) != len(up) != len(gate)
    swapped = data.replace(k, b"?").replace(v, k).replace(b"?", v, 1)

    def announce(_plan: Plan, _out: Path) -> None:
        edit_file(file, 0, swapped)

    with pytest.raises(IntegrityError, match="changed"):
        quantize(source, out, recipe(), announce=announce)
    assert leftovers(out) == set()


def test_an_imatrix_edited_during_its_read_is_detected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls = tmp_path / "imatrix", {"read": 0}
    file.write_bytes(b"one")

    def read(path: Path, _planned: object) -> dict[str, object]:
        calls["read"] += 1
        path.write_bytes(b"two")
        return {}

    monkeypatch.setattr("quantforge.execution.importance.read_importance", read)
    with pytest.raises(IntegrityError, match="imatrix"):
        quantize(model, tmp_path / "out", recipe(), imatrix=file)
    assert calls["read"] == 1


# ---- checksums


@pytest.mark.parametrize(
    ("size", "chunks"),
    [(0, 1024), (1, 1024), (65_536, 1024), (65_537, 1024), (200_000, 1024), (200_000, 2)],
)
def test_checksums_cover_every_byte(
    tmp_path: Path, size: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_MAX_CHUNKS", chunks)
    monkeypatch.setattr(checksums, "_READ_BYTES", 10_000)
    path = tmp_path / "file"
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    path.write_bytes(data)
    sums = compute_checksums(path, tmp_path)
    assert sums.sha256 == hashlib.sha256(data).hexdigest()
    offsets = sorted({0, size // 3, 65_535, 65_536, size - 1, size} & set(range(size + 1)))
    runs = [(start, end) for start in offsets for end in offsets if start <= end]
    with path.open("rb") as file:
        for start, end in runs:
            assert read_checked(sums, file, start, end - start) == data[start:end]
    for start, end in runs:
        if start < end:
            path.write_bytes(data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
            checksums._CACHE.clear()
            with path.open("rb") as file:
                assert read_checked(sums, file, start, end - start) is None


def read_checked(sums: Checksums, file: BinaryIO, start: int, count: int) -> bytes | None:
    """Return bytes read with checksums, or None where they differ from what was digested."""
    into = bytearray(count)
    return bytes(into) if sums.read(file.fileno(), memoryview(into), start) else None


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the byte count of each read from now on."""
    counts: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        counts.append(preadv(descriptor, buffers, start))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", noted)
    return counts


def test_checksums_are_small_and_reads_touch_few_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of chunks is limited, except for huge files, where the chunk size is."""
    for name, value in (("_MAX_CHUNKS", 8), ("_MIN_CHUNK_BYTES", 16), ("_MAX_CHUNK_BYTES", 200)):
        monkeypatch.setattr(checksums, name, value)
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    sums = compute_checksums(path, tmp_path)
    assert len(sums._states) <= 9
    counts = record_reads(monkeypatch)
    with path.open("rb") as file:
        assert read_checked(sums, file, 500, 10) == bytes(10)
        assert read_checked(sums, file, 1000, 0) == b""
        assert read_checked(sums, file, 995, 10) is None  # beyond the end
    assert sum(counts) <= 1000 / 7
    path.write_bytes(bytes(10_000))
    assert compute_checksums(path, tmp_path)._chunk_bytes == 200


@parametrize_each_value(
    ("chunks", [1, 3, 40]),
    ("workers, kept", [(1, 4), (3, 40)]),
    ("large", [1, 1 << 20]),
)
def test_sequential_checked_reads_read_each_byte_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: int,
    workers: int,
    kept: int,
    large: int,
) -> None:
    for name, value in (
        ("_MAX_CHUNKS", chunks),
        ("_MIN_CHUNK_BYTES", 16),
        ("_MAX_CACHED_CHUNKS", kept),
        ("_PREFETCH_CHUNK_BYTES", large),
    ):
        monkeypatch.setattr(checksums, name, value)
    path, draw = tmp_path / "file", random.Random(0)
    data = draw.randbytes(5009)
    path.write_bytes(data)
    sums = compute_checksums(path, tmp_path)
    counts = record_reads(monkeypatch)
    with path.open("rb") as file, ThreadPoolExecutor(workers) as pool:
        parts = pool.map(lambda start: read_checked(sums, file, start, 10), range(0, 5000, 10))
        assert b"".join(part or b"" for part in parts) == data[:5000]
    assert sum(counts) <= 5009 * (1 if large > 1 else 1.5)  # rarely a chunk was given up meanwhile
    assert len(checksums._CACHE) <= kept
    with path.open("rb") as file:
        for _ in range(300):
            start, end = sorted(draw.sample(range(5010), 2))
            assert read_checked(sums, file, start, end - start) == data[start:end]
    checksums._PREFETCHER.submit(int).result()  # nothing is read meanwhile any more
    path.write_bytes(data[:2500] + b"x" + data[2501:])
    checksums._CACHE.clear()
    with path.open("rb") as file:
        assert read_checked(sums, file, 2499, 3) is None
        assert read_checked(sums, file, 2499, 3) is None  # nothing of it is kept
        assert read_checked(sums, file, 0, 5009) is None


def test_a_file_truncated_during_its_digest_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    fill = system.read_into
    monkeypatch.setattr(
        system, "read_into", lambda file, view, start: start < 500 and fill(file, view[:500], start)
    )
    monkeypatch.setattr(checksums, "_READ_BYTES", 500)
    with pytest.raises(IntegrityError, match="changed"):
        compute_checksums(path, tmp_path)


def test_every_read_of_rows_and_tensors_is_checked(model: Path, tmp_path: Path) -> None:
    source = copy_model(model, tmp_path / "m")
    opened = open_checkpoint(source)
    file = source / "model.safetensors"
    checked = opened.with_checksums({file: compute_checksums(file, source)})
    name = "model.layers.1.mlp.down_proj.weight"
    entry = checked.entries[name]
    with safe_open(file, "pt") as reference:
        expected = reference.get_tensor(name)
    assert checked.read(name).equal(expected)
    assert checked.read_rows(name, 3, 7).equal(expected[3:7])
    edit_file(file, entry.start + 2 * entry.nbytes // entry.shape[0])  # in row 2
    for _ in range(2):
        with pytest.raises(IntegrityError, match="changed"):
            checked.read(name)
    with pytest.raises(IntegrityError, match="changed"):
        checked.read_rows(name, 2, 3)
    assert safetensors.read_tensor(opened.entries[name]) is not None, (
        "without checksums nobody knows"
    )
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises((IntegrityError, InputError)):
        checked.read(name)
    assert changed_error(file).exit_code == 5
