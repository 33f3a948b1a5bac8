"""A GGUF file taken apart: keys with their types, the table of tensors, and the fields of their blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scripts.defects.files import TYPES, Copy, Part

NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
# Fields of the blocks of ggml by the number of the type: columns, bytes, and (name, role, type, offset, count).
_D = ("d", "scales", "F16", 0, 1)
SUPERBLOCKS: dict[int, tuple[int, int, tuple[tuple[str, str, str, int, int], ...]]] = {
    2: (32, 18, (_D, ("qs", "codes", "U8", 2, 16))),
    3: (32, 20, (_D, ("m", "zeros", "F16", 2, 1), ("qs", "codes", "U8", 4, 16))),
    6: (32, 22, (_D, ("qh", "codes", "U8", 2, 4), ("qs", "codes", "U8", 6, 16))),
    7: (32, 24, (_D, ("m", "zeros", "F16", 2, 1), ("qh", "codes", "U8", 4, 4), ("qs", "codes", "U8", 8, 16))),
    8: (32, 34, (_D, ("qs", "codes", "U8", 2, 32))),
    10: (256, 84, (("scales", "more", "U8", 0, 16), ("qs", "codes", "U8", 16, 64), ("d", "scales", "F16", 80, 1),
                   ("dmin", "zeros", "F16", 82, 1))),
    11: (256, 110, (("hmask", "codes", "U8", 0, 32), ("qs", "codes", "U8", 32, 64), ("scales", "more", "U8", 96, 12),
                    ("d", "scales", "F16", 108, 1))),
    12: (256, 144, (_D, ("dmin", "zeros", "F16", 2, 1), ("scales", "more", "U8", 4, 12),
                    ("qs", "codes", "U8", 16, 128))),
    13: (256, 176, (_D, ("dmin", "zeros", "F16", 2, 1), ("scales", "more", "U8", 4, 12), ("qh", "codes", "U8", 16, 32),
                    ("qs", "codes", "U8", 48, 128))),
    14: (256, 210, (("ql", "codes", "U8", 0, 128), ("qh", "codes", "U8", 128, 64), ("scales", "more", "U8", 192, 16),
                    ("d", "scales", "F16", 208, 1))),
    20: (32, 18, (_D, ("qs", "codes", "U8", 2, 16))),
    23: (256, 136, (_D, ("scales", "more", "U8", 2, 6), ("qs", "codes", "U8", 8, 128))),
    34: (256, 54, (("qs", "codes", "U8", 0, 52), ("d", "scales", "F16", 52, 1))),
    35: (256, 66, (("qs", "codes", "U8", 0, 64), ("d", "scales", "F16", 64, 1))),
    39: (32, 17, (("e", "scales", "U8", 0, 1), ("qs", "codes", "U8", 1, 16))),
}  # fmt: skip
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}


@dataclass
class Key:
    """A key: its type, for arrays the type of the items, and the value."""

    name: str
    type: int
    items: int
    value: Any


@dataclass
class Tensor:
    """A row of the table; ``dims`` in the order of the file, columns first."""

    name: str
    dims: list[int]
    type: int
    offset: int


class Container:
    """Keys, table and data of a GGUF file; `save` writes them back."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._raw = copy.read("")
        self._at = 8
        count, keys = self._take("<Q"), self._take("<Q")
        self.keys = [self._key() for _ in range(keys)]
        self.tensors = [self._tensor() for _ in range(count)]
        self.alignment = next((k.value for k in self.keys if k.name == "general.alignment"), 32)
        self.data = self._raw[-(-self._at // self.alignment) * self.alignment :]

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._raw, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> bytes:
        length = self._take("<Q")
        self._at += length
        return bytes(self._raw[self._at - length : self._at])

    def _key(self) -> Key:
        name, kind = self._string().decode(), self._take("<I")
        if kind != ARRAY:
            return Key(
                name, kind, 0, self._string() if kind == STRING else self._take(NUMBERS[kind])
            )
        items, count = self._take("<I"), self._take("<Q")
        if items == STRING:
            return Key(name, kind, items, [self._string() for _ in range(count)])
        return Key(name, kind, items, [self._take(NUMBERS[items]) for _ in range(count)])

    def _tensor(self) -> Tensor:
        name = self._string().decode()
        dims = [self._take("<Q") for _ in range(self._take("<I"))]
        return Tensor(name, dims, self._take("<I"), self._take("<Q"))

    def header(self) -> bytes:
        """Everything in front of the data, padded."""
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys)))
        for key in self.keys:
            out += _text(key.name.encode()) + struct.pack("<I", key.type)
            if key.type == ARRAY:
                out += struct.pack("<IQ", key.items, len(key.value))
                out += b"".join(_scalar(key.items, item) for item in key.value)
            else:
                out += _scalar(key.type, key.value)
        for tensor in self.tensors:
            out += _text(tensor.name.encode()) + struct.pack("<I", len(tensor.dims))
            out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            out += struct.pack("<IQ", tensor.type, tensor.offset)
        return bytes(out + b"\0" * (-len(out) % self.alignment))

    def save(self) -> None:
        """Write the file back."""
        self.copy.write("", self.header() + self.data)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == STRING else struct.pack(NUMBERS[kind], value)


class Blocks(Container):
    """The fields of all blocks as parts."""

    def __init__(self, copy: Copy) -> None:
        super().__init__(copy)
        self.parts: list[Part] = []
        for tensor in self.tensors:
            rows = int(np.prod(tensor.dims[1:], dtype=np.int64))
            if tensor.type in PLAIN:
                kind, floats = TYPES[PLAIN[tensor.type]]
                bits = np.frombuffer(self.data, kind, rows * tensor.dims[0], tensor.offset)
                shape = (tensor.dims[0],) if len(tensor.dims) == 1 else (rows, tensor.dims[0])
                self._add(tensor, "kept", bits.reshape(shape), floats)
            elif tensor.type in SUPERBLOCKS:
                self._fields(tensor, rows)

    def _fields(self, tensor: Tensor, rows: int) -> None:
        columns, size, fields = SUPERBLOCKS[tensor.type]
        count = rows * tensor.dims[0] // columns
        layout = np.dtype({
            "names": [name for name, *_ in fields],
            "formats": [(TYPES[kind][0], (many,)) for _, _, kind, _, many in fields],
            "offsets": [place for *_, place, _ in fields],
            "itemsize": size,
        })  # fmt: skip
        blocks = np.frombuffer(self.data, layout, count, tensor.offset)
        for name, role, kind, _, many in fields:
            bits = blocks[name].reshape(rows, -1, many)
            view = bits[:, :, 0] if many == 1 else bits
            self._add(tensor, role, view, TYPES[kind][1], f":{name}")

    def _add(
        self, tensor: Tensor, role: str, bits: Any, floats: torch.dtype | None, end: str = ""
    ) -> None:
        module = tensor.name.removesuffix(".weight")
        self.parts.append(Part(tensor.name + end, module, role, bits, floats))
