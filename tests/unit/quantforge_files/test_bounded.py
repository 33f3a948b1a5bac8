"""Bounded time and memory: hostile files are refused early, and files of four times real size are read."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.artifacts import manifest
from quantforge.errors import QuantForgeError
from quantforge.files.opener import parse_object
from quantforge.files.reader import INDEX_FILE, read_weights
from quantforge.files.safetensors import read_header
from quantforge.formats.gguf.importance_file import (
    Imatrix,
    WeightImportance,
    read_imatrix,
    write_imatrix,
)
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.numerics.allocator import trim
from quantforge.planning.local_paths import strip_local_paths
from quantforge.recipe import CalibrationOptions, Recipe, read_toml
from quantforge.settings import Settings
from quantforge_calibration.readers import RowReader, read_jsonl
from quantforge_calibration.source_error import SourceError
from quantforge_files import roles, strict_json

SECONDS, BYTES = 10, 600 << 20


def measure_cost(work: Callable[[], object]) -> tuple[str, float, int]:
    """Run in a fork: what came of it, seconds of the processor, and by how much the peak of memory rose.

    What earlier tests have freed and the C library kept would be used without a rise: it is returned first.
    """
    trim()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            outcome = f"done: {work()}"
        except (QuantForgeError, SourceError) as error:
            outcome = f"refused: {error.message}"
        except BaseException as error:
            outcome = f"failed: {error!r}"
        after = resource.getrusage(resource.RUSAGE_SELF)
        rise = (after.ru_maxrss - before.ru_maxrss) * 1024
        os.write(
            writing, json.dumps([outcome[:500], after.ru_utime - before.ru_utime, rise]).encode()
        )
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        outcome, seconds, rise = json.loads(answer.read() or b'["killed", 1e9, 0]')
    os.waitpid(child, 0)
    return outcome, seconds, rise


def run_within_bounds(work: Callable[[], object]) -> str:
    outcome, seconds, rise = measure_cost(work)
    assert not outcome.startswith(("failed", "killed")), outcome
    assert seconds < SECONDS, outcome
    assert rise < BYTES, outcome
    return outcome


def header_file(path: Path, header: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_the_cost_helper_measures_time_memory_and_errors() -> None:
    assert measure_cost(lambda: bytearray(100 << 20).count(1))[2] > 90 << 20
    assert measure_cost(lambda: time.process_time_ns() and sum(range(5_000_000)))[1] > 0.02
    assert measure_cost(lambda: 1 // 0)[0].startswith("failed: ZeroDivisionError")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\[{,:}]a\u00e9\U0001f4a5'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\,:['), inner),
)


def depth_and_count(value: object) -> tuple[int, int]:
    """Return the nesting depth, and the number of separators and containers, of a value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [
        depth_and_count(item) for item in (value.values() if isinstance(value, dict) else value)
    ]
    own = 1 + max(len(value) - 1, 0) + (len(value) if isinstance(value, dict) else 0)
    return 1 + max((item[0] for item in inner), default=0), own + sum(item[1] for item in inner)


