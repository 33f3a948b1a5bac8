"""Copies that may be damaged, and their tensors as arrays of bits, whatever the container.

Nothing here is the product's: containers are parsed anew, so that its readers and the planting share no mistake.
A copy is made of hard links; a file is replaced before it changes, so that the original stays as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[Any]
# Names in headers of safetensors: the type of their bits, and the floats that these are.
TYPES: dict[str, tuple[str, torch.dtype | None]] = {
    "F32": ("u4", torch.float32), "F16": ("u2", torch.float16), "BF16": ("u2", torch.bfloat16),
    "F8_E4M3": ("u1", torch.float8_e4m3fn), "F8_E5M2": ("u1", torch.float8_e5m2), "F8_E8M0": ("u1", None),
    "U8": ("u1", None), "I8": ("u1", None), "I16": ("u2", None), "U16": ("u2", None), "I32": ("u4", None),
    "U32": ("u4", None), "I64": ("u8", None), "BOOL": ("u1", None),
}  # fmt: skip
# Parts of a module by the end of the name: what they are to a quantized weight.
ROLES: dict[str, str] = {
    "weight_packed": "codes", "qweight": "codes",
    "weight_scale": "scales", "scales": "scales", "weight_scale_inv": "scales", "weight.absmax": "scales",
    "SCB": "scales",
    "weight_zero_point": "zeros", "qzeros": "zeros", "biases": "zeros", "g_idx": "zeros", "weight_g_idx": "zeros",
    "weight_global_scale": "more", "input_scale": "more", "input_global_scale": "more", "input_zero_point": "more",
    "weight.nested_absmax": "more", "weight.nested_quant_map": "more", "weight.quant_map": "more",
    "weight_shape": "more", "weight_format": "more", "outlier_columns": "more", "outlier_weight": "more",
    "k_scale": "more", "v_scale": "more",
}  # fmt: skip
PART = re.compile(rf"^(.*?)\.({'|'.join(map(re.escape, ROLES))}|weight\.quant_state\..*)$")


@dataclass(frozen=True)
class Part:
    """A tensor, or a field of its blocks: ``bits`` ``[rows, ...]`` is a view into the file.

    Attributes:
        name: of the tensor.
        module: the layer that it belongs to.
        role: codes, scales, zeros, more, or kept.
        bits: unsigned integers.
        floats: what the bits are, or None for integers.
    """

    name: str
    module: str
    role: str
    bits: Bits
    floats: torch.dtype | None

    def values(self) -> torch.Tensor:
        """The floats, in float64."""
        assert self.floats is not None
        return torch.from_numpy(self.bits.copy()).view(self.floats).double()

    def put(self, values: torch.Tensor) -> None:
        """Store floats in their own type."""
        assert self.floats is not None
        integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[self.bits.itemsize]
        self.bits[...] = values.to(self.floats).view(integers).numpy()


class Copy:
    """A copy of an artifact, a directory or a file, without its manifest, in a folder that is its own.

    ``source`` and ``command`` say how the original was made, where it can be made again.
    """

    def __init__(
        self, original: Path, place: Path, source: Path | None = None, command: str = ""
    ) -> None:
        self.original, self.path = original, place / original.name
        self.source, self.command = source, command
        self.changed: set[str] = set()
        shutil.rmtree(place, ignore_errors=True)  # of a run that was stopped
        if original.is_file():
            place.mkdir(parents=True, exist_ok=True)
            os.link(original, self.path)
            return
        shutil.copytree(original, self.path, copy_function=os.link)
        for name in ("quantforge.manifest.json", "model.sig"):
            (self.path / name).unlink(missing_ok=True)

    @property
    def one_file(self) -> bool:
        """Whether everything is in one file."""
        return self.path.is_file()

    def place(self, name: str) -> Path:
        """The path of a file of the artifact; the empty name is the artifact itself."""
        return self.path / name if name else self.path

    def names(self) -> list[str]:
        """Files of a directory, sorted; of a single file the empty name."""
        if self.one_file:
            return [""]
        return sorted(
            str(item.relative_to(self.path)) for item in self.path.rglob("*") if item.is_file()
        )

    def read(self, name: str) -> bytearray:
        """The bytes of a file."""
        return bytearray(self.place(name).read_bytes())

    def write(self, name: str, data: bytes | bytearray) -> None:
        """Replace or add a file."""
        place = self.place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_bytes(data)
        self.changed.add(name or place.name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.place(name).unlink()
        self.changed.add(name)

    def json(self, name: str) -> Any:
        """A JSON file, or None where there is none."""
        place = self.place(name)
        return json.loads(place.read_bytes()) if place.is_file() else None

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False).encode())

    def remove_all(self) -> None:
        """Remove the copy and its folder."""
        shutil.rmtree(self.path.parent)


def header_and_data(raw: bytearray) -> tuple[dict[str, Any], bytearray]:
    """The two parts of a file of safetensors; ValueError where the header is no JSON."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@dataclass
class Shard:
    """One file of safetensors: header and data, both of which may be changed before `save`."""

    copy: Copy
    name: str
    header: dict[str, Any] = field(init=False)
    data: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.header, self.data = header_and_data(self.copy.read(self.name))

    @property
    def entries(self) -> dict[str, Any]:
        """Tensors of the header."""
        return {name: entry for name, entry in self.header.items() if name != "__metadata__"}

    def bits(self, name: str) -> Bits:
        """A tensor as unsigned integers in its shape; a view."""
        entry = self.header[name]
        first, last = entry["data_offsets"]
        kind = np.dtype(TYPES[entry["dtype"]][0])
        part = np.frombuffer(self.data, kind, (last - first) // kind.itemsize, first)
        return part.reshape(entry["shape"])

    def save(self) -> None:
        """Write the file back."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.copy.write(self.name, struct.pack("<Q", len(text)) + text + self.data)


class Weights:
    """All parts of a directory of safetensors; `save` writes the files back."""

    def __init__(self, copy: Copy) -> None:
        names = [name for name in copy.names() if name.endswith(".safetensors")]
        self.shards = [Shard(copy, name) for name in names]
        found = {name: shard for shard in self.shards for name in shard.entries}
        modules = {name: PART.match(name) for name in found}
        quantized = {
            match[1] for match in modules.values() if match and "weight_shape" not in match[2]
        }
        self.parts: list[Part] = []
        for name, shard in sorted(found.items()):
            match = modules[name]
            module = match[1] if match else name.rpartition(".")[0]
            role = ROLES.get(match[2], "more") if match else "kept"
            if name == f"{module}.weight" and module in quantized:
                role = "codes"
            bits = shard.bits(name)
            if bits.ndim == 0:
                bits = bits.reshape(1)
            self.parts.append(Part(name, module, role, bits, TYPES[shard.header[name]["dtype"]][1]))

    def save(self) -> None:
        """Write all files back."""
        for shard in self.shards:
            shard.save()


def parts_of(copy: Copy) -> Any:
    """The weights of a copy: `Weights`, or `scripts.defects.gguf_files.Blocks`."""
    from scripts.defects.gguf_files import Blocks

    return Blocks(copy) if copy.one_file else Weights(copy)
