"""Work of a run, from headers alone: bytes that it reads and writes, and operations, for a forecast of its time.

Nothing that is counted depends on a machine: `seconds_of` converts it to seconds by rates that were recorded once.
Operations are those of float32 products; other work counts as the products that take as long. By steps:

    read       the source twice: its digests, then tensor by tensor (twice more for gradients, once for tuning apart)
    pass       every calibration token through the weights of the blocks that it meets, and through attention
    observe    of each token, the products of every two columns that a shared input reads
    search     a transform tries factors on rows of the weights, then the best of them on captured rows of the text
    round      by the record of the method, and by the grid that scales are searched for
    measure    for a size that is asked for: all of these but the first and last before, for every candidate
    write      the output, and its digests for the manifest
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from quantforge.architectures.match import ModelLayout
from quantforge.grids import GRIDS, Zero
from quantforge.model.statistics import Statistic
from quantforge.planning.gradient_options import epoch_passes
from quantforge.planning.peak_memory import RunSizes, groups_of, state_copies
from quantforge.planning.weight_traffic import expert_share
from quantforge.plans import Action, RunWork, TensorPlan
from quantforge.quantizers import METHODS
from quantforge.quantizers.tuning import whole_model_epochs
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

# Rates of one thread: float32 products, bytes that are read and digested; seconds until libraries and loops are ready.
PRODUCTS, DIGEST, STARTUP = 72e9, 1.2e9, 4.0
BASIS = "recorded on one thread of an AMD EPYC with AVX-512"
# Operations for each weight: rounding to the nearest of a scale, and the search of scales by kinds of grids.
NEAREST, SEARCHED, OFFSET, TILES, BOOK = 900.0, 2000.0, 1500.0, 4000.0, 11_000.0
BLOCKS, VECTORS = 2800.0, 80_000.0
ATTENDED = 3.0  # for each token, token before it and row of the queries: softmax is no product
TOKEN = 200.0  # for each token and number of a block's widest place: norms, activations, rotations
BACKWARD = 4.0  # times a forward pass: it is computed again, then twice backward
GRADIENT_ROWS = 32  # and more, evenly spread over the calibration rows, have gradients where candidates are measured
OUTPUT_ROWS = 256  # and more of a matrix, evenly spread, are rounded under every candidate there
INNER_SAMPLE = 8  # tokens for each column that an expert's inner statistics are made of, at least


def seconds_of(work: RunWork, threads: int) -> dict[str, float]:
    """Return the seconds of every step of a run; threads share operations, and one of them digests."""
    return {
        "start": STARTUP,
        "read": work.reads * work.source_bytes / DIGEST,
        **{step: count / PRODUCTS / threads for step, count in work.operations.items()},
        "write": 2 * work.output_bytes / DIGEST,
    }


def run_work(
    model_layout: ModelLayout,
    tensors: tuple[TensorPlan, ...],
    run: RunSizes,
    rounding: Rounding,
    files: tuple[int, int],
    guide_bytes: int,
) -> RunWork:
    """Count the work of a run.

    Args:
        model_layout: the model.
        tensors: of the plan.
        run: rows, method and statistics.
        rounding: options of the methods.
        files: bytes of the source's weight files, and of the output's.
        guide_bytes: see `RunWork`.
    """
    streamed = bool(run.needs) and model_layout.dimensions is not None
    routed = run.calibration.experts == "routed"
    share = expert_share(model_layout, tensors) if routed else 1.0
    counts = dict.fromkeys(("pass", "observe", "search", "round"), 0.0)
    for group in groups_of(tensors, together=streamed).values():
        if streamed and group[0].block >= 0:
            counts["observe"] += _observe_operations(group, model_layout, run, share)
            counts["search"] += _search_operations(group, run, rounding)
        counts["round"] += _rounding_operations(group, run, rounding)
    if streamed:
        counts["pass"] = _pass_operations(tensors, model_layout, run, share)
    counts["round"] += NEAREST * sum(
        math.prod(tensor.shape) for tensor in tensors if tensor.action is Action.KEEP
    )
    changed = sum(METHODS[word].work.weights for word in run.whole)
    counts["round"] += changed * sum(math.prod(tensor.shape) for tensor in tensors)
    reads = 2 + 2 * bool(run.guide) + _tuning_reads(model_layout, run)
    states = states_bytes(model_layout, run) if streamed else 0
    steps = {step: count for step, count in counts.items() if count}
    return RunWork(files[0], reads, files[1], states, guide_bytes, steps)


def with_measuring(
    work: RunWork, tensors: Iterable[TensorPlan], rows: int, candidates: int
) -> RunWork:
    """Return a run's work with what `allocate` measures before it: so many candidates, on so many rows."""
    few = 1.5 * min(GRADIENT_ROWS, rows) / rows  # between one and two times as many
    counts = {name: work.operations.get(name, 0.0) for name in ("pass", "observe", "round")}
    inside = [tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None]
    weights = sum(math.prod(one.shape) for one in inside)
    some = sum(one.matrix[1] * min(one.matrix[0], 1.5 * OUTPUT_ROWS) for one in inside)
    measured = (
        counts["pass"] * (1 + few * (1 + BACKWARD))
        + counts["observe"]
        * (1 + 2 * few)  # two linears read an input, nearly, and each has weights of its own
        + counts["round"] * candidates * some / weights
    )
    return replace(work, reads=work.reads + 3, operations={**work.operations, "measure": measured})


