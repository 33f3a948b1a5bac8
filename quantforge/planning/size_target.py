"""Target sizes of mixed-precision allocation: parse a requested size and compute the bytes it leaves for the linears.

``3.5bpw`` counts the matrices inside the blocks, ``18GB`` all weight files. ``24GB@32k`` is the memory of a device that
has to hold the weights, the KV cache of one sequence of that many tokens (``24GB@8x32k``: of eight) and activations,
within the share of memory that `quantforge.planning.capacity` considers usable.
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
from quantforge.planning.capacity import USABLE_MEMORY_SHARE, Capacity, Load, capacity
from quantforge.planning.gpu_cards import Card
from quantforge.planning.gradient_options import quantized_linears
from quantforge.planning.planner import Planned
from quantforge.planning.recipe_options import RecipeOptions, RecipeSource, build_recipe
from quantforge.quantizers import GPTQ
from quantforge.recipe import Recipe

_OTHER_EXAMPLES = "18GB, 17GiB, or of a device's memory 24GB@32k"
_BYTE_UNITS = {unit.lower(): size for unit, size in typed_quantities.BYTES.items()}
_SIZE_PATTERN = re.compile(
    rf"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>bpw|{'|'.join(_BYTE_UNITS)})(?:@(?:(?P<sequences>[1-9][0-9]*)x(?=.))?(?P<context>.*))?",
    re.IGNORECASE,
)
_MAX_BYTES = 1e18  # bytes
_MAX_BITS = 16  # a bare number below this is taken as bits per weight
_SIGNIFICANT_DIGITS = 4  # of sizes in hints


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """A requested size: a target as it was typed, or a model whose size is to be matched.

    Attributes:
        target, like: the target or the path of the model; the other one is None.
        candidates: schemes to choose from; if empty, those of the usual widths that the format can store.
        recipe: the recipe, without a bit width.
    """

    target: str | None
    like: str | Path | None
    candidates: str | Sequence[str]
    recipe: Recipe

    @property
    def text(self) -> str:
        """Return the requested size as it was typed."""
        return str(self.target or self.like)


def size_request(
    target: str | None, like: str | Path | None, candidates: str | Sequence[str], recipe: RecipeSource,
    options: RecipeOptions,
) -> SizeRequest:  # fmt: skip
    """Return the requested size and the recipe that goes with it.

    Raises:
        UsageError: candidates without a size, two sizes, or a width, method or effort in addition to a size.
    """
    if target is None and like is None:
        raise UsageError("--candidates: chosen among for which size", "add --target 3.5bpw")
    if target is not None and like is not None:
        raise UsageError(
            "two sizes are asked for: --target and --like",
            "give one: --target 3.5bpw, or --like FILE.gguf",
        )
    # The engine's default scheme does not apply: the size decides the schemes.
    engine = options.pop("engine", None)
    devices = None if engine is None else options.pop("tensor_parallel", None)
    request_recipe = build_recipe(recipe, **options)
    if engine is not None:
        request_recipe = replace(
            request_recipe, engine=engine, tensor_parallel=devices or request_recipe.tensor_parallel
        )
        target_of(engine)
    _check_no_width(request_recipe)
    return SizeRequest(target, like, candidates, replace(request_recipe, method=GPTQ))


def _check_no_width(recipe: Recipe) -> None:
    """Refuse options that the target size decides, or under which errors are not measured."""
    default_effort = Recipe().effort
    if recipe.method not in {"", GPTQ}:
        raise UsageError(
            f"--method {recipe.method}: errors are measured of {GPTQ} alone",
            "leave --method out",
        )
    if recipe.bits or recipe.scheme or recipe.type or recipe.rules:
        raise UsageError(
            "a width, a type or rules are given, and the size decides on them",
            "name --candidates instead, or leave the size out",
        )
    if recipe.guided_hessians:
        raise UsageError(
            f"--guided-hessians {recipe.guided_hessians}: errors are measured without it",
            "leave it out",
        )
    if recipe.effort != default_effort:
        raise UsageError(
            f"--effort {recipe.effort}: errors are measured at {default_effort}",
            "remove `effort` from the recipe, or the option; `quantforge allocate` writes a recipe, then"
            f" `quantforge quantize --recipe FILE --effort {recipe.effort}`",
        )


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """A parsed target size.

    Attributes:
        text: the size as it was typed, with its option.
        bits: bits per weight of the matrices inside the blocks; None if the target is in bytes.
        nbytes: bytes of all weight files, or of each device's memory if there is a load.
        load: the serving load that the memory is for; None if the target is not memory.
    """

    text: str
    bits: float | None = None
    nbytes: float = 0.0
    load: Load | None = None

    @property
    def of_files(self) -> bool:
        """Return whether the target is the total size of all weight files."""
        return self.bits is None and self.load is None


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """A target size converted to bytes of the linears inside the blocks.

    Attributes:
        target: the target, in bits per weight or in bytes.
        other: what everything but the linears takes, in the unit of the target.
        bytes_per_unit: bytes of linears per unit of the target.
        other_memory: for a target of memory, the memory used under its load without the linears; None for other
            targets.
    """

    target: SizeTarget
    other: float
    bytes_per_unit: float
    other_memory: Capacity | None = None

    @property
    def linear_bytes(self) -> int:
        """Return the bytes that the target leaves for the linears; negative if the rest takes more than the target."""
        return math.floor(
            ((self.target.bits or self.target.nbytes) - self.other) * self.bytes_per_unit
        )

    def possible_range(self, min_bytes: int, max_bytes: int) -> str:
        """Return the range of sizes that can be requested, given the fewest and most bytes of linears."""
        low, high = (self.other + nbytes / self.bytes_per_unit for nbytes in (min_bytes, max_bytes))
        return f"from {self._format_size(low, math.ceil)} to {self._format_size(high, math.floor)}"

    def _format_size(self, value: float, rounding: Callable[[float], int]) -> str:
        """Return a size as a user would type it, rounded so that it stays within the possible range."""
        unit, load = "bpw", self.target.load
        if self.target.bits is None:
            power = max(0, min(len(UNITS) - 1, math.floor(math.log10(max(1.0, value)) / 3)))
            value, unit = value / 1000**power, UNITS[power]
        step = 10.0 ** (math.floor(math.log10(value)) - _SIGNIFICANT_DIGITS + 1)
        sequences = "" if load is None or load.batch == 1 else f"{load.batch}x"
        context_suffix = f"@{sequences}{load.context}" if load else ""
        return f"{rounding(value / step) * step:.{_SIGNIFICANT_DIGITS}g}{unit}{context_suffix}"

    def memory_parts(self, linears: int) -> str:
        """Return a text on what takes the memory if the linears take ``linears`` bytes, and the largest context."""
        if self.other_memory is None:
            return ""
        traffic = self.other_memory.traffic
        used_memory = replace(
            self.other_memory, traffic=replace(traffic, held=traffic.held + linears)
        )
        tokens = used_memory.on_card("", Card(self.target.nbytes, 0.0, 0.0, "")).largest_context
        return (
            f" (weights {size(used_memory.weights_bytes)} or more, cache {size(used_memory.cache_bytes)}, working"
            f" {size(used_memory.activation_bytes())}, and {1 - USABLE_MEMORY_SHARE:.0%} spare)"
            f"{f'; as it is {tokens:,} tokens at most' if tokens else ''}"
        )


def parse_target(text: str, cache: str | None = None, devices: int = 1) -> SizeTarget:
    """Parse a target size: ``3.5bpw``, ``18GB`` or ``17GiB`` (of all weight files), ``24GB@32k`` or ``24GB@8x32k``.

    Args:
        text: the size as it was typed.
        cache: type of the KV cache, for a target of memory.
        devices: number of tensor-parallel devices, for a target of memory.

    Raises:
        UsageError: it is none of these, not above 0, or a type of cache is given without a context.
    """
    option = f"--target {text}"
    match = _SIZE_PATTERN.fullmatch(text.strip())
    number = float(match["number"]) if match else 0.0
    if match is None or not 0 < number * _BYTE_UNITS.get(match["unit"].lower(), 1.0) <= _MAX_BYTES:
        bare_number = re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip())
        bits = text.strip() if bare_number and 0 < float(text) < _MAX_BITS else "4.5"
        raise UsageError(f"{option}: no size", f"e.g. {bits}bpw, {_OTHER_EXAMPLES}")
    unit, context = match["unit"].lower(), match["context"]
    if context is None:
        if cache is not None:
            raise UsageError(f"--cache {cache}: of how many tokens", "e.g. --target 24GB@32k")
        if unit == "bpw":
            return SizeTarget(option, bits=number)
        return SizeTarget(option, nbytes=number * _BYTE_UNITS[unit])
    if unit == "bpw":
        raise UsageError(f"{option}: bits per weight have no context", "e.g. 24GB@32k")
    tokens = typed_quantities.tokens(context.strip(), f"{option}: context")
    try:
        load = Load(tokens, int(match["sequences"] or 1), devices=devices)
    except UsageError as error:
        raise UsageError(
            f"{option}: {error.message}", "e.g. 24GB@32k, or 24GB@8x32k for 8"
        ) from error
    load = load if cache is None else replace(load, cache=cache)
    return SizeTarget(option, nbytes=number * _BYTE_UNITS[unit], load=load)


def size_budget(target: SizeTarget, planned: Planned) -> SizeBudget:
    """Convert a target size to bytes of linears; the rest is taken from a plan that gives the linears any scheme.

    Raises:
        UsageError: the context exceeds the model's maximum position, or there is no such type of cache.
        InputError: the target is memory, and what the layers of the family cache is not declared.
    """
    linears = quantized_linears(planned.plan.tensors, planned.model_layout).values()
    planned_bytes = sum(linear.output_bytes for linear in linears)
    if target.bits is not None:
        return SizeBudget(target, 0.0, sum(math.prod(linear.shape) for linear in linears) / 8)
    if target.load is None:
        return SizeBudget(target, planned.plan.output_bytes - planned_bytes, 1.0)
    used_memory = capacity_under_target(target, planned)
    other_memory = replace(
        used_memory,
        traffic=replace(used_memory.traffic, held=used_memory.traffic.held - planned_bytes),
    )
    return SizeBudget(
        target,
        other_memory.needed_bytes() / USABLE_MEMORY_SHARE,
        USABLE_MEMORY_SHARE * target.load.devices,
        other_memory,
    )


def capacity_under_target(target: SizeTarget, planned: Planned) -> Capacity:
    """Return the capacity of a plan under the load of a memory target; errors as `size_budget`."""
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


def size_like(other: Checkpoint, model_layout: ModelLayout) -> SizeTarget:
    """Return the target size of a model to match: the bytes of its weight files.

    Args:
        other: the model to match.
        model_layout: the model that is quantized.

    Raises:
        RefusedError: it is another model; the message names the first tensor that differs.
        InputError: its format cannot be read.
    """
    name, _ = source_name(other.path)
    difference = next(_differences(_decoded_shapes(other), model_layout), None)
    if difference:
        message = f"--like {name}: it is another model: {difference}"
        raise RefusedError(message, "a file of this model; --target 18GB takes any size")
    nbytes = sum(file.stat().st_size for file in other.shards)
    return SizeTarget(f"--like {name} ({nbytes:,} bytes)", nbytes=nbytes)


def _decoded_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by name, those of quantized matrices as decoded."""
    headers = {name: entry.to_stored_tensor() for name, entry in checkpoint.entries.items()}
    layouts = [*detect_format(checkpoint.config).find_layouts(checkpoint.config, headers)]
    packed = {name for layout in layouts for name in layout.tensor_names}
    unpacked_shapes = {name: header.shape for name, header in headers.items() if name not in packed}
    return unpacked_shapes | {f"{layout.module}.weight": layout.shape for layout in layouts}


def _differences(
    other_shapes: Mapping[str, tuple[int, ...]], model_layout: ModelLayout
) -> Iterator[str]:
    """Yield differences in matrices of the blocks and the embedding; a tied head may be stored or not."""
    known_names: set[str] = set()
    for tensor in model_layout.tensors:
        header, names = tensor.header, (tensor.header.name, tensor.name)
        known_names |= {*names}
        in_block = tensor.role is Role.LINEAR and tensor.block >= 0
        if not in_block and tensor.role is not Role.EMBEDDING:
            continue
        shape_there = next((other_shapes[name] for name in names if name in other_shapes), None)
        if shape_there is None:
            yield f"it has no {header.name}"
        elif sorted(shape_there) != sorted(header.shape):  # either way round
            yield f"{header.name} is {_shape_text(shape_there)} there and {_shape_text(header.shape)} here"
    for name, shape in other_shapes.items():
        if (
            name not in known_names
            and len(shape) > 1
            and any(name_part.isdigit() for name_part in name.split("."))
        ):
            yield f"{name} ({_shape_text(shape)}) is not in this one"


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