@settings(max_examples=30)
@given(JSON, st.integers(1, 9))
def test_json_measure_counts_depth_and_values(value: object, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_CHUNK", chunk)
        depth, count = depth_and_count(value)
        for ascii_only in (False, True):
            data = json.dumps(value, ensure_ascii=ascii_only).encode()
            assert strict_json.measure(data) == (depth, count + 1)


@pytest.mark.parametrize("piece", [b"[", b'{"a":', b"[],", b'"a":1,', b"\\", b'"\\\\'])
def test_a_large_json_of_pure_structure_is_refused_cheaply(piece: bytes) -> None:
    data = b'{"a":[' + piece * (roles.HEADER.max_bytes // len(piece) // 2)
    assert run_within_bounds(lambda: parse_object(data, "x", roles.SETTINGS)).startswith("refused")


def test_a_settings_file_at_its_value_limit_is_read() -> None:
    count = roles.SETTINGS.max_values
    items = b",".join(b'"\xc3\xa9%06d"' % n for n in range(count - 10))
    assert (
        run_within_bounds(lambda: len(parse_object(b'{"a":[' + items + b"]}", "x", roles.SETTINGS)))
        == "done: 1"
    )
    too_many = b'{"a":[' + b"1," * count + b"1]}"
    assert "values, more than" in run_within_bounds(
        lambda: parse_object(too_many, "x", roles.SETTINGS)
    )


@pytest.mark.thorough
def test_a_header_of_280000_tensors_is_read_within_bounds(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0,1],"data_offsets":[0,0]}'
    names = (f"model.layers.{n}.experts.down_proj.w" for n in range(280_000))
    text = "{" + ",".join(f'"{name}":{entry}' for name in names) + "}"
    path = header_file(tmp_path / "x", text.encode())
    assert run_within_bounds(lambda: len(read_header(path))) == "done: 280000"


def test_an_index_of_280000_names_stays_within_bounds(tmp_path: Path) -> None:
    name = "model.language_model.layers.{}.mlp.experts.down_proj.weight_scale"
    weight_map = {
        name.format(n): f"model-{n % 5000:05}-of-05000.safetensors" for n in range(280_000)
    }
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert "No such file" in run_within_bounds(lambda: read_weights(tmp_path, [INDEX_FILE]))
    header_file(tmp_path / "model-00000-of-05000.safetensors", b"{}")
    assert "where the index puts it" in run_within_bounds(
        lambda: read_weights(tmp_path, [INDEX_FILE])
    )


@pytest.mark.thorough
def test_a_tokenizer_of_a_million_tokens_is_read_within_bounds() -> None:
    tokens = ",".join(f'"token {n:08} {"x" * 90}":{n}' for n in range(1_048_576))
    data = f'{{"model":{{"type":"BPE","vocab":{{{tokens}}},"merges":[]}},"pad":"{"x" * 10_000_000}"}}'.encode()
    assert 4 * 32_000_000 < len(data) < roles.TOKENIZER.max_bytes
    outcome = run_within_bounds(
        lambda: len(parse_object(data, "x", roles.TOKENIZER)["model"]["vocab"])
    )
    assert outcome == "done: 1048576"


def test_long_and_deep_jsonl_lines_stay_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    long_line = b'{"text": "' + b"word " * 4_000_000 + b'"}\n'
    for line, message in (
        (long_line, "done: 1"),
        (b"[" * 8_000_000, "nested deeper"),
        (b'{"text":[' + b"[]," * 2_000_000, "values, more than"),
        (b"x" * (roles.LINE.max_bytes + 1), "longer than"),
    ):
        path.write_bytes(line)
        assert message in run_within_bounds(
            lambda: sum(1 for _ in read_jsonl(path, RowReader("text")))
        )


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<i", kind) + value


def test_large_gguf_arrays_stay_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    string = struct.pack("<Q", 4) + "\u00e9\u00ea".encode()
    for count, message in ((1_000_000, "done"), (6_000_001, "an array of")):
        head = b"GGUF" + struct.pack("<iqq", 3, 0, 1)
        path.write_bytes(head + key("a", 9, struct.pack("<iQ", 8, count)) + string * 1_000_000)
        os.truncate(path, path.stat().st_size + 8 * (count - 1_000_000))
        assert message in run_within_bounds(lambda: len(read_gguf(path).metadata))


def test_only_matching_entries_of_a_huge_imatrix_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    large, name = (1 << 31) - 1, b"\x01\x00\x00\x00w"
    path.write_bytes(struct.pack("<i", 2) + name + struct.pack("<ii", 1, large // 4))
    os.truncate(path, path.stat().st_size + large // 4 * 4)
    with path.open("ab") as file:
        file.write(name.replace(b"w", b"v") + struct.pack("<ii2f", 1, 2, 1.0, 2.0))
    outcome = run_within_bounds(
        lambda: {n: e.means.tolist() for n, e in read_imatrix(path, {"v": 2}).entries.items()}
    )
    assert outcome == "done: {'v': [[1.0, 2.0]]}"
    assert "it belongs" not in outcome
    assert "columns, the weight 2" in run_within_bounds(lambda: read_imatrix(path, {"w": 2}))


@pytest.mark.parametrize(
    "text",
    ["a." * 300_000 + "a=1", "[" + "a." * 300_000 + "a]", '"a".' * 200_000 + "a=1", "a=" + "[" * 500_000,
     "a=" + "{a=" * 200_000, "a=" + "9" * 900_000, 'a="""' + '\\"""' * 200_000, "x" * (2 << 20), "[a]\n" * 200_000],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_pathological_recipes_are_refused_within_bounds(text: str) -> None:
    assert run_within_bounds(lambda: read_toml(text, "x")).startswith("refused")


def test_ordinary_recipes_may_have_long_lists_and_strings() -> None:
    names = [f"model.layers.{n}.mlp.down_proj" for n in range(1000)]
    text = (
        f"ignore = {json.dumps(names)}\n[[rule]]\nmatch = '''{'a.b.' * 1000}'''  # {'x.' * 100}\n"
    )
    assert read_toml(text, "x")["ignore"] == names


FILE = {"bytes": 1, "sha256": "0" * 64}
WHOLE = {
    "schema": manifest.SCHEMA,
    "recipe": "",
    "source": {"model": "m", "files": {"config.json": FILE}},
    "outputs": {"a": FILE},
    "versions": {"torch": "2"},
    "events": [{"kind": "inexact", "where": "w", "detail": "d"}],
    "event_counts": {"inexact": 1},
}
WRONG = [1, "x", None, [], {}, [1], {"a": 1}, True]


def test_a_manifest_with_wrong_types_is_read_as_none(tmp_path: Path) -> None:
    def read(document: object) -> object:
        (tmp_path / manifest.NAME).write_text(json.dumps(document))
        return manifest.read_manifest(tmp_path)

    assert read(WHOLE) == WHOLE
    for name, value in WHOLE.items():
        for other in WRONG:
            if type(other) is not type(value):
                assert read({**WHOLE, name: other}) is None, (name, other)
    for entry in ({}, {"bytes": 1}, {"bytes": "1", "sha256": ""}, {**FILE, "sha256": 1}, []):
        assert read({**WHOLE, "outputs": {"a": entry}}) is None
    assert read({**WHOLE, "events": [{"kind": "other", "where": "", "detail": ""}]}) is None
    assert read([]) is None
    (tmp_path / manifest.NAME).write_bytes(b"[" * 200_000)
    assert manifest.read_manifest(tmp_path) is None
    (tmp_path / manifest.NAME).unlink()
    for target in ("/dev/zero", "../outside"):
        (tmp_path / manifest.NAME).symlink_to(target)
        assert manifest.read_manifest(tmp_path) is None
        (tmp_path / manifest.NAME).unlink()
    os.mkfifo(tmp_path / manifest.NAME)
    assert manifest.read_manifest(tmp_path) is None


@pytest.mark.parametrize("size", [8 << 30, 1 << 40])
def test_huge_sparse_calibration_files_are_refused_before_digesting(
    tmp_path: Path, size: int
) -> None:
    messages = {
        "a.txt": "NUL",
        "b.jsonl": "NUL",
        "c.parquet": "no parquet",
        "d.dat": "no importance",
    }
    for name in messages:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    for name, match in messages.items():
        what = match if size <= roles.TABLE.max_bytes else f"more than {roles.TABLE.max_bytes}"
        source = str(tmp_path / name) if name != "d.dat" else f"imatrix:{name}"
        settings = Settings(imatrix=tmp_path / name) if name == "d.dat" else Settings()
        recipe = Recipe(method="gptq", calibration=CalibrationOptions(source=source))
        assert what in run_within_bounds(partial(strip_local_paths, recipe, settings))


@pytest.mark.parametrize("name", ["x.dat", "x.gguf"])
def test_trailing_bytes_of_an_imatrix_are_refused_before_digesting(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    write_imatrix(path, Imatrix({"w": WeightImportance(torch.ones(1, 4), 1)}, "", 1, 1))
    recipe = Recipe(method="rtn", calibration=CalibrationOptions(source=f"imatrix:{name}"))
    digest = partial(strip_local_paths, recipe, Settings(imatrix=path))
    assert digest()[0].calibration.sha256 == (f"{manifest.sha256(path, None)}  {name}",)
    os.truncate(path, 8 << 30)
    assert "bytes after the last" in run_within_bounds(digest)
