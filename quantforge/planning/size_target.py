"""Target of an allocation: a size as it is asked for, and what it leaves for the linears of the blocks.

``3.5bpw`` counts the matrices inside of blocks, ``18GB`` all weight files. ``24GB@32k`` is the memory of a device that
has to hold the weights, the cache of a sequence of so many tokens (``24GB@8x32k``: of eight) and what a step works in,
all of it in the share of the memory in which `quantforge.planning.capacity` says that a result fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantforge.architectures.match import ModelLayout, Role
from quantforge.artifacts.number_text import UNITS, size
from quantforge.engines import target_of
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.hub import source_name
from quantforge.files.reader import Checkpoint
from quantforge.formats import detect_format
from quantforge.planning import typed_quantities
from quantforge.planning.capacity import MARGIN, Capacity, Load, capacity
from quantforge.planning.gpu_cards import Card
from quantforge.planning.gradient_options import quantized_linears
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe

_OTHERS = "18GB, 17GiB, or of a device's memory 24GB@32k"
_BYTES = {unit.lower(): size for unit, size in typed_quantities.BYTES.items()}
_SIZE = re.compile(
    rf"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>bpw|{'|'.join(_BYTES)})(?:@(?:(?P<sequences>[1-9][0-9]*)x(?=.))?(?P<context>.*))?",
    re.IGNORECASE,
)
_MOST = 1e18  # bytes
_WIDEST = 16  # bits: a bare number below is meant as such
_DIGITS = 4  # of a size that a message says to type


@dataclass(frozen=True, slots=True)
class AskedSize:
    """A size that is asked for: a target as it is typed, or a file that is to be matched.

    Attributes:
        target, like: one of these.
        candidates: schemes to choose from; those that the format holds in usual widths where there are none.
        recipe: what is wanted beside the size, without a width.
    """

    target: str | None
    like: str | Path | None
    candidates: str | Sequence[str]
    recipe: Recipe

    @property
    def text(self) -> str:
        """Return the size as it was asked for."""
        return str(self.target or self.like)


def asked_size(
    target: str | None, like: str | Path | None, candidates: str | Sequence[str], recipe: RecipeSource,
    options: RecipeOptions,
) -> AskedSize:  # fmt: skip
    """Return the size that is asked for beside a recipe.

    Raises:
        UsageError: candidates without a size, two sizes, or a width, a method or an effort beside one.
    """
    if target is None and like is None:
        raise UsageError("--candidates: chosen among for which size", "add --target 3.5bpw")
    if target is not None and like is not None:
        raise UsageError(
            "two sizes are asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    # What an engine is fast with in one width is not meant here.
    engine = options.pop("engine", None)
    devices = None if engine is None else options.pop("tensor_parallel", None)
    wanted = build_recipe(recipe, **options)
    if engine is not None:
        wanted = replace(wanted, engine=engine, tensor_parallel=devices or wanted.tensor_parallel)
        target_of(engine)
    _check_width_open(wanted)
    return AskedSize(target, like, candidates, replace(wanted, method=GPTQ))


def _check_width_open(wanted: Recipe) -> None:
    """Refuse choices that the size decides on, or with which errors are not measured."""
    usual = Recipe().effort
    if wanted.method not in {"", GPTQ}:
        raise UsageError(
            f"--method {wanted.method}: errors are measured of {GPTQ} alone",
            "leave --method out",
        )
    if wanted.bits or wanted.scheme or wanted.type or wanted.rules:
        raise UsageError(
            "a width, a type or rules are given, and the size decides on them",
            "name --candidates instead, or leave the size out",
        )
    if wanted.guide:
        raise UsageError(f"--guide {wanted.guide}: errors are measured without it", "leave it out")
    if wanted.effort != usual:
        raise UsageError(
            f"--effort {wanted.effort}: errors are measured at {usual}",
            "remove `effort` from the recipe, or the option; `quantforge allocate` writes a recipe, then"
            f" `quantforge quantize --recipe FILE --effort {wanted.effort}`",
        )


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """Size that is asked for.

    Attributes:
        text: as it was typed, with its option.
        bits: per weight of the matrices inside of blocks; None where bytes are meant.
        nbytes: of all weight files, or with a load of the memory of every device.
        load: what the memory is for; None where it is not memory.
    """

    text: str
    bits: float | None = None
    nbytes: float = 0.0
    load: Load | None = None

    @property
    def of_files(self) -> bool:
        """Return whether bytes of all weight files are meant."""
        return self.bits is None and self.load is None


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """A target against bytes of the linears of blocks.

    Attributes:
        target: what is asked for, in bits per weight or in bytes.
        other: what is taken beside the linears, in that unit.
        rate: bytes of linears for each unit.
        rest: what is in use under the load of a target of memory, without the linears; None for other targets.
    """

    target: SizeTarget
    other: float
    rate: float
    rest: Capacity | None = None

    @property
    def room(self) -> int:
        """Return the bytes that the target leaves for the linears; negative where the rest takes more."""
        return math.floor(((self.target.bits or self.target.nbytes) - self.other) * self.rate)

    def reach(self, least: int, most: int) -> str:
        """Return what can be asked for, by the bytes of linears that the candidates reach."""
        low, high = (self.other + nbytes / self.rate for nbytes in (least, most))
        return f"from {self._typed(low, math.ceil)} to {self._typed(high, math.floor)}"

    def _typed(self, value: float, rounded: Callable[[float], int]) -> str:
        """Return a size as it would be typed, in few digits, rounded so that it is within reach."""
        unit, load = "bpw", self.target.load
        if self.target.bits is None:
            power = max(0, min(len(UNITS) - 1, math.floor(math.log10(max(1.0, value)) / 3)))
            value, unit = value / 1000**power, UNITS[power]
        step = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
        sequences = "" if load is None or load.batch == 1 else f"{load.batch}x"
        at = f"@{sequences}{load.context}" if load else ""
        return f"{rounded(value / step) * step:.{_DIGITS}g}{unit}{at}"

    def memory_parts(self, linears: int) -> str:
        """Return what takes the memory with so many bytes of linears, and the most tokens that it has room for."""
        if self.rest is None:
            return ""
        traffic = self.rest.traffic
        use = replace(self.rest, traffic=replace(traffic, held=traffic.held + linears))
        tokens = use.on("", Card(self.target.nbytes, 0.0, 0.0, "")).largest_context
        return (
            f" (weights {size(use.weights_bytes)} or more, cache {size(use.cache_bytes)}, working"
            f" {size(use.activation_bytes())}, and {1 - MARGIN:.0%} spare)"
            f"{f'; as it is {tokens:,} tokens at most' if tokens else ''}"
        )


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
    if context is None:
        if cache is not None:
            raise UsageError(f"--cache {cache}: of how many tokens", "e.g. --target 24GB@32k")
        if unit == "bpw":
            return SizeTarget(said, bits=number)
        return SizeTarget(said, nbytes=number * _BYTES[unit])
    if unit == "bpw":
        raise UsageError(f"{said}: bits per weight have no context", "e.g. 24GB@32k")
    tokens = typed_quantities.tokens(context.strip(), f"{said}: context")
    try:
        load = Load(tokens, int(found["sequences"] or 1), devices=devices)
    except UsageError as error:
        raise UsageError(
            f"{said}: {error.message}", "e.g. 24GB@32k, or 24GB@8x32k for 8"
        ) from error
    load = load if cache is None else replace(load, cache=cache)
    return SizeTarget(said, nbytes=number * _BYTES[unit], load=load)


def budget_of(target: SizeTarget, planned: Planned) -> SizeBudget:
    """Return what a target means in bytes of linears; the rest is as in a plan that gives them any scheme.

    Raises:
        UsageError: more tokens than the model has positions, or no such type of cache.
        InputError: a target of memory, and what the layers of the family keep is not declared.
    """
    linears = quantized_linears(planned.plan.tensors, planned.model_layout).values()
    own = sum(one.output_bytes for one in linears)
    if target.bits is not None:
        return SizeBudget(target, 0.0, sum(math.prod(one.shape) for one in linears) / 8)
    if target.load is None:
        return SizeBudget(target, planned.plan.output_bytes - own, 1.0)
    found = capacity_at_load(target, planned)
    rest = replace(found, traffic=replace(found.traffic, held=found.traffic.held - own))
    return SizeBudget(target, rest.needed() / MARGIN, MARGIN * target.load.devices, rest)


def capacity_at_load(target: SizeTarget, planned: Planned) -> Capacity:
    """Return a plan under the load of a target of memory; errors as `budget_of`."""
    load, sizes = target.load, planned.model_layout.dimensions
    assert load is not None
    if sizes is not None and load.context > sizes.positions:
        raise UsageError(
            f"{target.text}: the model has {sizes.positions:,} positions",
            f"a context of {sizes.positions} tokens, or fewer",
        )
    try:
        return capacity(planned.plan, planned.model_layout, load)
    except InputError as error:
        raise InputError(f"{target.text}: {error.message}", "a target in bpw or bytes") from error


def size_like(opened: Checkpoint, model_layout: ModelLayout) -> SizeTarget:
    """Return the bytes of the weight files of somebody's model.

    Args:
        opened: theirs.
        model_layout: the model that is to be as large.

    Raises:
        RefusedError: it is of another model; the message names the first tensor that differs.
        InputError: its format is not read.
    """
    name, _ = source_name(opened.path)
    different = next(_differences(_shapes(opened), model_layout), None)
    if different:
        said = f"--like {name}: it is another model: {different}"
        raise RefusedError(said, "a file of this model; --target 18GB takes any size")
    nbytes = sum(file.stat().st_size for file in opened.shards)
    return SizeTarget(f"--like {name} ({nbytes:,} bytes)", nbytes=nbytes)


def _shapes(opened: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name, of a quantized one as it is decoded."""
    headers = {name: entry.header() for name, entry in opened.entries.items()}
    layouts = [*detect_format(opened.config).find_layouts(opened.config, headers)]
    packed = {name for layout in layouts for name in layout.tensor_names}
    plain = {name: one.shape for name, one in headers.items() if name not in packed}
    return plain | {f"{layout.module}.weight": layout.shape for layout in layouts}


def _differences(theirs: Mapping[str, tuple[int, ...]], model_layout: ModelLayout) -> Iterator[str]:
    """Yield in what matrices differ: those of the blocks and the embedding. A head that is tied may be there or not."""
    ours: set[str] = set()
    for tensor in model_layout.tensors:
        header, names = tensor.header, (tensor.header.name, tensor.name)
        ours |= {*names}
        block = tensor.role is Role.LINEAR and tensor.block >= 0
        if not block and tensor.role is not Role.EMBEDDING:
            continue
        found = next((theirs[name] for name in names if name in theirs), None)
        if found is None:
            yield f"it has no {header.name}"
        elif sorted(found) != sorted(header.shape):  # either way round
            yield f"{header.name} is {_shown(found)} there and {_shown(header.shape)} here"
    for name, shape in theirs.items():
        if name not in ours and len(shape) > 1 and any(part.isdigit() for part in name.split(".")):
            yield f"{name} ({_shown(shape)}) is not in this one"


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
