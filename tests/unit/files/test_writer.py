"""The safetensors writer: exact bytes, sharding, and errors for every misuse of a plan."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantforge.errors import IntegrityError
from quantforge.files.disk import DISK
from quantforge.files.reader import open_checkpoint
from quantforge.files.safetensors import read_header, read_tensor
from quantforge.files.writer import (
    WeightsWriter,
    header_bytes,
    index_json,
    natural_sort_key,
    plan_files,
    plan_shards,
    shard_names,
)
from quantforge.plans import StoredTensor
from tests.headers import file_bytes

W = StoredTensor("w", "F32", (2, 2))
SHARDS = ((W, StoredTensor("bias", "BF16", (3,))),)


def test_the_exact_bytes_of_a_safetensors_file(tmp_path: Path) -> None:
    with WeightsWriter(tmp_path, plan_files(SHARDS)) as writer:
        writer.write("bias", torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16))
        writer.write("w", torch.tensor([[1.0, 2.0], [0.5, -0.0]]))
    assert (tmp_path / "model.safetensors").read_bytes() == (
        b"\x98\x00\x00\x00\x00\x00\x00\x00"
        b'{"__metadata__":{"format":"pt"},'
        b'"bias":{"data_offsets":[16,22],"dtype":"BF16","shape":[3]},'
        b'"w":{"data_offsets":[0,16],"dtype":"F32","shape":[2,2]}}'
        b"     "
        b"\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x00\x3f\x00\x00\x00\x80"
        b"\x80\x3f\x00\xc0\x00\x00"
    )


def test_headers_are_aligned_and_hold_any_metadata() -> None:
    for count in range(20):
        header = header_bytes([StoredTensor("n" * (count + 1), "U8", (1,))], {"é": "ü"})
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert json.loads(header[8:])["__metadata__"] == {"é": "ü"}


def test_tensor_names_sort_naturally() -> None:
    names = ["h.10.w", "h.2.w", "lm_head", "h.1.w", "h.01.w", "h.2.b", "10", "9"]
    assert sorted(names, key=natural_sort_key) == [
        "9", "10", "h.01.w", "h.1.w", "h.2.b", "h.2.w", "h.10.w", "lm_head",
    ]  # fmt: skip


def test_shards_follow_block_order_with_wide_dtypes_first() -> None:
    tensors = [StoredTensor(f"layers.{n}.w", "BF16", (n % 3 + 1, 4)) for n in (10, 2, 1, 0)]
    tensors += [StoredTensor("layers.2.scale", "F32", (1,)), StoredTensor("big", "U8", (1000,))]
    assert [[tensor.name for tensor in shard] for shard in plan_shards(tensors, 40)] == [
        ["big"],
        ["layers.2.scale", "layers.0.w", "layers.1.w"],
        ["layers.2.w", "layers.10.w"],
    ]
    assert plan_shards(tensors, 40) == plan_shards(tensors[::-1], 40)
    assert [t.name for t in plan_shards(tensors, 10**9)[0]][:2] == ["layers.2.scale", "layers.0.w"]


def test_shard_names_are_numbered() -> None:
    assert shard_names(1) == ("model.safetensors",)
    assert shard_names(2) == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )


def test_index_and_predicted_size_match_the_files(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randn(n + 1, 3).half() for n in range(9)}
    shards = plan_shards([StoredTensor(k, "F16", tuple(v.shape)) for k, v in tensors.items()], 64)
    assert len(shards) > 3
    with WeightsWriter(tmp_path, plan_files(shards)) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == file_bytes(shards)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(index_json(shards))
    index = json.loads(index_json(shards))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert list(index["weight_map"]) == sorted(tensors)
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    for shard in checkpoint.shards:
        assert all(torch.equal(v, tensors[k]) for k, v in load_file(shard).items())


def test_non_contiguous_tensors_are_written_in_row_order(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1:],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(base),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
    }
    shards = plan_shards([StoredTensor(k, "F32", tuple(v.shape)) for k, v in tensors.items()], 100)
    with WeightsWriter(tmp_path, plan_files(shards)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    stored = {
        name: read_tensor(entry)
        for file in tmp_path.iterdir()
        for name, entry in read_header(file).items()
    }
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_strips_of_rows_must_be_written_in_order(tmp_path: Path) -> None:
    weight = torch.randn(10, 2, 2).bfloat16()
    shards = ((StoredTensor("w", "BF16", (10, 2, 2)),),)
    with WeightsWriter(tmp_path, plan_files(shards)) as writer:
        with pytest.raises(ValueError, match="not written yet"):
            writer.write_rows("w", 3, weight[3:6])
        for first, last in ((0, 3), (3, 6), (6, 9), (9, 10)):
            writer.write_rows("w", first, weight[first:last])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], weight)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WeightsWriter]:
    new_writer = WeightsWriter(tmp_path, plan_files(SHARDS))
    yield new_writer
    new_writer.__exit__(KeyboardInterrupt, None, None)


def test_writing_unplanned_tensors_is_an_error(writer: WeightsWriter) -> None:
    for name, tensor, words in (
        ("x", torch.zeros(2, 2), "not planned"),
        ("w", torch.zeros(2, 2).half(), "float16, planned F32"),
        ("w", torch.zeros(4), r"shape \(4,\), planned \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            writer.write(name, tensor)
    for first, tensor in ((1, torch.zeros(2, 2)), (-1, torch.zeros(1, 2)), (0, torch.zeros(1, 3))):
        with pytest.raises(ValueError, match="planned"):
            writer.write_rows("w", first, tensor)


def test_writing_a_tensor_twice_is_an_error(writer: WeightsWriter) -> None:
    writer.write_rows("w", 0, torch.zeros(1, 2))
    for write in (
        lambda: writer.write("w", torch.zeros(2, 2)),
        lambda: writer.write_rows("w", 0, torch.zeros(1, 2)),
    ):
        with pytest.raises(ValueError, match="written before"):
            write()


def test_an_empty_tensor_must_be_written_exactly_once(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path, plan_files(((StoredTensor("e", "U8", (0,)),),)))
    with pytest.raises(ValueError, match="1 tensors were not written: e"):
        writer.close()
    writer.write("e", torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="written before"):
        writer.write("e", torch.empty(0, dtype=torch.uint8))
    writer.close()


def test_closing_with_unwritten_tensors_is_an_error(writer: WeightsWriter) -> None:
    writer.write_rows("w", 0, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="2 tensors were not written: w, bias"):
        writer.close()


def test_errors_inside_the_writer_context_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), WeightsWriter(tmp_path, plan_files(SHARDS)):
        _ = 1 / 0


def test_duplicate_tensors_in_a_plan_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice in one file"):
        header_bytes([W, W])
    with pytest.raises(ValueError, match="twice in one file"):
        header_bytes([StoredTensor("__metadata__", "U8", (1,))])
    with pytest.raises(ValueError, match="in two shards"):
        WeightsWriter(tmp_path, plan_files(((W,), (W,))))


def test_an_interrupted_writer_resumes_with_its_files(tmp_path: Path) -> None:
    shards = ((W,), (StoredTensor("b", "U8", (2,)), StoredTensor("c", "U8", (1,))))
    tensors = {"w": torch.randn(2, 2), "b": torch.ones(2).byte(), "c": torch.zeros(1).byte()}
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    first = WeightsWriter(tmp_path, plan_files(shards), disk=replace(DISK, fsync=fsync))
    first.write("b", tensors["b"])
    first.write_rows("w", 0, tensors["w"][:1] + 1)  # a part of a tensor is not done
    first.sync()
    assert sorted(synced) == [*shard_names(2), tmp_path.name], "headers and names, too"
    first.sync()
    assert len(synced) == 3, "nothing new"
    assert first.entry("w").file.name == shard_names(2)[0]
    del first
    second = WeightsWriter(tmp_path, plan_files(shards), finished_names=["b"])
    with pytest.raises(ValueError, match="written before"):
        second.write("b", tensors["b"])
    with second as writer:
        writer.write("c", tensors["c"])
        writer.write("w", tensors["w"])
    stored: dict[str, torch.Tensor] = {}
    for name in shard_names(2):
        stored |= load_file(tmp_path / name)
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_resuming_with_a_different_file_is_refused(tmp_path: Path) -> None:
    WeightsWriter(tmp_path, plan_files(SHARDS))
    os.truncate(tmp_path / "model.safetensors", 10)
    with pytest.raises(IntegrityError, match="not the file") as damaged:
        WeightsWriter(tmp_path, plan_files(SHARDS), finished_names=["w"])
    assert damaged.value.hint == f"start afresh: rm -r {tmp_path.parent}"  # what holds the stage
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match="not the file"):
        WeightsWriter(tmp_path, plan_files(SHARDS), finished_names=["w"])


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_is_respected(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        WeightsWriter(tmp_path, plan_files(SHARDS))
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    shards = tuple((StoredTensor(f"t{n}", "U8", (1,)),) for n in range(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        with WeightsWriter(tmp_path, plan_files(shards)) as writer:
            for n in range(300):
                writer.write(f"t{n}", torch.tensor([n % 256], dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    names = shard_names(300)
    assert [(tmp_path / name).read_bytes()[-1] for name in names] == [n % 256 for n in range(300)]
    assert len(names) == len(list(tmp_path.iterdir()))


def test_written_bytes_depend_only_on_the_plan(tmp_path: Path) -> None:
    code = (
        "import hashlib\n"
        "from quantforge.files.writer import *\n"
        "from quantforge.plans import StoredTensor\n"
        "tensors = {StoredTensor(f'é.{n}.{w}', 'F16', (n,)) for n in range(9) for w in 'abc'}\n"
        "shards = plan_shards(list(tensors), 40)\n"
        "data = b''.join(map(header_bytes, shards)) + index_json(shards)\n"
        "print(hashlib.sha256(data).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "LC_ALL": "C", "TZ": f"UTC{seed}"},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in range(2)
    }  # fmt: skip
    assert len(digests) == 1
