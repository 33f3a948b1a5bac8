"""Forecast the work of a run from headers alone: bytes read and written, and operations, as a basis for its time.

The counts do not depend on a machine; `seconds_of` converts them to seconds with recorded rates. Operations are those
of float32 matrix products; other work counts as the products that take as long. By step:

    read       the source twice: for its digests, then tensor by tensor (more often for gradients and tuning)
    pass       every calibration token through the weights of its blocks and experts, and through attention
    observe    for each token, the products of all pairs of columns of a shared input (the Hessian)
    search     a transform tries factors on rows of the weights, then the best of them on captured calibration rows
    round      by the record of the method, and by the grid whose scales are searched
    measure    for a target size: passes, statistics and rounding for every candidate
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
from quantforge.planning.peak_memory import RunSizes, group_by_shared_input, state_copies
from quantforge.planning.weight_traffic import expert_share
from quantforge.plans import Action, RunWork, TensorPlan
from quantforge.quantizers import METHODS
from quantforge.quantizers.tuning import whole_model_epochs
from quantforge.recipe import Rounding
from quantforge.scheme import Scheme

# Rates of one thread: float32 operations, bytes read and digested; seconds to load libraries and compile loops.
OPERATIONS_PER_SECOND, BYTES_PER_SECOND, STARTUP_SECONDS = 72e9, 1.2e9, 4.0
RATE_BASIS = "recorded on one thread of an AMD EPYC with AVX-512"
# Operations per weight: rounding with a given scale, and the search for scales by kind of grid.
ROUND_COST, SEARCH_COST, ZERO_POINT_COST, TILE_COST, CODEBOOK_COST = (
    900.0,
    2000.0,
    1500.0,
    4000.0,
    11_000.0,
)
BLOCK_COST, VECTOR_COST = 2800.0, 80_000.0
ATTENTION_COST = 3.0  # per query row and pair of tokens, as softmax costs more than its products
ACTIVATION_COST = 200.0  # per activation of a token: norms, activation functions, rotary embeddings
BACKWARD_PASSES = 4.0  # cost of a backward pass in forward passes: recomputation and gradients
GRADIENT_ROWS = 32  # at least so many calibration rows, evenly spread, have gradients when candidates are measured
# At least so many rows of a matrix, evenly spread, are rounded under every candidate
OUTPUT_ROWS = 256
# Minimum number of tokens per column for the statistics of an expert's inner activations
INNER_SAMPLE = 8


def seconds_of(work: RunWork, threads: int) -> dict[str, float]:
    """Return the seconds of every step of a run; threads share operations, but one thread computes digests."""
    return {
        "start": STARTUP_SECONDS,
        "read": work.source_reads * work.source_bytes / BYTES_PER_SECOND,
        **{
            step: count / OPERATIONS_PER_SECOND / threads for step, count in work.operations.items()
        },
        "write": 2 * work.output_bytes / BYTES_PER_SECOND,
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
        tensors: plans of all tensors.
        run: calibration rows, method and statistics.
        rounding: options of the methods.
        files: bytes of the source's weight files, and of the output's.
        guide_bytes: disk space of the guide, see `RunWork`.
    """
    streamed = bool(run.needs) and model_layout.dimensions is not None
    routed = run.calibration.expert_tokens == "routed"
    token_share = expert_share(model_layout, tensors) if routed else 1.0
    counts = dict.fromkeys(("pass", "observe", "search", "round"), 0.0)
    for group in group_by_shared_input(tensors, joined=streamed).values():
        if streamed and group[0].block >= 0:
            counts["observe"] += _observe_operations(group, model_layout, run, token_share)
            counts["search"] += _search_operations(group, run, rounding)
        counts["round"] += _rounding_operations(group, run, rounding)
    if streamed:
        counts["pass"] = _pass_operations(tensors, model_layout, run, token_share)
    counts["round"] += ROUND_COST * sum(
        math.prod(tensor.shape) for tensor in tensors if tensor.action is Action.KEEP
    )
    transform_passes = sum(METHODS[transform].work.weights for transform in run.source_transforms)
    counts["round"] += transform_passes * sum(math.prod(tensor.shape) for tensor in tensors)
    reads = 2 + 2 * bool(run.guided_strips) + _tuning_reads(model_layout, run)
    written_states = states_bytes(model_layout, run) if streamed else 0
    steps = {step: count for step, count in counts.items() if count}
    return RunWork(files[0], reads, files[1], written_states, guide_bytes, steps)


def with_measuring(
    work: RunWork, tensors: Iterable[TensorPlan], rows: int, candidates: int
) -> RunWork:
    """Add the work of measuring ``candidates`` schemes before a run, as `allocate` does."""
    # Evenly spread rows are up to twice as many
    gradient_share = 1.5 * min(GRADIENT_ROWS, rows) / rows
    counts = {name: work.operations.get(name, 0.0) for name in ("pass", "observe", "round")}
    linears = [tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None]
    weights = sum(math.prod(tensor.shape) for tensor in linears)
    sampled_weights = sum(
        tensor.matrix[1] * min(tensor.matrix[0], 1.5 * OUTPUT_ROWS) for tensor in linears
    )
    measured_operations = (
        counts["pass"] * (1 + gradient_share * (1 + BACKWARD_PASSES))
        + counts["observe"]
        * (
            1 + 2 * gradient_share
        )  # about two linears share an input, each with a weighted Hessian of its own
        + counts["round"] * candidates * sampled_weights / weights
    )
    return replace(
        work,
        source_reads=work.source_reads + 3,
        operations={**work.operations, "measure": measured_operations},
    )


