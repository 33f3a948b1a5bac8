"""What was damaged: the files and tensors in which a copy differs from its original, and whether a finding names one.

Found by comparing bytes, whatever the plant says of itself. Where numbers of a tensor changed and all weights are in
one file, the tensor has to be named; a finding that only names the model does not say what to look at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.defects.files import PART, Copy, header_and_data

Contents = dict[str, tuple[Any, bytes | bytearray]]
_BLOCK = re.compile(r"\b(layers|h|blk|blocks)\.\d+\..+$")


@dataclass(frozen=True)
class Finding:
    """A finding of `verify`: the check, the file or tensor, what is wrong, and ``error`` or ``warning``."""

    check: str
    where: str
    detail: str
    severity: str = "error"


@dataclass(frozen=True)
class Damage:
    """Names, of which a finding has to bear one.

    Attributes:
        tensors: modules whose numbers changed.
        others: files, keys, and tensors whose description changed.
        several: whether there are several files of weights, so that the damaged one says something.
    """

    tensors: frozenset[str]
    others: frozenset[str]
    several: bool = False

    def named(self, finding: Finding) -> bool:
        """Whether a finding says where the damage is."""
        text = f"{finding.where} {finding.detail}"
        if self.tensors and any(_spelled(name, text) for name in self.tensors):
            return True
        if self.tensors and not self.several:
            return False
        if "config.json" in self.others and _spelled("configuration", text):
            return True
        return finding.check != "logits" and any(_spelled(name, text) for name in self.others)


def damage_of(copy: Copy) -> Damage:
    """Compare a copy with its original."""
    others = {Path(name).name for name in copy.changed}
    weights = [name for name in copy.names() if name.endswith(".safetensors")]
    tensors: set[str] = set()
    for name in ("",) if copy.one_file else sorted(copy.changed):
        if copy.one_file:
            before, after = _gguf(copy.original), _gguf(copy.path)
        elif name.endswith(".safetensors"):
            before, after = _safetensors(copy.original / name), _safetensors(copy.path / name)
        else:
            continue
        if not before:  # a file that was added
            continue
        same = before.keys() & after.keys()
        described = {n for n in same if before[n][0] != after[n][0]} | before.keys() ^ after.keys()
        numbers = {n for n in same - described if before[n][1] != after[n][1]}
        others |= _spellings(described, copy)
        tensors |= _spellings(numbers, copy)
    return Damage(frozenset(tensors), frozenset(others), len(weights) > 1)


def _spelled(name: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _spellings(names: set[str], copy: Copy) -> set[str]:
    """The modules of tensors as a finding may call them: from the number of the block on, or by the source's name."""
    found = set()
    for name in names:
        match = PART.match(name)
        module = match[1] if match else name.removesuffix(".weight")
        found |= {_short(module)}
        if copy.one_file:
            found |= {_short(other) for other in _of_source(copy.original).get(module, ())}
    return found


def _short(module: str) -> str:
    match = _BLOCK.search(module)
    return match[0] if match else module


@cache
def _of_source(path: Path) -> dict[str, list[str]]:
    """What sources of the architecture call the modules of a GGUF file."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    family = fields["general.architecture"].contents()
    blocks = fields[f"{family}.block_count"].contents()
    (kind,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    found: dict[str, list[str]] = {}
    for name, (_, called) in gguf.get_tensor_name_map(kind, blocks).mapping.items():
        if "." in name:
            found.setdefault(called, []).append(name)
    return found


def _safetensors(path: Path) -> Contents:
    """Tensors by name: type and shape, bytes; nothing where the header cannot be read."""
    if not path.exists():
        return {}
    try:
        header, data = header_and_data(bytearray(path.read_bytes()))
        return {
            name: ((entry["dtype"], entry["shape"]), data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _gguf(path: Path) -> Contents:
    """Tensors and keys by name, likewise; a key counts as a description."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        found: Contents = {
            tensor.name: ((int(tensor.tensor_type), tensor.shape.tolist()), tensor.data.tobytes())
            for tensor in reader.tensors
        }
        for name, field in reader.fields.items():
            found[name] = (
                ([int(t) for t in field.types], b"".join(p.tobytes() for p in field.parts)),
                b"",
            )
    except Exception:  # whatever it raises at a broken header
        return {}
    return found
