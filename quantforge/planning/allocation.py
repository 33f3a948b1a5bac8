"""Allocation: the linears of a model in groups, the room that a target leaves them, and a choice for them as rules."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quantforge.errors import RefusedError
from quantforge.planning.budgets import Option, Point, curve, patterns_of, point_of
from quantforge.planning.guidance import guided
from quantforge.planning.planner import Planned
from quantforge.planning.size_target import MemoryUse, Scale
from quantforge.plans import EngineVerdict, TensorPlan
from quantforge.recipe import Recipe, Rule
from quantforge.results.significant import size

_ANY = "{}"


@dataclass(frozen=True, slots=True)
class Allocated:
    """Outcome of an allocation.

    Attributes:
        recipe: gives every linear its scheme.
        target: as it was asked for.
        nbytes: of all weight files of the result, as planned.
        bits: bits per weight inside of the blocks.
        nats: of divergence per token that the errors inside of blocks are expected to cause.
        groups: the linears of each group.
        chosen: of each group, its scheme.
        shares: weights that each scheme gets.
        uniform: bytes, bits and nats of each candidate alone, by its scheme.
        front: bytes and nats of the best choices from the least size to the most.
        left_out: candidates that the format does not hold or the engine does not load, and why.
        engines: which of them load what the recipe makes.
        memory: of a device, as a target of memory shares it out; None for other targets.
        least: for engines that do not load it, but mixtures of some candidates: the bits of the smallest of these.
    """

    recipe: Recipe
    target: str
    nbytes: int
    bits: float
    nats: float
    groups: tuple[tuple[str, ...], ...]
    chosen: tuple[str, ...]
    shares: Mapping[str, int]
    uniform: Mapping[str, tuple[int, float, float]]
    front: tuple[tuple[int, float], ...]
    left_out: Mapping[str, str]
    engines: tuple[EngineVerdict, ...]
    memory: MemoryUse | None = None
    least: Mapping[str, float] = field(default_factory=dict)

    def written(self) -> bytes:
        """Return the recipe as a file, behind a line on what it makes, in the figures that `quantize` ends with."""
        planned = f"{self.bits:.3f} bits per weight in blocks, files {size(self.nbytes)}"
        return f"# planned: {planned}\n\n{self.recipe.to_toml()}".encode()

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "target": self.target,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits,
            "nats": self.nats,
            "groups": [
                {"linears": linears, "scheme": scheme}
                for linears, scheme in zip(self.groups, self.chosen, strict=True)
            ],
            "uniform": [
                {"scheme": name, "bytes": size, "bits_per_weight": bits, "nats": nats}
                for name, (size, bits, nats) in self.uniform.items()
            ],
            "front": [{"bytes": size, "nats": nats} for size, nats in self.front],
            "left_out": dict(self.left_out),
            "engines": [asdict(verdict) for verdict in self.engines],
            "least_bits": dict(self.least),
            **({"memory": self.memory.document()} if self.memory else {}),
        }


def others(left_out: Mapping[str, str]) -> str:
    """Return the end of a sentence that names the candidates: which is none, and why."""
    if not left_out:
        return ""
    name, why = next(iter(left_out.items()))
    more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
    return f"; {name} is none: {why}{more}"


class Allocation:
    """Candidates for the linears of a model.

    Attributes:
        groups: the linears that get one scheme, by canonical name.
    """

    def __init__(
        self,
        plans: Mapping[str, Planned],
        *,
        together: bool,
        alike: bool = False,
        share: float = 1.0,
    ) -> None:
        """Take the candidates.

        Args:
            plans: of each candidate alone.
            together: linears of a shared input get one scheme, and so do all experts of a layer.
            alike: all experts of the model get one.
            share: of the bytes of experts that count.
        """
        self._share = share
        self._names, self._first = [*plans], next(iter(plans.values()))
        self._tables = [guided(one.plan.tensors, one.matched) for one in plans.values()]
        groups: dict[object, list[str]] = {}
        for name, tensor in self._tables[0].items():
            groups.setdefault(_group(name, tensor, together, alike), []).append(name)
        self.groups = tuple(tuple(names) for names in groups.values())
        self._fixed = self._first.plan.output_bytes - sum(
            one.stored_bytes for one in self._tables[0].values()
        )
        self._weights = sum(math.prod(one.shape) for one in self._tables[0].values())

    def every(self) -> Point:
        """Return a choice in which candidates take turns: what any mixture needs has a place in it."""
        turns = itertools.cycle(Option(name, 0, 0.0) for name in self._names)
        return Point(0.0, tuple(itertools.islice(turns, len(self.groups))))

    def room(self, scale: Scale, left_out: Mapping[str, str]) -> int:
        """Return the bytes that a target leaves for linears of blocks; ``left_out``: what is no candidate, and why.

        Raises:
            RefusedError: the target is below the smallest choice or above the largest.
        """
        sizes = [[self._counted(group, table) for table in self._tables] for group in self.groups]
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        if not least <= scale.room <= most:
            small = scale.room < least
            side = "below the smallest" if small else "above the largest"
            among = f"{', '.join(self._names)}{others(left_out)}"
            largest = max(zip(map(sum, zip(*sizes, strict=True)), self._names, strict=True))[1]
            more = scale.more(least) if small else f"; {largest} for all of it fits without a size"
            raise RefusedError(
                f"{scale.target.text}: it is {side} choice of the candidates {among}",
                f"{scale.reach(least, most)}{more}",
            )
        return scale.room

    def sizes(self, place: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each linear with its bytes and weights under the candidate at a place."""
        for name, tensor in self._tables[place].items():
            yield name, (tensor.stored_bytes, math.prod(tensor.shape))

    def options(self, nats: Mapping[str, Sequence[float]]) -> list[list[Option]]:
        """Return the options of each group; ``nats`` are those of each linear under each candidate."""
        return [
            [
                Option(
                    name,
                    self._counted(group, table),
                    math.fsum(nats[linear][place] for linear in group),
                )
                for place, (name, table) in enumerate(zip(self._names, self._tables, strict=True))
            ]
            for group in self.groups
        ]

    def outcome(self, point: Point, options: Sequence[Sequence[Option]]) -> dict[str, Any]:
        """Return the fields of `Allocated` that follow from a choice, without those of its plan and what was asked."""
        _, bits, nats = self._figures(point)
        uniform = {
            name: self._figures(point_of([one[place] for one in options]))
            for place, name in enumerate(self._names)
        }
        front = tuple(self._figures(one)[::2] for one in curve(options))
        return {
            "bits": bits, "nats": nats, "groups": self.groups, "shares": self._shares(point),
            "chosen": tuple(one.scheme for one in point.chosen), "uniform": uniform, "front": front,
        }  # fmt: skip

    def rules_of(self, point: Point) -> tuple[str, tuple[Rule, ...]]:
        """Return the scheme that most weights get, and rules for the other linears."""
        shares = self._shares(point)
        base = max(shares, key=lambda scheme: (shares[scheme], scheme))
        return base, self.rules(base, point)

    def rules(self, base: str, point: Point) -> tuple[Rule, ...]:
        """Return rules for the linears whose scheme is not ``base``."""
        schemes = {
            name: one.scheme
            for one, group in zip(point.chosen, self.groups, strict=True)
            for name in group
            if one.scheme != base
        }
        matched = self._first.matched
        blocks = {tensor.name.removesuffix(".weight"): tensor.block for tensor in matched.tensors}
        places = {}
        for name in schemes:
            block = matched.block_name(blocks[name])
            before, number = block[: block.rindex(".") + 1], block.rpartition(".")[2]
            behind = re.escape(_kind(name.removeprefix(block), self._tables[0][name].expert))
            behind = behind.replace(re.escape(_ANY), "[0-9]+")
            places[name] = (re.escape(before), number, behind)
        return tuple(Rule(*rule) for rule in patterns_of(schemes, places))

    def _shares(self, point: Point) -> dict[str, int]:
        """Return how many weights each scheme gets."""
        shares: dict[str, int] = {}
        for one, group in zip(point.chosen, self.groups, strict=True):
            count = sum(math.prod(self._tables[0][name].shape) for name in group)
            shares[one.scheme] = shares.get(one.scheme, 0) + count
        return shares

    def _counted(self, group: Sequence[str], table: Mapping[str, TensorPlan]) -> int:
        """Return the bytes that count of a group under a candidate."""
        kept = sum(table[name].stored_bytes for name in group if table[name].expert < 0)
        routed = sum(table[name].stored_bytes for name in group if table[name].expert >= 0)
        return kept + math.ceil(routed * self._share)

    def _figures(self, point: Point) -> tuple[int, float, float]:
        """Return the bytes of all weight files, bits per weight inside of blocks, and nats."""
        tables = dict(zip(self._names, self._tables, strict=True))
        chosen = zip(point.chosen, self.groups, strict=True)
        own = sum(tables[one.scheme][name].stored_bytes for one, group in chosen for name in group)
        return self._fixed + own, 8 * own / self._weights, point.nats


def _group(name: str, tensor: TensorPlan, together: bool, alike: bool) -> object:
    """Return what tells the linears that get one scheme: engines compute the experts of a layer in one product.

    A GGUF file holds each of their matrices in one tensor.
    """
    if tensor.expert >= 0:
        return -1 if alike else tensor.part, "" if together else _kind(name, tensor.expert)
    return (tensor.part, tensor.shared) if together and tensor.shared else name


def _kind(name: str, expert: int) -> str:
    """Return the name of a linear of an expert with `_ANY` for the number of the expert; others as they are."""
    before, number, behind = name.rpartition(f".{expert}.") if expert >= 0 else (name, "", "")
    return f"{before}.{_ANY}.{behind}" if number else name
