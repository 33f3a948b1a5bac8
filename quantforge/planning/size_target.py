"""Target of an allocation: a size as it is asked for, and what it leaves for the linears of the blocks.

``3.5bpw`` counts the matrices inside of blocks, ``18GB`` all weight files. ``24GB@32k`` is the memory of a device that
has to hold the weights, the cache of a sequence of so many tokens (``24GB@8x32k``: of eight) and what a step works in,
all of it in the share of the memory in which `quantforge.planning.capacity` says that a result fits. ``4GB/token`` are
the weights that a step of decoding reads for one sequence: all but the embedding, and of experts those that are chosen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantforge.architectures.match import Matched, Role
from quantforge.checkpoint.hub import source_name
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import detect
from quantforge.planning import quantities
from quantforge.planning.capacity import MARGIN, Capacity, Load, capacity
from quantforge.planning.cards import Card
from quantforge.planning.gradients import quantized_linears
from quantforge.planning.planner import Planned
from quantforge.planning.weight_traffic import expert_share, weight_traffic
from quantforge.results.significant import UNITS, size

_OTHERS = "18GB, 17GiB, 4GB/token, or of a device's memory 24GB@32k"
_BYTES = {unit.lower(): size for unit, size in quantities.BYTES.items()}
_SIZE = re.compile(
    rf"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>bpw|{'|'.join(_BYTES)})(?P<token>/token)?(?:@(?:(?P<sequences>[1-9][0-9]*)x(?=.))?(?P<context>.*))?",
    re.IGNORECASE,
)
_MOST = 1e18  # bytes
_WIDEST = 16  # bits: a bare number below is meant as such
_DIGITS = 4  # of a size that is told to be typed


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """Size that is asked for.

    Attributes:
        text: as it was typed, with its option.
        bits: per weight of the matrices inside of blocks; None where bytes are meant.
        nbytes: of all weight files, or with a load of the memory of every device.
        load: what the memory is for; None where it is not memory.
        per_token: bytes of weights are meant that a step of decoding reads.
    """

    text: str
    bits: float | None = None
    nbytes: float = 0.0
    load: Load | None = None
    per_token: bool = False

    @property
    def of_files(self) -> bool:
        """Return whether bytes of all weight files are meant."""
        return self.bits is None and self.load is None and not self.per_token


@dataclass(frozen=True, slots=True)
class Scale:
    """Unit of a target against bytes of the linears of blocks.

    Attributes:
        target: what is asked for.
        asked: in the target's unit.
        other: of that unit, what is taken beside the linears.
        rate: bytes of linears for each unit.
        shown: returns a number of units as it would be typed, rounded up or down.
        more: returns what else is possible for so many bytes of linears, as an end of a sentence.
    """

    target: SizeTarget
    asked: float
    other: float
    rate: float
    shown: Callable[[float, bool], str]
    more: Callable[[int], str] = lambda _: ""

    @property
    def room(self) -> int:
        """Return the bytes that the target leaves for the linears; negative where the rest takes more."""
        return math.floor((self.asked - self.other) * self.rate)

    def reach(self, least: int, most: int) -> str:
        """Return what can be asked for, by the bytes of linears that the candidates reach."""
        low, high = (self.other + nbytes / self.rate for nbytes in (least, most))
        return f"from {self.shown(low, True)} to {self.shown(high, False)}"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device as a target of memory shares it out, in bytes.

    Attributes:
        load: what it is for.
        weights, cache, working: of the result, of the cache at the context, of a step.
        spare: for code, graphs and the allocator.
        left: of the memory beside all of these.
    """

    load: Load
    weights: float
    cache: float
    working: float
    spare: float
    left: float

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        load = self.load
        parts = ("weights", "cache", "working", "spare", "left")
        return {
            "context": load.context,
            "batch": load.batch,
            "cache": load.cache,
            "devices": load.devices,
            **{f"{name}_bytes": round(getattr(self, name)) for name in parts},
        }


def parse_target(text: str, cache: str | None = None, devices: int = 1) -> SizeTarget:
    """Parse ``3.5bpw``, ``18GB`` or ``17GiB`` (of all weight files), ``24GB@32k`` or ``24GB@8x32k``.

    Args:
        text: as it was typed.
        cache: type of the cache, for a target of memory.
        devices: that share the model, likewise.

    Raises:
        UsageError: it is none of these, not above 0, or a type of cache is given that nothing is asked of.
    """
    said = f"--target {text}"
    found = _SIZE.fullmatch(text.strip())
    number = float(found["number"]) if found else 0.0
    if found is None or not 0 < number * _BYTES.get(found["unit"].lower(), 1.0) <= _MOST:
        bare = re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip())
        bits = text.strip() if bare and 0 < float(text) < _WIDEST else "4.5"
        raise UsageError(f"{said}: no size", f"e.g. {bits}bpw, {_OTHERS}")
    unit, context = found["unit"].lower(), found["context"]
    if found["token"]:
        if unit == "bpw" or context is not None:
            raise UsageError(f"{said}: no size", "e.g. 4GB/token, the weights that a token reads")
        return SizeTarget(said, nbytes=number * _BYTES[unit], per_token=True)
    if context is None:
        if cache is not None:
            raise UsageError(f"--cache {cache}: of how many tokens", "e.g. --target 24GB@32k")
        if unit == "bpw":
            return SizeTarget(said, bits=number)
        return SizeTarget(said, nbytes=number * _BYTES[unit])
    if unit == "bpw":
        raise UsageError(f"{said}: bits per weight have no context", "e.g. 24GB@32k")
    tokens = quantities.tokens(context.strip(), f"{said}: context")
    try:
        load = Load(tokens, int(found["sequences"] or 1), devices=devices)
    except UsageError as error:
        raise UsageError(
            f"{said}: {error.message}", "e.g. 24GB@32k, or 24GB@8x32k for 8"
        ) from error
    load = load if cache is None else replace(load, cache=cache)
    return SizeTarget(said, nbytes=number * _BYTES[unit], load=load)


