"""Limits of the safetensors, JSON and index readers: the last value accepted and the first refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantforge.errors import InputError, IntegrityError
from quantforge.files.opener import parse_object, read_object
from quantforge.files.reader import INDEX_FILE, read_weights
from quantforge.files.safetensors import read_header, read_rows, read_tensor
from quantforge_files.roles import FileRole
from tests.unit.files.test_safetensors import entry, file, one_tensor_header

MB_32 = 33_554_432


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x"


def write_padded(path: Path, start: bytes, size: int) -> None:
    """Write ``start``, padded with spaces to ``size`` bytes."""
    with path.open("wb") as stream:
        stream.write(start.ljust(size))


def header_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_header(path)
    return caught.value.message


# --- safetensors ----------------------------------------------------------------------------------


def test_the_header_limit_is_32_mb(path: Path) -> None:
    write_padded(path, MB_32.to_bytes(8, "little") + b"{}", 8 + MB_32)
    assert read_header(path) == {}
    write_padded(path, (MB_32 + 1).to_bytes(8, "little") + b"{}", 9 + MB_32)
    assert f"a header of {MB_32 + 1} bytes, more than {MB_32}" in header_error(path)


def test_limits_of_name_length_and_rank(path: Path) -> None:
    path.write_bytes(file(one_tensor_header("n" * 4096, shape=[1] * 64), b"1234"))
    assert read_header(path)["n" * 4096].shape == (1,) * 64
    path.write_bytes(file(one_tensor_header("n" * 4097), b"1234"))
    assert "(4097 bytes): expected 1 to 4096 bytes" in header_error(path)
    path.write_bytes(file(one_tensor_header(shape=[1] * 65), b"1234"))
    assert "at most 64 sizes" in header_error(path)


@pytest.mark.parametrize(("size", "length_note"), [(80, ""), (81, " (81 bytes)")])
def test_bad_tensor_names_are_shown_up_to_80_characters(
    path: Path, size: int, length_note: str
) -> None:
    path.write_bytes(file(one_tensor_header("\n" + "n" * (size - 1)), b"1234"))
    assert rf"tensor name '\n{'n' * 79}'{length_note}: expected" in header_error(path)


def test_entry_equality_ignores_the_file_stamp(path: Path) -> None:
    path.write_bytes(file(one_tensor_header(), b"1234"))
    first = read_header(path)["a"]
    os.utime(path, ns=(0, 0))
    second = read_header(path)["a"]
    assert first.stamp != second.stamp
    assert first == second
    assert repr(first) == repr(second)


def test_tensors_with_one_or_no_rows_are_read(path: Path) -> None:
    tensors = {"one": torch.arange(6.0).reshape(1, 2, 3), "none": torch.empty(0, 3)}
    save_file(tensors, path)
    entries = read_header(path)
    assert torch.equal(read_rows(entries["one"], 0, 1), tensors["one"])
    assert read_rows(entries["one"], 1, 1).shape == (0, 2, 3)
    assert read_rows(entries["none"], 0, 0).shape == (0, 3)


def test_short_preads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, preadv = torch.arange(16, dtype=torch.uint8), os.preadv
    save_file({"w": tensor}, path)
    tensor_entry = read_header(path)["w"]
    reads = []

    def short_preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        reads.append((at - tensor_entry.start, len(views[0])))
        return preadv(descriptor, [views[0][: len(views[0]) // 2 + 1]], at)

    monkeypatch.setattr(os, "preadv", short_preadv)
    assert torch.equal(read_tensor(tensor_entry), tensor)
    assert reads == [(0, 16), (9, 7), (13, 3), (15, 1)]


# --- JSON -----------------------------------------------------------------------------------------


def json_error(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_object(text.encode(), Path("config.json"))
    return caught.value.message


def test_json_files_over_their_size_limit_are_refused(path: Path) -> None:
    role = FileRole("thing", 1000)
    write_padded(path, b'{"a": 1}', 1000)
    assert read_object(path, role, None) == {"a": 1}
    write_padded(path, b'{"a": 1}', 1001)
    with pytest.raises(InputError, match="1001 bytes, more than 1000"):
        read_object(path, role, None)


def test_json_nesting_limit_is_64_levels() -> None:
    for left, right in (("[", "]"), ('{"b":', "}")):
        value = left * 63 + "[1]" + right * 63
        assert parse_object(f'{{"a":{value}}}'.encode(), Path("x")) == json.loads(
            f'{{"a":{value}}}'
        )
        assert "nested deeper than 64 levels" in json_error(f'{{"a":{left}{value}{right}}}')


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1, -1, 0])
def test_json_integers_of_64_bits_are_read(number: int) -> None:
    assert parse_object(f'{{"a": {number}}}'.encode(), Path("x")) == {"a": number}


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**20 - 1, 10**20, -(10**19), "-0"])
def test_json_integers_over_64_bits_are_refused(number: object) -> None:
    """Some JSON readers convert longer integers to inexact floats."""
    assert f"the number {number} is not a 64-bit integer" in json_error(f'{{"a": {number}}}')


def test_a_duplicate_json_key_is_named() -> None:
    assert "the key 'b' occurs twice" in json_error('{"a": 1, "b": 2, "b": 2, "a": 1}')


# --- an index -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "end"), [(20, "'t19' is not in"), (21, "; and 1 more"), (22, "; and 2 more")]
)
def test_at_most_20_index_errors_are_listed(tmp_path: Path, count: int, end: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(file('{"a":' + entry() + "}", b"1234"))
    weight_map = dict.fromkeys(["a", *(f"t{n}" for n in range(count))], "a.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError) as caught:
        read_weights(tmp_path, [INDEX_FILE, "a.safetensors"])
    message = caught.value.message.replace(" a.safetensors, where the index puts it", "")
    assert message.endswith(end)
    assert message.count("tensor 't") == 20


def test_a_file_truncated_while_being_read_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(file(one_tensor_header(), b"1234"))
    tensor = next(iter(read_header(path).values()))
    pread = os.pread
    with monkeypatch.context() as cut:
        cut.setattr(os, "pread", lambda descriptor, count, at: pread(descriptor, count, at)[:20])
        with pytest.raises(IntegrityError, match="changed while it was being read"):
            read_header(path)
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: 0)
    with pytest.raises(IntegrityError, match="changed while it was being read"):
        read_tensor(tensor)
