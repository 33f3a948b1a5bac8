"""Size of somebody's file as a target: another quantized form of the very same model, seen by its headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quantforge.architectures.match import Matched, Role
from quantforge.checkpoint.hub import source_name
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import RefusedError
from quantforge.formats import GGUF, detect
from quantforge.planning.size_target import SizeTarget

_ANY_FILE = "18GB takes any size"
Shape = tuple[int, ...]


def format_like(opened: Checkpoint) -> str:
    """Return the format of a file, "" where it is the default that a directory would get anyway."""
    return GGUF if opened.path.is_file() else ""


def size_like(opened: Checkpoint, matched: Matched) -> SizeTarget:
    """Return the bytes of the weight files of somebody's model.

    Args:
        opened: theirs.
        matched: the model that is to be as large.

    Raises:
        RefusedError: it is of another model; the message names the first tensor that differs.
        InputError: its format is not read.
    """
    name, _ = source_name(opened.path)
    different = next(_differences(_shapes(opened), matched), None)
    if different:
        said = f"--like {name}: it is another model: {different}"
        raise RefusedError(said, f"a file of this model; --target {_ANY_FILE}")
    nbytes = sum(file.stat().st_size for file in opened.shards)
    return SizeTarget(f"--like {name} ({nbytes:,} bytes)", nbytes=nbytes)


def _shapes(opened: Checkpoint) -> dict[str, Shape]:
    """Return the shapes of all tensors by name, of a quantized one as it is decoded."""
    headers = {name: entry.stored() for name, entry in opened.entries.items()}
    layouts = [*detect(opened.config).layouts(opened.config, headers)]
    packed = {name for layout in layouts for name in layout.stored}
    plain = {name: one.shape for name, one in headers.items() if name not in packed}
    return plain | {f"{layout.module}.weight": layout.shape for layout in layouts}


def _differences(theirs: Mapping[str, Shape], matched: Matched) -> Iterator[str]:
    """Yield in what matrices differ: those of the blocks and the embedding. A head that is tied may be there or not."""
    ours: set[str] = set()
    for tensor in matched.tensors:
        stored, names = tensor.stored, (tensor.stored.name, tensor.name)
        ours |= {*names}
        block = tensor.role is Role.LINEAR and tensor.block >= 0
        if not block and tensor.role is not Role.EMBEDDING:
            continue
        found = next((theirs[name] for name in names if name in theirs), None)
        if found is None:
            yield f"it has no {stored.name}"
        elif sorted(found) != sorted(stored.shape):  # either way round
            yield f"{stored.name} is {_shown(found)} there and {_shown(stored.shape)} here"
    for name, shape in theirs.items():
        if name not in ours and len(shape) > 1 and any(part.isdigit() for part in name.split(".")):
            yield f"{name} ({_shown(shape)}) is not in this one"


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape))
