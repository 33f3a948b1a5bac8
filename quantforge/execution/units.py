"""Units of work: the parts of a run that are finished and journaled one at a time (blocks, experts, head, tuning).

A unit writes a set of tensors. It is done when its line is in the journal; an interrupted unit is done again from the
start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantforge.errors import UsageError, off_option
from quantforge.plans import Action, Plan, StoredTensor, TensorPlan
from quantforge.quantizers.tuning import whole_model_epochs

OUTSIDE_BLOCKS, GUIDE, HEAD, TUNE, EXPERT = "outer", "token weights", "head", "tune", " expert "
COPY_COST = 0.02  # time to copy a weight, relative to rounding it


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work.

    Attributes:
        name: name of the unit in the journal.
        tensors: planned tensors that the unit rounds or copies.
        nested_units: names of expert units that are claimed together with this one in a shared run.
    """

    name: str
    tensors: tuple[TensorPlan, ...]
    nested_units: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[StoredTensor, ...]:
        """Return the stored tensors that the unit writes."""
        return tuple(output for tensor in self.tensors for output in tensor.outputs)


def block_unit(index: int) -> str:
    """Return the name of the unit that writes a block."""
    return f"block {index}"


def expert_unit(index: int, expert: int) -> str:
    """Return the name of the unit that writes one expert of a block in a calibrated run."""
    return f"{block_unit(index)}{EXPERT}{expert}"


def tune_unit(index: int) -> str:
    """Return the name of the unit that tunes a block."""
    return f"{TUNE} {block_unit(index)}"


def unit_name_of(tensor: TensorPlan, plan: Plan) -> str:
    """Return the name of the unit that writes a tensor of a plan."""
    if tensor.name in plan.tensors_after_blocks:
        return HEAD
    if tensor.expert >= 0 and plan.needs:
        return expert_unit(tensor.block, tensor.expert)
    return OUTSIDE_BLOCKS if tensor.block < 0 else block_unit(tensor.block)


def list_units(plan: Plan, blocks: int) -> tuple[Unit, ...]:
    """Return the units of a plan in order: tensors outside of the blocks, the blocks, then the head.

    Weights of tokens for guided statistics are computed before the blocks; tuning units come last. In a calibrated run
    each expert is a unit of its own.
    """
    experts: dict[int, set[int]] = {}
    for tensor in plan.tensors if plan.needs else ():
        if tensor.expert >= 0:
            experts.setdefault(tensor.block, set()).add(tensor.expert)
    names = [OUTSIDE_BLOCKS, *([GUIDE] if plan.guided_hessians else [])]
    for index in range(blocks):
        names += [expert_unit(index, number) for number in sorted(experts.get(index, ()))]
        names.append(block_unit(index))
    names.append(HEAD)
    if plan.tune:
        names += [tune_unit(index) for index in range(blocks)]
        names += [TUNE] if whole_model_epochs(plan.tune) else []
    tensors: dict[str, list[TensorPlan]] = {name: [] for name in names}
    for tensor in plan.tensors:
        tensors[unit_name_of(tensor, plan)].append(tensor)
    return tuple(Unit(name, tuple(tensors[name])) for name in names)


def claimable_units(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Return the units that processes of a shared run claim, in order: expert units are merged into their block.

    Tuning units are not claimed: the process that assembles the result does them.
    """
    tensors: list[TensorPlan] = []
    nested_units: list[str] = []
    claimable = []
    for unit in units:
        if unit.name.startswith(TUNE):
            continue
        tensors += unit.tensors
        if EXPERT in unit.name:
            nested_units.append(unit.name)
            continue
        claimable.append(replace(unit, tensors=tuple(tensors), nested_units=tuple(nested_units)))
        tensors, nested_units = [], []
    return tuple(claimable)


def work_shares(units: Iterable[Unit]) -> dict[str, float]:
    """Estimate each unit's share of the total work from the number of weights; experts count toward their block."""
    shares: dict[str, float] = {}
    for unit in units:
        name = unit.name.partition(EXPERT)[0]
        operations = sum(
            math.prod(tensor.shape) * (1.0 if tensor.action is Action.QUANTIZE else COPY_COST)
            for tensor in unit.tensors
        )
        shares[name] = shares.get(name, 0.0) + operations
    if GUIDE in shares:  # a forward and a backward pass take about as long as everything else
        shares[GUIDE] = sum(shares.values())
    if tuned := [name for name in shares if name.startswith(TUNE)]:
        tuning_work = 2 * sum(shares.values()) / len(tuned)  # measured where rounding is fast
        shares |= dict.fromkeys(tuned, tuning_work)
    total_work = sum(shares.values()) or 1.0
    return {name: operations / total_work for name, operations in shares.items()}


def check_shareable(
    plan: Plan, *, overwrite: bool, prunes_experts: bool, torchrun: bool, replayed: bool
) -> None:
    """Refuse a run that several processes cannot share.

    Args:
        plan: plan of the run.
        overwrite: whether an existing result is to be replaced.
        prunes_experts: whether experts are removed by their saliency on calibration rows.
        torchrun: whether the processes are ranks of torchrun, which pass on hidden states from block to block.
        replayed: whether blocks of the family take more inputs than hidden states, see `Architecture`.

    Raises:
        UsageError: a unit depends on the work of another process, or an existing result would be replaced.
    """
    calibrated = bool(plan.needs)
    alone = "use one process, without --join and torchrun"
    reasons = {
        "calibration rows pass its blocks one after the other":
            (calibrated and not torchrun, "start torchrun -m quantforge, use one process, or --calibration none"),
        "blocks of this family pass on more than hidden states": (calibrated and replayed, alone),
        "the weights of tokens for --guided-hessians are made in one process":
            (plan.guided_hessians, f"{alone}; or {off_option('--guided-hessians')}"),
        "--prune-experts is calibrated here, in one process": (prunes_experts, alone),
    }  # fmt: skip
    for reason, (applies, hint) in reasons.items():
        if applies:
            raise UsageError(f"a run that processes share (--join, torchrun): {reason}", hint)
    check_new_output(overwrite=overwrite)


def check_new_output(*, overwrite: bool) -> None:
    """Refuse to overwrite an existing result in a shared run.

    Raises:
        UsageError: ``overwrite`` is true.
    """
    if overwrite:
        raise UsageError(
            "--overwrite, and processes that share the work: one that begins late would replace what the others made",
            "write to a new directory, or remove the earlier result first",
        )
