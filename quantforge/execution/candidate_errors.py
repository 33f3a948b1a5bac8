"""Errors of candidate schemes: what each would cost at the output of the model, linear by linear, in nats per token.

To second order the divergence that an error ``E`` of a weight causes is ``1/2 sum_t g_t^T E x_t x_t^T E^T g_t``, with
``x`` the input of the linear and ``g`` the gradient of its output (`quantforge.model.backward`). With the mean square
of the gradient over the rows in place of each row's own, that is ``1/2 tr(E H E^T)`` under the guided Hessian ``H``.
The weights are rounded by the solver that will round them in the run, under the plain Hessian and with one
factorization for all candidates; nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.execution.guide import FILE, check_weights, observe_gradients
from quantforge.execution.passing_rows import stream_of
from quantforge.execution.progress import phase, tell
from quantforge.model.block import Weighed
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.token_weights import TokenWeights
from quantforge.numerics.allocator import trim
from quantforge.planning.guidance import guided
from quantforge.quantizers import rounder_of

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.execution.journal import Workspace
    from quantforge.execution.record import Record
    from quantforge.model.block import BlockPart
    from quantforge.planning.planner import Planned
    from quantforge.quantizers.methods import Rounder
    from quantforge.recipe import Rounding
    from quantforge.scheme import Scheme
    from quantforge.settings import Settings
    from quantforge_calibration.sampler import Sample

HESSIAN = frozenset({Statistic.HESSIAN})
GRADIENTS = "gradients"  # the unit before those of the blocks


def candidate_errors(
    checkpoint: Checkpoint,
    planned: Sequence[Planned],
    sample: Sample,
    settings: Settings,
    work: Workspace,
) -> dict[str, list[float]]:
    """Return the nats per token that each plan's scheme costs, by the canonical name of the linear.

    Blocks that the journal has are not measured again.

    Args:
        checkpoint: the source.
        planned: one plan for each candidate, alike but for the schemes of the linears of blocks.
        sample: calibration rows.
        settings: how it runs.
        work: the journal, with hidden states and weights of tokens beside it while it runs.

    Raises:
        InputError: a weight, an activation or a gradient is not finite.
        RefusedError: gradients of the model are not computed.
    """
    first = planned[0]
    targets = [guided(one.plan.tensors, one.matched) for one in planned]
    options = first.recipe.calibration
    shape = (len(sample.ids), options.length, 1)
    units = [f"block {index}" for index in range(first.matched.blocks)]
    if all(unit in work.done for unit in units):
        return _joined(work.done[unit] for unit in units)
    rounder, directory = rounder_of(first.plan.rounder), work.directory
    new = GRADIENTS not in work.done
    with TokenWeights(directory / FILE, [*targets[0]], shape, new=new) as weights:
        if new:
            with phase("", 0.5):
                made = observe_gradients(weights, checkpoint, first, sample, settings, directory)
                work.commit(GRADIENTS, made)
        else:
            check_weights(weights, work.done[GRADIENTS], directory)
        stream = stream_of(checkpoint, first, sample, settings, directory)
        with torch.no_grad(), torch.inference_mode(), stream:
            for part in stream:
                if units[part.index] in work.done:
                    part.advance()
                    continue
                schemes = [
                    {name: tensor.scheme.weight for name, tensor in one.items() if tensor.scheme}
                    for one in targets
                ]
                with phase("", 0.5 / first.matched.blocks):
                    found = _of_block(part, schemes, weights, rounder, first.recipe.rounding)
                work.commit(units[part.index], {"nats": found})
    return _joined(work.done[unit] for unit in units)


def _joined(records: Iterable[Record]) -> dict[str, list[float]]:
    """Return the nats of all blocks."""
    return {name: nats for record in records for name, nats in record["nats"].items()}


def _of_block(
    part: BlockPart,
    schemes: Sequence[Mapping[str, Scheme]],
    weights: TokenWeights,
    rounder: Rounder,
    rounding: Rounding,
) -> dict[str, list[float]]:
    """Return likewise the errors of one block, and advance it."""
    found: dict[str, list[float]] = {}
    inputs = [
        (shared, chosen)
        for shared in part.inputs
        if (chosen := [one for one in shared.linears if f"{part.name}.{one}" in schemes[0]])
    ]
    for index, (shared, linears) in enumerate(inputs):
        where = f"{part.name}: {', '.join(linears)}"
        tell(f"{where}: observing", share=index / len(inputs))
        masses = {one: weights.of(f"{part.name}.{one}")[..., 0] for one in linears}
        plain, *own = part.observe_weighed(
            [
                Weighed(shared.key, HESSIAN),
                *(Weighed(shared.key, HESSIAN, masses[one]) for one in linears),
            ],
            advance=index == len(inputs) - 1,
        )
        trim()
        # One name for each linear and candidate, so that one factorization serves all.
        asked = {
            f"{one} {place}": (one, scheme[f"{part.name}.{one}"])
            for place, scheme in enumerate(schemes)
            for one in linears
        }
        tell(f"{where}: rounding", share=(index + 0.5) / len(inputs))
        rounded = rounder.round_shared(
            {key: part.weight(one) for key, (one, _) in asked.items()},
            plain,
            {key: scheme for key, (_, scheme) in asked.items()},
            rounding,
        )
        for one, statistics in zip(linears, own, strict=True):
            mean = float(masses[one].mean(dtype=torch.float64))
            name = f"{part.name}.{one}"
            found[name] = [
                _nats(part.weight(one), rounded[f"{one} {place}"].tensor.decode(), statistics, mean)
                for place in range(len(schemes))
            ]
        trim()
    if not inputs:
        part.advance()
    return found


def _nats(weight: Tensor, rounded: Tensor, statistics: Statistics, mean: float) -> float:
    """Return half of ``tr(E H E^T)``; ``mean`` is that of the weights by which the Hessian is divided."""
    if statistics.hessian is None:  # no gradient reaches it
        return 0.0
    error = weight.float() - rounded.to(weight.device)
    return 0.5 * mean * float(((error @ statistics.hessian) * error).sum(dtype=torch.float64))
