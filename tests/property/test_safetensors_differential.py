"""The safetensors reader and writer agree with the reference library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError
from quantforge.files.safetensors import TORCH_NAMES, read_header, read_tensor
from quantforge.files.writer import WeightsWriter, plan_files, plan_shards, shard_names
from quantforge.plans import DTYPE_BITS, StoredTensor
from tests.headers import file_bytes

SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read_with_quantforge(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        path.write_bytes(data)
        try:
            entries = read_header(path)
            return {
                name: (entry.dtype, list(entry.shape), read_tensor(entry).reshape(-1).view(
                    torch.uint8).numpy().tobytes())
                for name, entry in entries.items()
            }  # fmt: skip
        except InputError:
            return None


def read_with_library(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        result = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in result}


def agree(data: bytes) -> None:
    accepted = read_with_quantforge(data)
    event("accepted" if accepted is not None else "refused")
    if accepted is not None:
        assert read_with_library(data) == accepted


# --- headers built from good and bad pieces -------------------------------------------------------

ODD_NUMBERS = ["-0", "-1", "1.0", "1e0", "01", "true", "null", '"1"', "[1]", "3", "1e400", "NaN",
               "9223372036854775808", "18446744073709551616", "4611686018427387904"]  # fmt: skip
ODD_DTYPES = ["F33", "f32", "F4", "F8_E8M0", "C64", ""]
ODD_NAMES = ["", "a\0", "__metadata__", "\x1b[1m", "e\u0301", "é", " ", "w" * 99]
ODD_METADATA = ['{"a":"1","a":"2"}', '{"a":1}', "[]", "null", '"x"', '{"é":"\\ud83d\\ude00"}']

ODD_FRAMES = [" {%s}", "{%s}\n", "{%s}\0", "{%s}{}", "\ufeff{%s}", "[%s]", "{%s"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[dict[str, str]], int]:
    """Entries of a valid header as raw JSON text per field, and the bytes that they describe."""
    entries, end = [], 0
    for name in draw(st.lists(st.text("abc.0é", min_size=1, max_size=5), max_size=4, unique=True)):
        dtype = draw(st.sampled_from([*DTYPE_BITS]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start, end = end, end + StoredTensor(name, dtype, tuple(shape)).nbytes
        entries.append(
            {"name": json.dumps(name), "dtype": json.dumps(dtype), "shape": json.dumps(shape),
             "data_offsets": f"[{start}, {end}]", "more": ""}
        )  # fmt: skip
    return entries, end


def mutate(draw: st.DrawFn, entry: dict[str, str]) -> None:
    """Make one field of an entry odd; most oddities are wrong, some are not."""
    field = draw(st.sampled_from([*entry]))
    if field == "name":
        entry[field] = json.dumps(draw(st.sampled_from(ODD_NAMES)))
    elif field == "dtype":
        entry[field] = json.dumps(draw(st.sampled_from([*DTYPE_BITS, *ODD_DTYPES])))
    elif field == "more":
        again = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        entry[field] = draw(st.sampled_from([f',"{again}":{entry[again]}', ',"x":1', ",", '"']))
    else:
        numbers = entry[field][1:-1].split(", ")
        odd = draw(st.sampled_from([*ODD_NUMBERS, "0", "1", "2", "4"]))
        numbers[draw(st.integers(0, len(numbers) - 1))] = odd
        entry[field] = "[" + ",".join(filter(None, numbers)) + "]"


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid file with up to two mutations."""
    entries, size = draw(tables())
    places = draw(
        st.lists(st.sampled_from(["entry", "again", "meta", "frame", "size"]), max_size=2)
    )
    for position in places:
        if position == "entry" and entries:
            mutate(draw, draw(st.sampled_from(entries)))
        elif position == "again" and entries:
            entries.append(dict(draw(st.sampled_from(entries))))
    items = [
        f'{e["name"]}:{{"dtype":{e["dtype"]},"shape":{e["shape"]},'
        f'"data_offsets":{e["data_offsets"]}{e["more"]}}}'
        for e in draw(st.permutations(entries))
    ]
    if "meta" in places:
        items.insert(
            0, '"__metadata__":' + draw(st.sampled_from(['{"format":"pt"}', *ODD_METADATA]))
        )
    frames = ODD_FRAMES if "frame" in places else ["{%s}", "{%s}   ", "{ %s }"]
    frame = draw(st.sampled_from(frames))
    text = (frame % ", ".join(items)).encode()
    change = draw(st.sampled_from([-1, 1])) if "size" in places else 0
    data = bytes(n % 2 for n in range(max(size + change, 0)))
    return len(text).to_bytes(8, "little") + text + data