def _tuning_reads(model_layout: ModelLayout, run: RunSizes) -> int:
    """Return how often tuning reads the source: blocks are tuned behind their rounding where that is possible."""
    mixed = any(kind.stacks for kind in model_layout.layers)
    apart = mixed or bool(run.words[:-1])
    return (bool(run.tune) and apart) + bool(whole_model_epochs(run.tune))


def states_bytes(model_layout: ModelLayout, run: RunSizes) -> int:
    """Return the bytes of the hidden states of all calibration rows, as often as they are held."""
    if model_layout.dimensions is None:
        return 0
    states = 4 * run.rows * run.length * model_layout.dimensions.hidden
    return states * (state_copies(model_layout) + bool(run.tune))


def _tokens_seen(tensor: TensorPlan, run: RunSizes, share: float) -> float:
    """Return how many calibration tokens a matrix sees; ``share`` of them where it is an expert's."""
    return run.rows * run.length * (share if tensor.expert >= 0 else 1.0)


def _pass_operations(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes, share: float
) -> float:
    """Return the operations of all passes through all blocks."""
    sizes = model_layout.dimensions
    assert sizes is not None
    inside = [tensor for tensor in tensors if tensor.block >= 0]
    weights = sum(2 * math.prod(one.shape) * _tokens_seen(one, run, share) for one in inside)
    tokens = run.rows * run.length
    rows = ATTENDED * run.length * sizes.q + TOKEN * (sizes.hidden + sizes.q)
    once = weights + tokens * model_layout.blocks * rows
    return once * (1.0 + BACKWARD * bool(run.guide) + epoch_passes(model_layout) * run.tune)


def _observe_operations(
    group: list[TensorPlan], model_layout: ModelLayout, run: RunSizes, share: float
) -> float:
    """Return the operations of the statistics of one shared input."""
    judged = group[0].expert >= 0 and bool(run.words[:-1])  # transforms look at an expert's own
    if Statistic.HESSIAN not in run.needs and not judged:
        return 0.0
    columns, seen = group[0].matrix[1], _tokens_seen(group[0], run, share)
    sizes = model_layout.dimensions
    if group[0].expert < 0 or sizes is None or columns == sizes.hidden:
        return 2 * seen * columns**2
    # What an expert reads inside is sampled too: tokens that it did not get pass its first matrices.
    sample = max(INNER_SAMPLE * columns - seen, columns)
    return 2 * columns * (columns * (seen + sample) + 2 * sizes.hidden * sample)


def _search_operations(group: list[TensorPlan], run: RunSizes, rounding: Rounding) -> float:
    """Return the operations of the transforms on one shared input."""
    if group[0].expert >= 0 and len(group) > 1:
        return 0.0  # nothing absorbs a scale of what all experts read
    columns = group[0].matrix[1]
    weights = sum(math.prod(tensor.shape) for tensor in group)
    taken = [METHODS[word].work for word in run.words[:-1]]
    found = 0.0
    for work in taken:
        some = min(weights, work.rows * len(group) * columns)
        found += work.tries * some * (2 * NEAREST + 2 * columns)
        judged = 2 * min(run.rows, run.searched) * run.length if len(group) > 1 else 2 * columns
        found += work.finalists * weights * (_encoding_cost(group[0], rounding) + judged)
        found += 2 * min(run.rows, run.searched) * run.length * columns**2
    return found


def _rounding_operations(group: list[TensorPlan], run: RunSizes, rounding: Rounding) -> float:
    """Return the operations of rounding the matrices of one shared input."""
    weights = sum(math.prod(tensor.shape) for tensor in group)
    work, columns = METHODS[run.words[-1]].work, group[0].matrix[1]
    encoding = weights * _encoding_cost(group[0], rounding)
    if Statistic.HESSIAN not in run.needs or group[0].block < 0:
        return encoding
    scheme = group[0].scheme
    passes = rounding.gptq.passes_of(GRIDS[scheme.weight.grid].passes) if scheme else 1
    once = (work.weights + work.columns * columns) * passes
    each = once + work.sweep_columns * rounding.gptq.refine * columns
    return encoding + weights * each + work.cubes * columns**3


def _encoding_cost(tensor: TensorPlan, rounding: Rounding) -> float:
    """Return the operations for each weight of choosing scales and codes."""
    scheme = tensor.scheme.weight if tensor.scheme else None
    if scheme is None or rounding.scales == "absmax":
        return NEAREST
    return _scale_search_cost(scheme)


def _scale_search_cost(scheme: Scheme) -> float:
    grid = GRIDS[scheme.grid]
    if grid.weights_per_code > 1:
        return VECTORS
    if grid.block is not None:
        return BLOCKS
    if Zero.INT not in grid.zeros:
        return TILES if grid.tiles else BOOK
    return SEARCHED + OFFSET * (scheme.zero is not Zero.NONE)
