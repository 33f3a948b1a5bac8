"""The strict safetensors header reader refuses every malformed file with a reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantforge.errors import InputError, IntegrityError
from quantforge.files.safetensors import (
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_RANK,
    TORCH_NAMES,
    read_header,
    read_rows,
    read_tensor,
)
from quantforge.plans import DTYPE_BITS


def file(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


def one_tensor_header(name: str = "a", **fields: object) -> str:
    return "{" + json.dumps(name) + ":" + entry(**fields) + "}"


ONE_END = 8 + len(one_tensor_header()) + 4  # where the data of `one_tensor_header()` ends
TWO = '{"a":' + entry() + ',"b":' + entry(offsets=(4, 8)) + "}"
BAD = {
    "empty": (b"", "header of 0 bytes in a file of 0"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "in a file of 7"),
    "header of no bytes": (file(""), "header of 0 bytes"),
    "header of 2^63": (file("{}", length=2**63), "header of 9223372036854775808 bytes"),
    "header of 2^64-1": (file("{}", length=2**64 - 1), "header of 18446744073709551615 bytes"),
    "header beyond the file": (file("{}", length=3), "header of 3 bytes in a file of 10"),
    "header over the limit": (
        file("{}" + " " * (MAX_HEADER_BYTES - 1)),
        f"more than {MAX_HEADER_BYTES}",
    ),
    "leading space": (file(" {}"), "not a JSON object padded with spaces"),
    "leading newline": (file("\n{}"), "not a JSON object padded with spaces"),
    "byte order mark": (file(b"\xef\xbb\xbf{}"), "not a JSON object padded with spaces"),
    "a list": (file("[]"), "not a JSON object"),
    "trailing newline": (file("{}\n"), "padded with spaces"),
    "two documents": (file("{}{}"), "Extra data"),
    "not UTF-8": (file(b'{"\xff":1}'), "not UTF-8 at byte 2"),
    "not JSON": (file('{"a":}'), "not JSON"),
    "half a surrogate": (file('{"\\ud800":' + entry() + "}", b"1234"), "surrogate"),
    "nested deep": (file('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "nested deeper than"),
    "nested 65": (file('{"a":' + "[" * 65 + "]" * 65 + "}"), "nested deeper than 64"),
    "NaN": (file(one_tensor_header(shape=(1,)).replace("[1]", "[NaN]"), b"1234"), "NaN"),
    "1e400": (file(one_tensor_header().replace("[1]", "[1e400]"), b"1234"), "1e400 is too large"),
    "huge number": (
        file(one_tensor_header().replace("[1]", "[" + "9" * 5000 + "]")),
        "not a 64-bit integer",
    ),
    "same key, same range": (
        file('{"a":' + entry() + ',"a":' + entry("I32") + "}", b"1234"),
        "the key 'a' occurs twice",
    ),
    "same key in metadata": (
        file('{"__metadata__":{"k":"1","k":"2"}}'),
        "the key 'k' occurs twice",
    ),
    "same key in an entry": (
        file('{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        "the key 'dtype' occurs twice",
    ),
    "metadata not a table": (file('{"__metadata__":["a"]}'), "not a table of strings"),
    "metadata not strings": (file('{"__metadata__":{"a":1}}'), "not a table of strings"),
    "hole at the front": (
        file(one_tensor_header(offsets=(4, 8)), b"x" * 8),
        f"'a' at byte {ONE_END} leaves a hole after the header, which ends at {ONE_END - 4}",
    ),
    "hole": (
        file('{"a":' + entry() + ',"b":' + entry(offsets=(8, 12)) + "}", b"x" * 12),
        "leaves a hole after tensor 'a'",
    ),
    "overlap": (
        file(TWO.replace("[4, 8]", "[2, 6]"), b"x" * 6),
        f"tensor 'b' at byte {8 + len(TWO) + 2} overlaps tensor 'a', which ends at {8 + len(TWO) + 4}",
    ),
    "shared range": (
        file('{"a":' + entry() + ',"b":' + entry() + "}", b"x" * 4),
        "overlaps",
    ),
    "trailing byte": (file(one_tensor_header(), b"12345"), "1 bytes after tensor 'a'"),
    "bytes without tensors": (file("{}", b"1"), "1 bytes after the header"),
    "truncated by one": (
        file(one_tensor_header(), b"123"),
        f"ends at byte {ONE_END} of a file of {ONE_END - 1}",
    ),
    "too few bytes": (
        file(one_tensor_header(shape=(2,)), b"1234"),
        "4 bytes do not hold F32 of shape [2]",
    ),
    "too many bytes": (file(one_tensor_header("a", dtype="U8"), b"1234"), "do not hold U8"),
    "product overflows": (
        file(one_tensor_header(dtype="U8", shape=[2**62, 2**62], offsets=(0, 0))),
        "overflows",
    ),
    "zero hides an overflow": (
        file(one_tensor_header(shape=[0, 2**62, 4], offsets=(0, 0))),
        "overflows",
    ),
    "overflow by one byte": (
        file(one_tensor_header(dtype="U8", shape=[0, 2**62, 2], offsets=(0, 0))),
        "overflows",
    ),
    "size of 2^63": (file(one_tensor_header(shape=[0, 2**63], offsets=(0, 0))), "not a list"),
    "rank 2000": (file(one_tensor_header(shape=[1] * 2000), b"1234"), f"at most {MAX_RANK} sizes"),
    "negative size": (file(one_tensor_header(shape=[-1]), b"1234"), "not a list"),
    "negative zero": (file(one_tensor_header().replace("[1]", "[-0]")), "-0"),
    "size 1.0": (file(one_tensor_header(shape=[1.0]), b"1234"), "not a list"),
    "size true": (file(one_tensor_header(shape=[True]), b"1234"), "not a list"),
    "size text": (file(one_tensor_header(shape=["1"]), b"1234"), "not a list"),
    "shape null": (file(one_tensor_header(shape=None), b"1234"), "not a list"),
    "offsets backwards": (file(one_tensor_header(offsets=[4, 0]), b"1234"), "not [start, end]"),
    "three offsets": (file(one_tensor_header(offsets=[0, 4, 4]), b"1234"), "not [start, end]"),
    "negative offset": (file(one_tensor_header(offsets=[-4, 0]), b"1234"), "not [start, end]"),
    "dtype F33": (file(one_tensor_header(dtype="F33"), b"1234"), "dtype 'F33' is not one of"),
    "dtype F4": (file(one_tensor_header(dtype="F4"), b"1234"), "dtype 'F4' is not one of"),
    "dtype a list": (file(one_tensor_header(dtype=["F32"]), b"1234"), "is not one of"),
    "missing field": (file('{"a":{"dtype":"F32","shape":[1]}}', b"1234"), "exactly dtype"),
    "extra field": (
        file(one_tensor_header().replace('"shape"', '"x":1,"shape"'), b"1234"),
        "exactly dtype, shape and data_offsets",
    ),
    "entry not a table": (file('{"a":1}'), "exactly dtype"),
    "no name": (file(one_tensor_header(""), b"1234"), "tensor name ''"),
    "NUL in a name": (file(one_tensor_header("a\0b"), b"1234"), r"tensor name 'a\x00b'"),
    "escape in a name": (file(one_tensor_header("\x1b[31mred"), b"1234"), r"'\x1b[31mred'"),
    "bidi override in a name": (file(one_tensor_header("a\u202eb"), b"1234"), r"\u202e"),
    "long name": (file(one_tensor_header("n" * (MAX_NAME_BYTES + 1)), b"1234"), "(4097 bytes)"),
    "names equal after NFC": (
        file('{"\u00e9":' + entry() + ',"e\u0301":' + entry(offsets=(4, 8)) + "}", b"x" * 8),
        r"tensor names '\xe9' and 'e\u0301' look the same",
    ),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert time.process_time() - start < 2
    assert words in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.file == str(path)
    assert caught.value.hint
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable(), "no raw control characters reach a terminal"


def test_header_errors_carry_the_tensor_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(file(one_tensor_header("model.norm.weight", dtype="F33"), b"1234"))
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert caught.value.tensor == "model.norm.weight"


def test_values_at_the_header_limits_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(
        file(one_tensor_header("n" * MAX_NAME_BYTES, shape=[1] * MAX_RANK) + "   ", b"1234")
    )
    entry_found = read_header(path)["n" * MAX_NAME_BYTES]
    assert entry_found.shape == (1,) * MAX_RANK
    assert read_tensor(entry_found).shape == entry_found.shape
    path.write_bytes(file("{}"))
    assert read_header(path) == {}
    largest = [0, 2**63 - 1]
    path.write_bytes(file(one_tensor_header(dtype="U8", shape=largest, offsets=(0, 0))))
    assert list(read_header(path)["a"].shape) == largest


def test_a_hundred_thousand_tensors_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "x"
    empty = entry(shape=(0,), offsets=(0, 0))
    path.write_bytes(file("{" + ",".join(f'"t{n}":{empty}' for n in range(100_000)) + "}"))
    start = time.process_time()
    assert len(read_header(path)) == 100_000
    assert time.process_time() - start < 5


def test_entries_carry_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x"
    header = TWO[:-1] + ',"__metadata__":{"format":"pt"}}'
    path.write_bytes(file(header, b"x" * 8))
    entries = read_header(path)
    a, b = entries["a"], entries["b"]
    assert (a.start, a.end, b.start, b.end) == tuple(8 + len(header) + n for n in (0, 4, 4, 8))
    assert (a.name, a.dtype, a.shape, a.file, a.nbytes) == ("a", "F32", (1,), path, 4)
    assert (a.to_stored_tensor().name, a.to_stored_tensor().dtype, a.to_stored_tensor().shape) == (
        "a",
        "F32",
        (1,),
    )


def test_every_dtype_is_read_as_safetensors_wrote_it(tmp_path: Path) -> None:
    assert TORCH_NAMES.keys() == DTYPE_BITS.keys()
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8, generator=generator)
    tensors = {
        name: raw.clone().view(getattr(torch, torch_name)).reshape(2, -1)
        for name, torch_name in TORCH_NAMES.items()
    }
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "x")
    entries = read_header(tmp_path / "x")
    assert entries.keys() == tensors.keys()
    for name, expected in tensors.items():
        result = read_tensor(entries[name])
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        assert torch.equal(octets(result), octets(expected))


def test_rows_are_a_slice_of_the_tensor(tmp_path: Path) -> None:
    weight = torch.arange(60, dtype=torch.float16).reshape(5, 4, 3)
    save_file({"before": torch.ones(3, dtype=torch.uint8), "w": weight}, tmp_path / "x")
    result = read_header(tmp_path / "x")["w"]
    for first, last in ((0, 5), (1, 3), (4, 5), (2, 2)):
        assert torch.equal(read_rows(result, first, last), weight[first:last])
    for first, last in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="no rows"):
            read_rows(result, first, last)


def test_writing_to_a_read_tensor_keeps_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    read_tensor(read_header(tmp_path / "x")["w"]).zero_()
    assert (tmp_path / "x").read_bytes() == before


def test_bool_values_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(
        file(one_tensor_header(dtype="BOOL", shape=(4,)), bytes([0, 1, 2, 0]))
    )
    result = read_header(tmp_path / "x")["a"]
    with pytest.raises(InputError, match="neither 0 nor 1") as caught:
        read_tensor(result)
    assert caught.value.tensor == "a"
    assert read_rows(result, 0, 2).tolist() == [False, True]


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-1] + b"!")
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def _rewrite(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [_truncate, _replace, _rewrite, Path.unlink])
def test_a_file_changed_during_the_run_is_noticed(tmp_path: Path, change: object) -> None:
    path = tmp_path / "x"
    save_file({"w": torch.ones(4, 4)}, path)
    result = read_header(path)["w"]
    assert read_tensor(result).sum() == 16
    change(path)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="changed while it was being read") as caught:
        read_rows(result, 0, 1)
    assert (caught.value.file, caught.value.tensor) == (str(path), "w")


def test_pipes_and_directories_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(InputError, match="not a regular file"):
            read_header(tmp_path / name)
    with pytest.raises(InputError, match="No such file"):
        read_header(tmp_path / "nothing")
