"""Units of work: the list that a run works off.

Each has tensors that it writes and, when it is done, a line in the journal. It is done whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantforge.errors import UsageError, without
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan
from quantforge.quantizers.tuning import whole_epochs

OUTER, GUIDE, HEAD, TUNE, EXPERT = "outer", "guide", "head", "tune", " expert "
COPYING = 0.02  # of the time that rounding takes


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work.

    Attributes:
        name: in the journal.
        tensors: what it reads of the source, and rounds or copies.
        inside: names of those that go with it, where processes claim units.
    """

    name: str
    tensors: tuple[TensorPlan, ...]
    inside: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[StoredTensor, ...]:
        """Return the tensors that it writes."""
        return tuple(output for tensor in self.tensors for output in tensor.outputs)


def block_unit(index: int) -> str:
    """Return the name of the unit of a block."""
    return f"block {index}"


def expert_unit(index: int, expert: int) -> str:
    """Return the name of the unit of one expert of a block, in a calibrated run."""
    return f"{block_unit(index)}{EXPERT}{expert}"


def tune_unit(index: int) -> str:
    """Return the name of the unit that tunes a block."""
    return f"{TUNE} {block_unit(index)}"


def unit_of(tensor: TensorPlan, plan: Plan) -> str:
    """Return the name of the unit that writes a tensor of a plan."""
    if tensor.name in plan.late:
        return HEAD
    if tensor.expert >= 0 and plan.needs:
        return expert_unit(tensor.block, tensor.expert)
    return OUTER if tensor.block < 0 else block_unit(tensor.block)


def units_of(plan: Plan, blocks: int) -> tuple[Unit, ...]:
    """Return the units of a plan in order: what is outside of the blocks, the blocks, what is rounded after them.

    Weights of tokens for guided statistics are made before the blocks; what is tuned comes last.

    A block of a calibrated run reads what the one before it has computed, and its experts are units of their own.
    """
    experts: dict[int, set[int]] = {}
    for tensor in plan.tensors if plan.needs else ():
        if tensor.expert >= 0:
            experts.setdefault(tensor.block, set()).add(tensor.expert)
    names = [OUTER, *([GUIDE] if plan.guide else [])]
    for index in range(blocks):
        names += [expert_unit(index, number) for number in sorted(experts.get(index, ()))]
        names.append(block_unit(index))
    names.append(HEAD)
    if plan.tune:
        names += [tune_unit(index) for index in range(blocks)]
        names += [TUNE] if whole_epochs(plan.tune) else []
    tensors: dict[str, list[TensorPlan]] = {name: [] for name in names}
    for tensor in plan.tensors:
        tensors[unit_of(tensor, plan)].append(tensor)
    return tuple(Unit(name, tuple(tensors[name])) for name in names)


def claimed_units(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Return the units that processes claim, in order: those of a run, but that experts go with their block.

    Nobody claims what is tuned: whoever puts the result together does that.
    """
    tensors: list[TensorPlan] = []
    inside: list[str] = []
    found = []
    for unit in units:
        if unit.name.startswith(TUNE):
            continue
        tensors += unit.tensors
        if EXPERT in unit.name:
            inside.append(unit.name)
            continue
        found.append(replace(unit, tensors=tuple(tensors), inside=tuple(inside)))
        tensors, inside = [], []
    return tuple(found)


def shares_of(units: Iterable[Unit]) -> dict[str, float]:
    """Estimate each unit's share of the work by the weights that it rounds; experts count with their block."""
    found: dict[str, float] = {}
    for unit in units:
        name = unit.name.partition(EXPERT)[0]
        work = sum(
            math.prod(tensor.shape) * (1.0 if tensor.action is Action.QUANTIZE else COPYING)
            for tensor in unit.tensors
        )
        found[name] = found.get(name, 0.0) + work
    if GUIDE in found:  # a forward and a backward pass: about as long as all the rest
        found[GUIDE] = sum(found.values())
    if tuned := [name for name in found if name.startswith(TUNE)]:
        each = 2 * sum(found.values()) / len(tuned)  # where rounding is fast
        found |= dict.fromkeys(tuned, each)
    whole = sum(found.values()) or 1.0
    return {name: work / whole for name, work in found.items()}


def check_shareable(
    plan: Plan, *, overwrite: bool, prunes: bool, torchrun: bool, replayed: bool
) -> None:
    """Refuse a run that several processes cannot share.

    Args:
        plan: of the run.
        overwrite: whether an earlier result is to be replaced.
        prunes: whether experts are removed by what they do on a text.
        torchrun: whether the processes are its ranks, which hand on hidden states from block to block.
        replayed: whether blocks of the family get more than hidden states, see `Architecture`.

    Raises:
        UsageError: a part reads what another worker makes, or the result would replace an earlier one.
    """
    calibrated = bool(plan.needs)
    alone = "use one process, without --join and torchrun"
    reasons = {
        "calibration rows pass its blocks one after the other":
            (calibrated and not torchrun, "start torchrun -m quantforge, use one process, or --calibration none"),
        "blocks of this family pass on more than hidden states": (calibrated and replayed, alone),
        "the weights of tokens for --guide are made in one process":
            (plan.guide, f"{alone}; or {without('--guide')}"),
        "--prune-experts is calibrated here, in one process": (prunes, alone),
    }  # fmt: skip
    for reason, (holds, hint) in reasons.items():
        if holds:
            raise UsageError(f"a run that processes share (--join, torchrun): {reason}", hint)
    check_new_output(overwrite=overwrite)


def check_new_output(*, overwrite: bool) -> None:
    """Refuse to overwrite an earlier result in a shared run.

    Raises:
        UsageError: that is asked for.
    """
    if overwrite:
        raise UsageError(
            "--overwrite, and processes that share the work: one that begins late would replace what the others made",
            "write to a new directory, or remove the earlier result first",
        )