def _tuning_reads(model_layout: ModelLayout, run: RunSizes) -> int:
    """Return how often tuning reads the source again; where possible, a block is tuned right after it is rounded."""
    has_experts = any(kind.stacks for kind in model_layout.layers)
    separate_pass = has_experts or bool(run.method_words[:-1])
    return (bool(run.tune) and separate_pass) + bool(whole_model_epochs(run.tune))


def states_bytes(model_layout: ModelLayout, run: RunSizes) -> int:
    """Return the bytes of all copies of the hidden states of all calibration rows."""
    if model_layout.dimensions is None:
        return 0
    copy_bytes = 4 * run.rows * run.length * model_layout.dimensions.hidden
    return copy_bytes * (state_copies(model_layout) + bool(run.tune))


def _tokens_seen(tensor: TensorPlan, run: RunSizes, token_share: float) -> float:
    """Return how many calibration tokens a matrix processes; ``token_share`` of them if it belongs to an expert."""
    return run.rows * run.length * (token_share if tensor.expert >= 0 else 1.0)


def _pass_operations(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes, token_share: float
) -> float:
    """Return the operations of all passes through all blocks."""
    sizes = model_layout.dimensions
    assert sizes is not None
    block_tensors = [tensor for tensor in tensors if tensor.block >= 0]
    weights = sum(
        2 * math.prod(tensor.shape) * _tokens_seen(tensor, run, token_share)
        for tensor in block_tensors
    )
    tokens = run.rows * run.length
    token_operations = ATTENTION_COST * run.length * sizes.q + ACTIVATION_COST * (
        sizes.hidden + sizes.q
    )
    per_pass = weights + tokens * model_layout.blocks * token_operations
    return per_pass * (
        1.0 + BACKWARD_PASSES * bool(run.guided_strips) + epoch_passes(model_layout) * run.tune
    )


def _observe_operations(
    group: list[TensorPlan], model_layout: ModelLayout, run: RunSizes, token_share: float
) -> float:
    """Return the operations for the statistics of one shared input."""
    # Transforms use an expert's own statistics
    expert_transform = group[0].expert >= 0 and bool(run.method_words[:-1])
    if Statistic.HESSIAN not in run.needs and not expert_transform:
        return 0.0
    columns, num_tokens = group[0].matrix[1], _tokens_seen(group[0], run, token_share)
    sizes = model_layout.dimensions
    if group[0].expert < 0 or sizes is None or columns == sizes.hidden:
        return 2 * num_tokens * columns**2
    # Inner activations of an expert are sampled too: tokens of other experts pass through its first matrices.
    sample = max(INNER_SAMPLE * columns - num_tokens, columns)
    return 2 * columns * (columns * (num_tokens + sample) + 2 * sizes.hidden * sample)


def _search_operations(group: list[TensorPlan], run: RunSizes, rounding: Rounding) -> float:
    """Return the operations of the transforms on one shared input."""
    if group[0].expert >= 0 and len(group) > 1:
        return 0.0  # the shared input of all experts has no layer to fold a scale into
    columns = group[0].matrix[1]
    weights = sum(math.prod(tensor.shape) for tensor in group)
    works = [METHODS[method].work for method in run.method_words[:-1]]
    total = 0.0
    for method_work in works:
        sampled = min(weights, method_work.rows * len(group) * columns)
        total += method_work.tries * sampled * (2 * ROUND_COST + 2 * columns)
        output_operations = (
            2 * min(run.rows, run.search_rows) * run.length if len(group) > 1 else 2 * columns
        )
        total += (
            method_work.finalists
            * weights
            * (_encoding_cost(group[0], rounding) + output_operations)
        )
        total += 2 * min(run.rows, run.search_rows) * run.length * columns**2
    return total


def _rounding_operations(group: list[TensorPlan], run: RunSizes, rounding: Rounding) -> float:
    """Return the operations for rounding the matrices that share an input."""
    weights = sum(math.prod(tensor.shape) for tensor in group)
    method_work, columns = METHODS[run.method_words[-1]].work, group[0].matrix[1]
    encoding = weights * _encoding_cost(group[0], rounding)
    if Statistic.HESSIAN not in run.needs or group[0].block < 0:
        return encoding
    scheme = group[0].scheme
    num_passes = rounding.gptq.passes_of(GRIDS[scheme.weight.grid].passes) if scheme else 1
    per_pass = (method_work.weights + method_work.columns * columns) * num_passes
    per_weight = per_pass + method_work.sweep_columns * rounding.gptq.refine * columns
    return encoding + weights * per_weight + method_work.cubes * columns**3


def _encoding_cost(tensor: TensorPlan, rounding: Rounding) -> float:
    """Return the operations per weight for choosing scales and codes."""
    scheme = tensor.scheme.weight if tensor.scheme else None
    if scheme is None or rounding.scales == "absmax":
        return ROUND_COST
    return _scale_search_cost(scheme)


def _scale_search_cost(scheme: Scheme) -> float:
    grid = GRIDS[scheme.grid]
    if grid.weights_per_code > 1:
        return VECTOR_COST
    if grid.block is not None:
        return BLOCK_COST
    if Zero.INT not in grid.zeros:
        return TILE_COST if grid.tiles else CODEBOOK_COST
    return SEARCH_COST + ZERO_POINT_COST * (scheme.zero is not Zero.NONE)
