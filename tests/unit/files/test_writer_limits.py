"""Limits of the safetensors writer and its errors when the disk fails."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantforge.errors import ResourceError
from quantforge.files.disk import DISK
from quantforge.files.safetensors import read_header
from quantforge.files.writer import WeightsWriter, header_bytes, index_json, plan_files, plan_shards
from quantforge.plans import StoredTensor
from tests.headers import file_bytes

W = StoredTensor("w", "F32", (2, 2))
SHARDS = ((W, StoredTensor("bias", "BF16", (3,))),)


@pytest.mark.parametrize(
    ("limit", "files"), [(7, ["a", "bc"]), (8, ["ab", "c"]), (9, ["abc"]), (2, ["a", "b", "c"])]
)
def test_shards_are_filled_to_the_byte_limit(limit: int, files: list[str]) -> None:
    tensors = [StoredTensor(name, "U8", (size,)) for name, size in (("a", 3), ("b", 5), ("c", 1))]
    assert ["".join(t.name for t in shard) for shard in plan_shards(tensors, limit)] == files


def test_unicode_names_are_written_unescaped_and_sorted() -> None:
    shards = ((StoredTensor("ü", "U8", (1,)),), (StoredTensor("a", "U8", (2,)),))
    entry = '"ü":{"data_offsets":[0,1],"dtype":"U8","shape":[1]}'
    assert (
        header_bytes(shards[0])[8:].decode().rstrip(" ")
        == '{"__metadata__":{"format":"pt"},' + entry + "}"
    )
    assert index_json(shards).decode() == (
        "{\n"
        '  "metadata": {\n'
        '    "total_size": 3\n'
        "  },\n"
        '  "weight_map": {\n'
        '    "a": "model-00002-of-00002.safetensors",\n'
        '    "ü": "model-00001-of-00002.safetensors"\n'
        "  }\n"
        "}\n"
    )


def test_the_largest_header_that_is_written_can_be_read(tmp_path: Path) -> None:
    limit = 32 * 2**20
    value = "x" * (limit - len('{"__metadata__":{"k":""}}'))
    (tmp_path / "x").write_bytes(header_bytes([], {"k": value}))
    assert (tmp_path / "x").stat().st_size == 8 + limit
    assert read_header(tmp_path / "x") == {}
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"k": value}
    with pytest.raises(ValueError, match="a header of 33554440 bytes"):
        header_bytes([], {"k": value + "x"})


def test_writing_zero_rows_after_the_last_is_an_error(tmp_path: Path) -> None:
    with WeightsWriter(tmp_path, plan_files(((StoredTensor("w", "U8", (1, 4)),),))) as writer:
        writer.write_rows("w", 0, torch.ones(1, 4, dtype=torch.uint8))
        with pytest.raises(ValueError, match="written before"):
            writer.write_rows("w", 1, torch.empty(0, 4, dtype=torch.uint8))
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [[1] * 4]


def test_planned_entries_equal_the_header_of_the_file(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path, plan_files(SHARDS))
    entries = read_header(tmp_path / "model.safetensors")
    assert [writer.entry(name) for name in ("w", "bias")] == [entries["w"], entries["bias"]]


def test_failed_allocation_removes_files_and_reports_needed_bytes(tmp_path: Path) -> None:
    """The message states the reason and the bytes that all files need."""
    sizes: list[int] = []

    def allocate(descriptor: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shards = [(StoredTensor(name, "U8", (100,)),) for name in "abc"]
    with pytest.raises(ResourceError) as caught:
        WeightsWriter(tmp_path, plan_files(shards), disk=replace(DISK, allocate=allocate))
    message = f"{tmp_path}: No space left on device; {file_bytes(shards)} bytes needed, "
    assert caught.value.message.startswith(message)
    assert list(tmp_path.iterdir()) == []
    assert sizes == [file_bytes(shards[:1])] * 2


def test_a_failed_sync_is_reported_and_retried(tmp_path: Path) -> None:
    """The message says that no more bytes are needed; data not yet durable is synced again."""
    failing: list[str] = []

    def fsync(descriptor: int) -> None:
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = WeightsWriter(tmp_path, plan_files(SHARDS), disk=replace(DISK, fsync=fsync))
    writer.write("w", torch.zeros(2, 2))
    writer.write("bias", torch.zeros(3).bfloat16())
    failing.append("now")
    for step in (writer.sync, writer.sync, writer.close):
        with pytest.raises(ResourceError) as caught:
            step()
        file = tmp_path / "model.safetensors"
        assert caught.value.message.startswith(f"{file}: Input/output error; 0 bytes needed, ")
    failing.clear()
    writer.close()


def test_files_are_closed_without_a_standard_input(tmp_path: Path) -> None:
    """The first file that is opened then has descriptor 0."""
    before = os.dup(0)
    os.close(0)
    try:
        with WeightsWriter(tmp_path, plan_files(((W,),))) as writer:
            writer.write("w", torch.zeros(2, 2))
            assert Path("/proc/self/fd/0").readlink().name == "model.safetensors"
        assert not Path("/proc/self/fd/0").exists()
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_unwritten_tensors_are_named_unless_another_error_occurred(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(ValueError, match="1 tensors were not written: bias"),
        WeightsWriter(tmp_path, plan_files(SHARDS)) as writer,
    ):
        writer.write("w", torch.ones(2, 2))
    (tmp_path / "other").mkdir()
    with pytest.raises(KeyError), WeightsWriter(tmp_path / "other", plan_files(SHARDS)):
        raise KeyError