def scale_of(target: SizeTarget, planned: Planned) -> Scale:
    """Return what a target means in bytes of linears; the rest is as in a plan that gives them any scheme.

    Raises:
        UsageError: more tokens than the model has positions, or no such type of cache.
        InputError: a target of memory, and what the layers of the family keep is not declared.
    """
    linears = [*quantized_linears(planned.plan.tensors, planned.matched).values()]
    own: float = sum(one.stored_bytes for one in linears)
    if target.bits is not None:
        weights = sum(math.prod(one.shape) for one in linears)
        return Scale(target, target.bits, 0.0, weights / 8, lambda x, up: f"{_few(x, up)}bpw")
    if target.per_token:
        read = weight_traffic(planned.plan, planned.matched).step_bytes(1)
        share = expert_share(planned.matched, planned.plan.tensors)
        own = sum(one.stored_bytes * (share if one.expert >= 0 else 1) for one in linears)
        return Scale(target, target.nbytes, read - own, 1.0, lambda x, up: f"{_typed(x, up)}/token")
    if target.load is None:
        return Scale(target, target.nbytes, planned.plan.output_bytes - own, 1.0, _typed)
    found, load = in_use(target, planned), target.load

    def smallest(least: int) -> str:
        """Return what takes the memory, and the most tokens that it has room for."""
        held = round(found.traffic.held - own + least)
        small = replace(found, traffic=replace(found.traffic, held=held))
        tokens = small.on("", Card(target.nbytes, 0.0, 0.0, "")).largest_context
        return (
            f" (weights {size(small.weights_bytes)} or more, cache {size(small.cache_bytes)}, working"
            f" {size(small.activation_bytes())}, and {1 - MARGIN:.0%} spare)"
            f"{f'; as it is {tokens:,} tokens at most' if tokens else ''}"
        )

    return Scale(
        target,
        target.nbytes,
        (found.needed() - own / load.devices) / MARGIN,
        MARGIN * load.devices,
        lambda x, up: (
            f"{_typed(x, up)}@{'' if load.batch == 1 else f'{load.batch}x'}{load.context}"
        ),
        smallest,
    )


def memory_use(target: SizeTarget, planned: Planned) -> MemoryUse | None:
    """Return how a plan shares out the memory that it was made for; None for other targets. Errors as `scale_of`."""
    if target.load is None:
        return None
    found, usable = in_use(target, planned), MARGIN * target.nbytes
    kept, working = found.cache_bytes, found.activation_bytes()
    left = usable - found.needed()
    return MemoryUse(found.load, found.weights_bytes, kept, working, target.nbytes - usable, left)


def in_use(target: SizeTarget, planned: Planned) -> Capacity:
    """Return a plan under the load of a target of memory; errors as `scale_of`."""
    load, sizes = target.load, planned.matched.dimensions
    assert load is not None
    if sizes is not None and load.context > sizes.positions:
        raise UsageError(
            f"{target.text}: the model has {sizes.positions:,} positions",
            f"a context of {sizes.positions} tokens, or fewer",
        )
    try:
        return capacity(planned.plan, planned.matched, load)
    except InputError as error:
        raise InputError(f"{target.text}: {error.message}", "a target in bpw or bytes") from error


def _typed(nbytes: float, up: bool) -> str:
    """Return bytes in the largest unit below them."""
    power = max(0, min(len(UNITS) - 1, math.floor(math.log10(max(1.0, nbytes)) / 3)))
    return f"{_few(nbytes / 1000**power, up)}{UNITS[power]}"


def _few(value: float, up: bool) -> str:
    """Return a number in few digits, rounded up or down, so that it is within reach when it is typed."""
    step = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return f"{(math.ceil if up else math.floor)(value / step) * step:.{_DIGITS}g}"


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
        raise RefusedError(said, "a file of this model; --target 18GB takes any size")
    nbytes = sum(file.stat().st_size for file in opened.shards)
    return SizeTarget(f"--like {name} ({nbytes:,} bytes)", nbytes=nbytes)


def _shapes(opened: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name, of a quantized one as it is decoded."""
    headers = {name: entry.stored() for name, entry in opened.entries.items()}
    layouts = [*detect(opened.config).layouts(opened.config, headers)]
    packed = {name for layout in layouts for name in layout.stored}
    plain = {name: one.shape for name, one in headers.items() if name not in packed}
    return plain | {f"{layout.module}.weight": layout.shape for layout in layouts}


def _differences(theirs: Mapping[str, tuple[int, ...]], matched: Matched) -> Iterator[str]:
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


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
