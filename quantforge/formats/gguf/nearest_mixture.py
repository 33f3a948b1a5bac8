"""The number of the mixture that the types of a file's tensors are nearest to: ``general.file_type``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from quantforge.formats.gguf import mixture
from quantforge.formats.gguf.mixture import Shape


def in_blocks(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Return the types of the tensors that a mixture decides on, of ``{name: (type, shape)}``."""
    return {
        name: kind for name, (kind, shape) in shapes.items()
        if name.startswith("blk.") and not mixture.always_float32(name, len(shape))
    }  # fmt: skip


def distances(shapes: Mapping[str, tuple[str, tuple[int, ...]]], shape: Shape) -> dict[object, int]:
    """Return, by the number of each mixture, in how many tensors of the blocks it would have another type.

    Empty where no mixture is mostly of the commonest type: only other programs write that, under their own numbers.

    Args:
        shapes: type and shape of every tensor of the file, by name.
        shape: of the model; with an importance or without one, whichever is nearer.
    """
    types = in_blocks(shapes)
    named = {base for _, base in mixture.MIXTURES.values()}
    if not types or Counter(types.values()).most_common(1)[0][0] not in named:
        return {}
    columns = {name: size[-1] for name, (_, size) in shapes.items() if len(size) > 1}
    found: dict[object, int] = {}
    for label, (number, _) in mixture.MIXTURES.items():
        counts = []
        for observed in (False, True):
            given = mixture.assign(label, columns.items(), replace(shape, importance=observed))
            meant = {name: mixture.fitting(kind, columns[name]) for name, kind in given.items()}
            counts.append(sum(meant.get(name, kind) != kind for name, kind in types.items()))
        found[number] = min(counts)
    return found


def file_type(label: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]], shape: Shape) -> int:
    """Return the number of the mixture that is called so, or of the nearest where rules made the types others.

    Of several that are as near, one that is mostly of the commonest type comes first.

    Args:
        label: the mixture that was asked for, or the type of most tensors.
        shapes: as of `distances`.
        shape: as of `distances`.
    """
    stated, found = mixture.file_type(label), distances(shapes, shape)
    least = min(found.values(), default=0)
    if found.get(stated, least) == least:
        return stated
    ((common, _),) = Counter(in_blocks(shapes).values()).most_common(1)
    nearest = [
        (base != common, number)
        for number, base in mixture.MIXTURES.values() if found[number] == least
    ]  # fmt: skip
    return min(nearest)[1]