@settings(SETTINGS, max_examples=200)
@given(files())
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_accepted_files_read_the_same_in_safetensors(data: bytes) -> None:
    agree(data)


VALID = safetensors.torch.save(
    {
        "model.a": torch.zeros(2, 2),
        "model.é": torch.tensor([False, True, True]),
        "s": torch.tensor(1.5, dtype=torch.float16),
    },
    {"format": "pt"},
)


@settings(SETTINGS, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 1),
            st.binary(min_size=1, max_size=1) | st.binary(max_size=2),
        ),
        max_size=2,
    )
)
@example([])
def test_damaged_files_never_read_differently_from_safetensors(
    edits: list[tuple[int, bytes]],
) -> None:
    data = bytearray(VALID)
    for position, new in edits:
        data[position : position + 1] = new
    agree(bytes(data))
    assert edits or read_with_quantforge(VALID) is not None


# --- written files --------------------------------------------------------------------------------

SANE_NAMES = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1)
STORED = st.builds(
    StoredTensor,
    SANE_NAMES.filter(lambda name: name != "__metadata__"),
    st.sampled_from([*DTYPE_BITS]),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)


def filled(stored: StoredTensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if stored.dtype == "BOOL" else 256
    data = torch.randint(0, high, (stored.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(getattr(torch, TORCH_NAMES[stored.dtype])).reshape(stored.shape)


@settings(SETTINGS, max_examples=150)
@given(st.lists(STORED, min_size=1, max_size=8, unique_by=lambda t: t.name), st.integers(1, 400),
       st.randoms(use_true_random=False))  # fmt: skip
def test_written_files_are_read_by_both_libraries(
    tensors: list[StoredTensor], max_bytes: int, random: Any
) -> None:
    shards = plan_shards(tensors, max_bytes)
    expected = {
        tensor.name: (tensor.dtype, list(tensor.shape),
                      filled(tensor, n).reshape(-1).view(torch.uint8).numpy().tobytes())
        for n, tensor in enumerate(tensors)
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        order = list(enumerate(tensors))
        random.shuffle(order)
        with WeightsWriter(Path(directory), plan_files(shards)) as writer:
            for n, tensor in order:
                writer.write(tensor.name, filled(tensor, n))
        written = [(Path(directory) / name).read_bytes() for name in shard_names(len(shards))]
    assert sum(map(len, written)) == file_bytes(shards)
    for read in (read_with_quantforge, read_with_library):
        results: dict[str, Any] = {}
        for data in written:
            part = read(data)
            assert part is not None
            assert not part.keys() & results.keys()
            results |= part
        assert results == expected


@settings(SETTINGS, max_examples=200)
@given(st.lists(STORED, min_size=1, max_size=30, unique_by=lambda t: t.name), st.integers(1, 400))
def test_shards_are_full_and_within_the_limit(tensors: list[StoredTensor], max_bytes: int) -> None:
    shards = plan_shards(tensors, max_bytes)
    assert sorted(t.name for shard in shards for t in shard) == sorted(t.name for t in tensors)
    assert plan_shards(tensors[::-1], max_bytes) == shards
    for shard in shards:
        assert shard
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard) <= max_bytes
        offset = 0
        for tensor in shard:
            assert offset % (DTYPE_BITS[tensor.dtype] // 8) == 0, "aligned to its item size"
            offset += tensor.nbytes
