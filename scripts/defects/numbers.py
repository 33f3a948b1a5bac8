"""Defects in tensors: scales, codes, zero points, parameters of a second level, exchanged and kept tensors, raw bytes.

Every function takes a copy and a generator, changes the copy and says what it did, or returns None where the artifact
has nothing of the kind.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from scripts.defects.files import Copy, Part, parts_of

FACTORS = (1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 0.5, 0.8, 0.9, 0.95, -1.0)


def scales(copy: Copy, chance: random.Random) -> str | None:
    """Damage the scales of a module."""
    return _on(
        copy,
        chance,
        "scales",
        (_factor, _factor, _factor, _factor, _roll, _exchange, _sibling, _noise),
    )


def codes(copy: Copy, chance: random.Random) -> str | None:
    """Damage codes."""
    return _on(
        copy,
        chance,
        "codes",
        (_destroy, _destroy, _destroy, _roll, _nibbles, _exchange, _sibling, _zero, _xor),
    )


def zeros(copy: Copy, chance: random.Random) -> str | None:
    """Damage zero points, minima, or the groups that columns belong to."""
    return _on(copy, chance, "zeros", (_factor, _roll, _exchange, _reverse, _zero, _noise, _step))


def more(copy: Copy, chance: random.Random) -> str | None:
    """Damage parameters of a second level: of scales, of inputs, of a matrix, of a cache, and descriptions."""
    return _on(
        copy, chance, "more", (_factor, _factor, _roll, _exchange, _noise, _zero, _step, _sibling)
    )


def kept(copy: Copy, chance: random.Random) -> str | None:
    """Damage a tensor that is not quantized."""
    weights = parts_of(copy)
    found = [part for part in weights.parts if part.role == "kept"]
    tables = [part for part in found if part.bits.ndim > 1]
    biases = [part for part in found if part.name.endswith("bias")]
    norms = [part for part in found if part.bits.ndim == 1 and part not in biases]
    groups = [group for group in (tables, biases, norms, norms) if group]
    if not groups:
        return None
    part = chance.choice(chance.choice(groups))
    changes = (_factor, _factor, _roll, _exchange, _noise, _sibling, _zero)
    return _first(weights, part, chance, changes)


def exchanged(copy: Copy, chance: random.Random) -> str | None:
    """Exchange whole modules, whole blocks, the same part of two modules, or rows of all parts of one."""
    weights = parts_of(copy)
    modules: dict[str, dict[str, Part]] = defaultdict(dict)
    for part in weights.parts:
        modules[part.module][part.name.removeprefix(part.module)] = part
    shapes: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, parts in modules.items():
        key = tuple(
            (end, part.bits.shape, part.bits.dtype.str) for end, part in sorted(parts.items())
        )
        shapes[key].append(name)
    pools = [names for names in shapes.values() if len(names) > 1]
    if not pools:
        return None
    turn = chance.random()
    if turn < 0.2 and (text := _blocks(modules, chance)):
        weights.save()
        return text
    first, second = chance.sample(chance.choice(pools), 2)
    if turn < 0.4 and (text := _rows(modules[first], first, chance)):
        weights.save()
        return text
    ends = list(modules[first])
    if turn > 0.75 and len(ends) > 1:
        ends = [chance.choice(ends)]
    if all((modules[first][end].bits == modules[second][end].bits).all() for end in ends):
        return None
    for end in ends:
        _swap(modules[first][end], modules[second][end])
    weights.save()
    return f"{first} and {second} exchanged: {', '.join(end.strip('.:') for end in ends)}"


def data_bytes(copy: Copy, chance: random.Random) -> str | None:
    """Overwrite a run of bytes somewhere in the weights, whatever lies there."""
    weights = parts_of(copy)
    part = chance.choice(weights.parts)
    flat = np.ascontiguousarray(part.bits).view("u1").reshape(-1)
    length = min(len(flat), int(2 ** chance.uniform(0, 13)))
    at = chance.randrange(len(flat) - length + 1)
    kind = chance.choice(("random", "zeros", "one bit", "shifted"))
    if kind == "random":
        flat[at : at + length] = np.frombuffer(chance.randbytes(length), "u1")
    elif kind == "zeros":
        flat[at : at + length] = 0
    elif kind == "one bit":
        length = 1
        flat[at] ^= 1 << chance.randrange(8)
    else:
        flat[at : at + length] = np.roll(flat[at : at + length], 1)
    part.bits[...] = flat.view(part.bits.dtype).reshape(part.bits.shape)
    weights.save()
    return f"{part.name}: {length} bytes from {at} on, {kind}"


Change = Callable[[Part, Sequence[Part], random.Random], str | None]


def _on(copy: Copy, chance: random.Random, role: str, changes: Sequence[Change]) -> str | None:
    weights = parts_of(copy)
    found = [part for part in weights.parts if part.role == role]
    if not found:
        return None
    kinds = sorted({re.sub(r".*\.\d+\.", "", part.name) for part in found})
    kind = chance.choice(kinds) if role == "more" else None  # rare ones as often as common ones
    part = chance.choice([p for p in found if kind is None or p.name.endswith(kind)])
    return _first(weights, part, chance, changes)


def _first(
    weights: object, part: Part, chance: random.Random, changes: Sequence[Change]
) -> str | None:
    """Apply the first change, in random order, that applies and changes a bit."""
    before = part.bits.copy()
    for change in chance.sample(changes, len(changes)):
        text = change(part, weights.parts, chance)  # type: ignore[attr-defined]
        if text is not None and not np.array_equal(before, part.bits):
            weights.save()  # type: ignore[attr-defined]
            return f"{part.name}: {text}"
    return None


def _where(part: Part, chance: random.Random) -> tuple[tuple[slice, ...], str]:
    """The whole tensor, some rows, a column, a tile, or one element, as an index with its description."""
    rows = part.bits.shape[0]
    columns = part.bits.shape[1] if part.bits.ndim > 1 else 1
    row, column = chance.randrange(rows), chance.randrange(columns)
    kind = chance.choice(("all", "row", "rows", "column", "element", "tile"))
    high, wide = {
        "all": (rows, columns),
        "row": (1, columns),
        "rows": (max(2, rows // 8), columns),
        "column": (rows, 1),
        "element": (1, 1),
        "tile": (max(1, rows // 8), max(1, columns // 4)),
    }[kind]
    row, column = min(row, rows - min(high, rows)), min(column, columns - wide)
    place = (slice(row, row + high), slice(column, column + wide))
    return place[: min(2, part.bits.ndim)], f"{kind} {high} x {wide} from {row}, {column}"


def _factor(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    if part.floats is None:  # powers of two, or codes of scales
        step = chance.choice((-2, -1, 1, 2))
        part.bits[place] += part.bits.dtype.type(step % 256)
        return f"{text} plus {step}"
    factor = chance.choice(FACTORS)
    values = part.values()
    values[place] *= factor
    part.put(values)
    return f"{text} times {factor}"


def _noise(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    if part.floats is None:
        return _destroy(part, _others, chance)
    size = chance.choice((0.01, 0.03, 0.1, 0.3))
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    values = part.values()
    part.put(
        values * (1 + size * torch.randn(values.shape, generator=generator, dtype=torch.float64))
    )
    return f"noise of {size:.0%}"


def _roll(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    axis = chance.randrange(part.bits.ndim)
    size = part.bits.shape[axis]
    if size < 2:
        return None
    step = chance.choice((1, -1, max(1, size // 2), chance.randrange(1, size)))
    part.bits[...] = np.roll(part.bits, step, axis)
    return f"rolled by {step} along axis {axis}"


def _exchange(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    axis = chance.randrange(part.bits.ndim)
    size = part.bits.shape[axis]
    if size < 2:
        return None
    first, second = chance.sample(range(size), 2)
    view = np.moveaxis(part.bits, axis, 0)
    view[[first, second]] = view[[second, first]]
    return f"{first} and {second} exchanged along axis {axis}"


def _reverse(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    axis = chance.randrange(part.bits.ndim)
    part.bits[...] = np.flip(part.bits, axis).copy()
    return f"reversed along axis {axis}"


def _sibling(part: Part, others: Sequence[Part], chance: random.Random) -> str | None:
    end = part.name.rpartition(".")[2] if part.role != "kept" else ""
    like = [other for other in others
            if other.role == part.role and other is not part and other.bits.shape == part.bits.shape
            and other.bits.dtype == part.bits.dtype and other.name.endswith(end)]  # fmt: skip
    if not like:
        return None
    other = chance.choice(like)
    _swap(part, other)
    return f"exchanged with {other.name}"


def _swap(first: Part, second: Part) -> None:
    kept = first.bits.copy()
    first.bits[...] = second.bits
    second.bits[...] = kept


def _zero(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    part.bits[place] = 0
    return f"{text} zero"


def _step(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    part.bits[place] += part.bits.dtype.type(1)
    return f"bits of {text} plus one"


def _destroy(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    piece = np.ascontiguousarray(part.bits[place])
    part.bits[place] = np.frombuffer(chance.randbytes(piece.nbytes), piece.dtype).reshape(
        piece.shape
    )
    return f"{text} random"


def _nibbles(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    piece = np.ascontiguousarray(part.bits[place]).reshape(-1)
    flat = piece.view("u1")
    part.bits[place] = ((flat >> 4) | (flat << 4)).view(piece.dtype).reshape(part.bits[place].shape)
    return f"{text}: nibbles exchanged"


def _xor(part: Part, _others: Sequence[Part], chance: random.Random) -> str | None:
    place, text = _where(part, chance)
    mask = int.from_bytes(bytes([chance.randrange(1, 256)]) * part.bits.itemsize, "little")
    part.bits[place] ^= part.bits.dtype.type(mask)
    return f"{text} xor {mask & 255:#x}"


def _blocks(modules: dict[str, dict[str, Part]], chance: random.Random) -> str | None:
    """Exchange all of two decoder layers."""
    numbered = defaultdict(list)
    for name in modules:
        if match := re.match(r"^(.*?\.)(\d+)(\..*)$", name):
            numbered[int(match[2])].append((match[1], match[3]))
    if len(numbered) < 2:
        return None
    first, second = chance.sample(sorted(numbered), 2)
    for before, after in numbered[first]:
        one, two = modules[f"{before}{first}{after}"], modules.get(f"{before}{second}{after}")
        if two is None or any(
            e not in two or p.bits.shape != two[e].bits.shape for e, p in one.items()
        ):
            return None
    for before, after in numbered[first]:
        for end, part in modules[f"{before}{first}{after}"].items():
            _swap(part, modules[f"{before}{second}{after}"][end])
    return f"layers {first} and {second} exchanged"


def _rows(parts: dict[str, Part], module: str, chance: random.Random) -> str | None:
    """Exchange runs of rows in all parts of a module whose rows are the layer's."""
    rows = max(part.bits.shape[0] for part in parts.values())
    whole = [part for part in parts.values() if part.bits.shape[0] == rows and part.bits.ndim > 1]
    if len(whole) < 2 or rows < 8:
        return None
    run = chance.choice((1, 1, rows // 8, rows // 4))
    first, second = chance.sample(range(rows // run), 2)
    for part in whole:
        one, two = (slice(n * run, (n + 1) * run) for n in (first, second))
        saved = part.bits[one].copy()
        part.bits[one] = part.bits[two]
        part.bits[two] = saved
    return f"{module}: rows {first * run} and {second * run} exchanged, {run} of them"
