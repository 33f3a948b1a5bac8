"""Memory that a run will take, from headers alone: what `plan` prints, and what the run is held to.

The peak is reached at one of six moments, and each of them is a sum of things that are alive together:

    self      the whole model in float32, where it writes its own calibration text
    embed     the rows of the embedding that occur, the hidden states, one read of the table
    observe   a block in float32, its Hessians, the hidden states, the activations of one micro-batch
    search    the same, and the workspace of a transform
    round     a block in float32, its Hessians, the hidden states, the workspace of the rounder
    write     one tensor as it is read and as it is stored

Without calibration only rounding (one matrix at a time) and writing remain. Figures are bytes above what the imports
take. The record of a method tells, in float32 copies, what its code holds at its worst moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import Matched, Role, declared
from quantforge.model.statistics import Statistic
from quantforge.numerics.allocator import CHUNK_BYTES
from quantforge.planning import expert_memory, tuning_memory
from quantforge.planning.run_sizes import RunSizes
from quantforge.planning.widths import embedded, widest
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import COMPILED_FROM, METHODS

FLOAT = 4
# Tokenizer, plan, and what a process takes when it first computes: library code that is paged in, work buffers of
# matrix products, what the heap keeps (`quantforge.numerics.allocator`).
OVERHEAD = 50_000_000
# Of a matrix that is rounded in strips (`quantforge.execution.row_wise`); float32 copies of a strip inside ggml's
# packers, and what stays of compiling their loops.
RUN_ELEMENTS = 1 << 19  # 2 MB: what one step writes, the next finds in the cache
RUN_COPIES = 13.0
RUN_COMPILER = 45_000_000
CODES = 0.3  # float32 copies of all matrices of one shared input, inside a rounder
JOINED = 0.75  # float32 copies of a matrix whose strips are put together: codes, and what is packed
PART_ROWS = 2048  # of the two parts that are worked on at a time


def peak_bytes(matched: Matched, tensors: tuple[TensorPlan, ...], run: RunSizes) -> int:
    """Predict the peak of a run above its imports, in bytes, from the plans of its tensors."""
    streamed = bool(run.needs) and matched.dimensions is not None
    groups = groups_of(tensors, together=streamed)
    moments: list[float] = [_write(tensors)]
    if run.needs and run.calibration.writes_own_text:
        moments.append(whole_model(matched))
    if not run.needs or matched.dimensions is None:
        moments += [_rounding(group, run) for group in groups.values()]
    else:
        states = expert_memory.states(matched) + bool(run.tune)  # of source and result
        outside = _hidden(run, matched) * states + _kept(run, matched)
        outside += expert_memory.routing_bytes(matched, run.rows * run.length)
        held: float = expert_memory.block_bytes(matched) + outside
        held += _learning(matched, matched.dimensions, run)
        hessians = _hessians(groups.values(), run)
        judged = Statistic.HESSIAN in run.needs or bool(run.words[:-1])
        apart = expert_memory.expert_bytes(groups, matched.dimensions, hessians=judged)
        moments += [
            _embed(matched, matched.dimensions, run),
            held + hessians + _activations(matched, matched.dimensions, run),
            *(
                held + hessians + _searching(group, matched, matched.dimensions, run)
                for (part, _), group in groups.items()
                if run.words[:-1] and part >= 0
            ),
            *(
                (outside if part < 0 else held + (apart if group[0].expert >= 0 else hessians))
                + _rounding(group, run)
                for (part, _), group in groups.items()
            ),
        ]
        if run.tune:
            moments += _tuning(tensors, matched, run, held + apart)
    return OVERHEAD + int(max(moments))


def _tuning(
    tensors: tuple[TensorPlan, ...], matched: Matched, run: RunSizes, held: float
) -> tuple[float, float]:
    """Return what tuning takes: while rows pass a block of the source or the result, and while it learns."""
    states, (_, sizes) = _hidden(run, matched), declared(matched)
    rows = (run.rows, run.length)
    taken = tuning_memory.tuning_bytes(tensors, matched, rows, run.workers, run.tune)
    codes = expert_memory.block_bytes(matched) / FLOAT
    return held + codes + _activations(matched, sizes, run), taken + 2 * states


def whole_model(matched: Matched) -> int:
    """Return the bytes of all weights in float32, as they are held while the model writes its own text."""
    return FLOAT * sum(math.prod(tensor.stored.shape) for tensor in matched.tensors)


def groups_of(
    tensors: Iterable[TensorPlan], *, together: bool
) -> dict[tuple[int, str], list[TensorPlan]]:
    """Return quantized tensors that are rounded at once, by block and shared input (or each alone)."""
    groups: dict[tuple[int, str], list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.action is Action.QUANTIZE or tensor.sparse:
            key = tensor.shared if together and tensor.shared else tensor.name
            groups.setdefault((tensor.part, key), []).append(tensor)
    return groups


def in_strips(tensor: TensorPlan) -> bool:
    """Return whether rows of a matrix can be rounded apart: they share nothing, and no input is measured."""
    layer = tensor.scheme
    if tensor.by_rows or layer is None:
        return tensor.by_rows
    measured = layer.input is not None and layer.input.measured
    return not (tensor.transposed or layer.weight.whole or measured)


def _rounding(group: list[TensorPlan], run: RunSizes) -> float:
    """Return the workspace in bytes for rounding the matrices of one shared input."""
    sizes = [math.prod(tensor.shape) for tensor in group]
    columns = group[0].matrix[1]
    part = min(sum(sizes) // columns, PART_ROWS) * columns
    square = columns**2 if Statistic.HESSIAN in run.needs else 0
    taken = METHODS[run.words[-1]].workspace
    rounding = taken.part * part + taken.matrices * max(sizes)
    compiler, first = 0, group[0]
    if (first.by_rows and (not run.needs or first.part < 0)) or (
        in_strips(first) and not run.needs
    ):
        rounding = RUN_COPIES * run.workers * min(max(sizes), RUN_ELEMENTS)
        rounding += sum(METHODS[word].workspace.matrices for word in run.whole) * max(sizes)
        rounding += 0 if first.by_rows else JOINED * max(sizes)
        loops = max(sizes) >= COMPILED_FROM
        compiler = RUN_COMPILER if first.by_rows else taken.compiler * loops
    else:
        rounding += CODES * sum(sizes)
        compiled = (part // 2 if square else max(sizes)) >= COMPILED_FROM
        compiler = taken.compiler if compiled else 0
    factorising = FLOAT * taken.factorising * square
    return max(factorising, FLOAT * (taken.factor * square + rounding) + compiler)


def _searching(
    group: list[TensorPlan], matched: Matched, sizes: Dimensions, run: RunSizes
) -> float:
    """Return the workspace in bytes of a transform on one shared input: matrices, captured inputs and outputs."""
    elements = sum(math.prod(tensor.shape) for tensor in group)
    copies = max(METHODS[name].workspace.matrices for name in run.words[:-1])
    rows = min(run.rows, -(-run.searched // run.micro_batch) * run.micro_batch)
    captured = rows * run.length * (group[0].matrix[1] + 2 * sizes.hidden)
    return FLOAT * (copies * elements + captured) + _activations(matched, sizes, run)


def _learning(matched: Matched, sizes: Dimensions, run: RunSizes) -> float:
    """Return what a method that learns on whole blocks holds beside them: targets, and all that gradients need."""
    if Statistic.STATES not in run.needs:
        return 0
    copies = METHODS[run.words[-1]].workspace.matrices
    kinds = sum(kind.inner_copies + 1 for kind in matched.layers) / len(matched.layers)
    width = widest(matched, sizes)
    tokens = run.tokens * (10 * sizes.hidden + 6 * width.q + 6 * width.kv + kinds * width.ffn)
    block = expert_memory.block_bytes(matched)
    return _hidden(run, matched) + copies * block + 2 * FLOAT * tokens


def _hessians(groups: Iterable[list[TensorPlan]], run: RunSizes) -> int:
    """Return the bytes of the Hessians of one block without its experts; all of them are alive until these begin."""
    if Statistic.HESSIAN not in run.needs:
        return 0
    blocks: dict[int, int] = {}
    for group in groups:
        if group[0].expert >= 0:
            continue
        part = group[0].part
        blocks[part] = blocks.get(part, 0) + FLOAT * group[0].matrix[1] ** 2
    return max(blocks.values(), default=0)


def _hidden(run: RunSizes, matched: Matched) -> int:
    architecture, sizes = declared(matched)
    return FLOAT * run.held_rows * run.length * sizes.hidden * architecture.streams


def _kept(run: RunSizes, matched: Matched) -> int:
    """Return the bytes of what rows have beside hidden states where it is computed anew for each block.

    These are the rows of the embedding that occur, and as much as one hidden state of every token that is held for
    what earlier blocks have returned beside theirs.
    """
    architecture, sizes = declared(matched)
    if not architecture.replayed:
        return 0
    rows = embedded(matched, sizes) * min(sizes.vocab, run.rows * run.length)
    return FLOAT * (rows + sizes.hidden * run.held_rows * run.length)


def _activations(matched: Matched, sizes: Dimensions, run: RunSizes) -> int:
    """Return the bytes of one micro-batch inside a block, at its widest: in attention or in the MLP.

    Beside the residual stream and its normalised copy, attention holds q, k, v, their rotated copies with two
    temporaries, and the output; the MLP holds several of its inner activations, and what q, k and v and the output
    projection have read is kept until the micro-batch has passed.
    """
    width = widest(matched, sizes)
    attention = 3 * sizes.hidden + 5 * width.q + 4 * width.kv
    family = matched.architecture
    assert family is not None  # nothing is observed of others
    if not family.fused_attention:
        attention = 2 * sizes.hidden + 6 * width.q + 2 * sizes.heads * run.length
    copies = max(kind.inner_copies for kind in matched.layers)
    mlp = 4 * sizes.hidden + width.q + copies * width.ffn
    spread = expert_memory.SPREAD * expert_memory.spread_experts(matched) * sizes.hidden
    at_once = min(run.tokens, run.workers * run.length)  # a thread passes one row to its experts
    return FLOAT * max(run.tokens * max(attention, mlp), int(at_once * spread))


def _embed(matched: Matched, sizes: Dimensions, run: RunSizes) -> int:
    tokens = min(sizes.vocab, run.rows * run.length)
    embedding = next(tensor.stored for tensor in matched.tensors if tensor.role is Role.EMBEDDING)
    chunk = min(embedding.nbytes, CHUNK_BYTES)
    micro_batch = 2 * FLOAT * run.tokens * sizes.hidden
    return FLOAT * tokens * sizes.hidden + _hidden(run, matched) + chunk + micro_batch


def _write(tensors: Iterable[TensorPlan]) -> int:
    """Return the bytes of the largest tensor that is only copied, as it is written."""
    return max(
        (
            sum(item.nbytes for item in tensor.stored)
            for tensor in tensors
            if tensor.action is Action.KEEP
        ),
        default=0,
    )
