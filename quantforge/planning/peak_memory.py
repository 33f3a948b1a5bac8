"""Predict the peak memory of a run from headers alone: `plan` prints it, and tests hold runs to it.

The peak is reached at one of six moments, and each of them is a sum of things that are alive together:

    self      the whole model in float32, where it writes its own calibration text
    embed     the rows of the embedding that occur, the hidden states, one read of the table
    observe   a block in float32, its Hessians, the hidden states, the activations of one micro-batch
    search    the same, and the workspace of a transform
    round     a block in float32, its Hessians, the hidden states, the workspace of the rounder
    write     one tensor as it is read and as it is stored

Without calibration only rounding (one matrix at a time) and writing remain. Figures are bytes above what the imports
take. The record of a method tells, in float32 copies, what its code holds at its worst moment.

Experts are worked on one at a time, whatever their number: beside the rest of the block there are the input of the
mixture and its outputs, of all rows, one expert in float32, and what it computes of the tokens that pass it together.
Of Hessians there are that of the layer, two of the expert, and the one that it is shrunk toward. Tuning holds the codes
of the blocks it tunes and what it learns, a block with its gradients, and the states of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.layer_kind import KEYS
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role, require_declarations
from quantforge.model.statistics import EXPERT_BATCH_TOKENS, Statistic
from quantforge.numerics import COMPILED_FROM
from quantforge.numerics.allocator import CHUNK_BYTES
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import METHODS
from quantforge.quantizers.tuning import ROWS_PER_STEP, whole_model_epochs
from quantforge.recipe import CalibrationOptions

FLOAT = 4
# Tokenizer, plan, and what a process takes when it first computes: library code that is paged in, work buffers of
# matrix products, what the heap keeps (`quantforge.numerics.allocator`).
OVERHEAD = 50_000_000
# Of a matrix that is rounded in strips (`quantforge.execution.data_free`); float32 copies of a strip inside ggml's
# packers, and what stays of compiling their loops.
RUN_ELEMENTS = 1 << 19  # 2 MB: what one step writes, the next finds in the cache
RUN_COPIES = 13.0
RUN_COMPILER = 45_000_000
CODES = 0.3  # float32 copies of all matrices of one shared input, inside a rounder
JOINED = 0.75  # float32 copies of a matrix whose strips are put together: codes, and what is packed
PART_ROWS = 2048  # of the two parts that are worked on at a time
# Of experts.
SPREAD = 2.5  # copies of tokens that are spread over all experts: times their weights, and what comes back
ROUTING = 8  # bytes of an index and a weight
# Of tuning.
FREED = 2  # blocks: results of steps that were let go of, which the allocator keeps (measured)
COPIES = 6  # of logits of a row, and floats of everything that is learned
CODE_BYTES = 6  # of a code that is learned: its offset, a moment of its gradients, two snapshots
MIXED = 4  # states of the tokens of a step: what reaches the experts, what they return, and both gradients


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes and options of a run on which its memory and its time depend, besides the model.

    Attributes:
        calibration: how many rows there are, of what length.
        words: the transforms and the rounder.
        searched: rows that a transform compares outputs on.
        needs: the statistics to observe; if empty, no calibration rows pass through the model.
        in_memory: hidden states are held in memory and not on disk.
        workers: strips of rows that are rounded side by side, `settings.workers_of`.
        guide: strips of rows of a matrix with a guided Hessian of their own, 0 without a backward pass.
        tune: epochs in which scales are learned on the whole model, 0 for none.
        whole: the transforms of the whole source.
    """

    calibration: CalibrationOptions
    words: tuple[str, ...]
    searched: int
    needs: frozenset[Statistic]
    in_memory: bool
    workers: int
    guide: int = 0
    tune: int = 0
    whole: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of calibration rows."""
        return self.calibration.samples

    @property
    def length(self) -> int:
        """Return the number of tokens of a row."""
        return self.calibration.length

    @property
    def micro_batch(self) -> int:
        """Return the number of rows of one forward."""
        return self.calibration.micro_batch

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one micro-batch."""
        return min(self.rows, self.micro_batch) * self.length

    @property
    def held_rows(self) -> int:
        """Return how many rows have hidden states in memory: from disk, two micro-batches at a time."""
        return self.rows if self.in_memory else min(self.rows, 2 * self.micro_batch)


def peak_bytes(model_layout: ModelLayout, tensors: tuple[TensorPlan, ...], run: RunSizes) -> int:
    """Predict the peak of a run above its imports, in bytes, from the plans of its tensors."""
    streamed = bool(run.needs) and model_layout.dimensions is not None
    groups = groups_of(tensors, together=streamed)
    moments: list[float] = [_copied_tensor(tensors)]
    if run.needs and run.calibration.writes_own_text:
        moments.append(whole_model(model_layout))
    if not run.needs or model_layout.dimensions is None:
        moments += [_rounding_workspace(group, run) for group in groups.values()]
    else:
        states = state_copies(model_layout) + bool(run.tune)  # of source and result
        outside = _hidden_states(run, model_layout) * states + _replayed_inputs(run, model_layout)
        outside += _routing_bytes(model_layout, run.rows * run.length)
        held: float = _block_bytes(model_layout) + outside
        hessians = _hessian_bytes(groups.values(), run)
        judged = Statistic.HESSIAN in run.needs or bool(run.words[:-1])
        apart = _expert_bytes(groups.values(), model_layout.dimensions, hessians=judged)
        moments += [
            _embedding_bytes(model_layout, model_layout.dimensions, run),
            held + hessians + _activation_bytes(model_layout, model_layout.dimensions, run),
            *(
                held
                + hessians
                + _search_workspace(group, model_layout, model_layout.dimensions, run)
                for (part, _), group in groups.items()
                if run.words[:-1] and part >= 0
            ),
            *(
                (outside if part < 0 else held + (apart if group[0].expert >= 0 else hessians))
                + _rounding_workspace(group, run)
                for (part, _), group in groups.items()
            ),
        ]
        if run.tune:
            moments += _tuning(tensors, model_layout, run, held + apart)
    return OVERHEAD + int(max(moments))


def whole_model(model_layout: ModelLayout) -> int:
    """Return the bytes of all weights in float32, as they are held while the model writes its own text."""
    return FLOAT * sum(math.prod(tensor.header.shape) for tensor in model_layout.tensors)


def groups_of(
    tensors: Iterable[TensorPlan], *, together: bool
) -> dict[tuple[int, str], list[TensorPlan]]:
    """Return quantized tensors that are rounded at once, by block and shared input (or each alone)."""
    groups: dict[tuple[int, str], list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.action is Action.QUANTIZE or tensor.sparse:
            key = tensor.shared if together and tensor.shared else tensor.name
            groups.setdefault((tensor.block, key), []).append(tensor)
    return groups


def in_strips(tensor: TensorPlan) -> bool:
    """Return whether rows of a matrix can be rounded separately: no scale is shared, and no input is measured."""
    layer = tensor.scheme
    if tensor.by_rows or layer is None:
        return tensor.by_rows
    measured = layer.input is not None and layer.input.measured
    return not (tensor.transposed or layer.weight.whole or measured)


def _rounding_workspace(group: list[TensorPlan], run: RunSizes) -> float:
    """Return the workspace in bytes for rounding the matrices of one shared input."""
    sizes = [math.prod(tensor.shape) for tensor in group]
    columns = group[0].matrix[1]
    part = min(sum(sizes) // columns, PART_ROWS) * columns
    square = columns**2 if Statistic.HESSIAN in run.needs else 0
    taken = METHODS[run.words[-1]].workspace
    rounding = taken.part * part + taken.matrices * max(sizes)
    first = group[0]
    if (first.by_rows and (not run.needs or first.block < 0)) or (
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
    factorizing = FLOAT * taken.factorizing * square
    return max(factorizing, FLOAT * (taken.factor * square + rounding) + compiler)


def _search_workspace(
    group: list[TensorPlan], model_layout: ModelLayout, sizes: Dimensions, run: RunSizes
) -> float:
    """Return the workspace in bytes of a transform on one shared input: matrices, captured inputs and outputs."""
    elements = sum(math.prod(tensor.shape) for tensor in group)
    copies = max(METHODS[name].workspace.matrices for name in run.words[:-1])
    rows = min(run.rows, -(-run.searched // run.micro_batch) * run.micro_batch)
    captured = rows * run.length * (group[0].matrix[1] + 2 * sizes.hidden)
    return FLOAT * (copies * elements + captured) + _activation_bytes(model_layout, sizes, run)


def _hessian_bytes(groups: Iterable[list[TensorPlan]], run: RunSizes) -> int:
    """Return the bytes of the Hessians of one block without those of its experts, which come after them."""
    if Statistic.HESSIAN not in run.needs:
        return 0
    blocks: dict[int, int] = {}
    for group in groups:
        if group[0].expert >= 0:
            continue
        part = group[0].block
        blocks[part] = blocks.get(part, 0) + FLOAT * group[0].matrix[1] ** 2
    return max(blocks.values(), default=0)


def _hidden_states(run: RunSizes, model_layout: ModelLayout) -> int:
    architecture, sizes = require_declarations(model_layout)
    return FLOAT * run.held_rows * run.length * sizes.hidden * architecture.streams


def _replayed_inputs(run: RunSizes, model_layout: ModelLayout) -> int:
    """Return the bytes kept for families whose per-row inputs are computed again for each block; 0 for others.

    They are the rows of the embedding that occur, and one hidden state of every held token for the extra outputs of
    earlier blocks.
    """
    architecture, sizes = require_declarations(model_layout)
    if not architecture.replayed:
        return 0
    rows = _embedded(model_layout, sizes) * min(sizes.vocab, run.rows * run.length)
    return FLOAT * (rows + sizes.hidden * run.held_rows * run.length)


def _activation_bytes(model_layout: ModelLayout, sizes: Dimensions, run: RunSizes) -> int:
    """Return the bytes of one micro-batch inside a block, at its widest: in attention or in the MLP.

    Beside the residual stream and its normalised copy, attention holds q, k, v, their rotated copies with two
    temporaries, and the output; the MLP holds several of its inner activations, and what q, k and v and the output
    projection have read is kept until the micro-batch has passed.
    """
    width = _widest(model_layout, sizes)
    attention = 3 * sizes.hidden + 5 * width.q + 4 * width.kv
    family = model_layout.architecture
    assert family is not None  # nothing is observed of others
    if not family.fused_attention:
        attention = 2 * sizes.hidden + 6 * width.q + 2 * sizes.heads * run.length
    copies = max(kind.inner_copies for kind in model_layout.layers)
    mlp = 4 * sizes.hidden + width.q + copies * width.ffn
    spread = SPREAD * spread_experts(model_layout) * sizes.hidden
    at_once = min(run.tokens, run.workers * run.length)  # a thread passes one row to its experts
    return FLOAT * max(run.tokens * max(attention, mlp), int(at_once * spread))


def _embedding_bytes(model_layout: ModelLayout, sizes: Dimensions, run: RunSizes) -> int:
    tokens = min(sizes.vocab, run.rows * run.length)
    embedding = next(
        tensor.header for tensor in model_layout.tensors if tensor.role is Role.EMBEDDING
    )
    chunk = min(embedding.nbytes, CHUNK_BYTES)
    micro_batch = 2 * FLOAT * run.tokens * sizes.hidden
    return FLOAT * tokens * sizes.hidden + _hidden_states(run, model_layout) + chunk + micro_batch


def _copied_tensor(tensors: Iterable[TensorPlan]) -> int:
    """Return the bytes of the largest tensor that is only copied, as it is written."""
    return max(
        (
            sum(item.nbytes for item in tensor.outputs)
            for tensor in tensors
            if tensor.action is Action.KEEP
        ),
        default=0,
    )


def _block_bytes(model_layout: ModelLayout) -> int:
    """Return the bytes of the largest block in float32, with one of its experts."""
    dense: dict[int, int] = {}
    experts: dict[tuple[int, int], int] = {}
    for tensor in model_layout.tensors:
        if tensor.block < 0:
            continue
        size = FLOAT * math.prod(tensor.header.shape)
        if tensor.expert >= 0:
            key = tensor.block, tensor.expert
            experts[key] = experts.get(key, 0) + size
        else:
            share = tensor.header.shape[0] if _is_stack(model_layout, tensor) else 1
            dense[tensor.block] = dense.get(tensor.block, 0) + size // share
    one: dict[int, int] = {}
    for (block, _), size in experts.items():
        one[block] = max(one.get(block, 0), size)
    return max((size + one.get(block, 0) for block, size in dense.items()), default=0)


def _is_stack(model_layout: ModelLayout, tensor: MatchedTensor) -> bool:
    """Return whether a tensor stacks parameters of all experts."""
    if not model_layout.layers or not model_layout.layers[tensor.block].stacks:
        return False
    stacks = model_layout.layers[tensor.block].stacks
    parents = {stack.parameter.rpartition(".")[0] for stack in stacks}
    inside = tensor.name.removeprefix(f"{model_layout.block_name(tensor.block)}.")
    return inside.rpartition(".")[0] in parents


def state_copies(model_layout: ModelLayout) -> int:
    """Return how many copies of the hidden states of all rows are held; a mixture adds its input and its outputs."""
    return 3 if any(kind.stacks for kind in model_layout.layers) else 1


def spread_experts(model_layout: ModelLayout) -> int:
    """Return the number of experts for which the layer copies every token before they run; 0 if it does not."""
    spread = (kind for kind in model_layout.layers if any(stack.spread for stack in kind.stacks))
    return max((shared.expert + 1 for kind in spread for shared in kind.inputs), default=0)


def _routing_bytes(model_layout: ModelLayout, tokens: int) -> int:
    """Return the bytes of the expert indices and weights of so many tokens; 0 without experts."""
    if state_copies(model_layout) == 1:
        return 0
    chosen = model_layout.config.get("num_experts_per_tok")
    return tokens * (2 * ROUTING + ROUTING * (chosen if type(chosen) is int else 8))


def _expert_bytes(groups: Iterable[list[TensorPlan]], sizes: Dimensions, *, hessians: bool) -> int:
    """Return the most bytes of statistics and activations while one expert is worked on."""
    widths: dict[tuple[int, int], set[int]] = {}
    for first, *_ in groups:
        if first.expert >= 0:
            widths.setdefault((first.block, first.expert), set()).add(first.matrix[1])
    found = [0]
    for inputs in widths.values():
        inner = max(inputs - {sizes.hidden}, default=sizes.hidden)
        squares = sum(width**2 for width in inputs | {sizes.hidden}) if hessians else 0
        activations = EXPERT_BATCH_TOKENS * (5 * sizes.hidden + 6 * inner)
        found.append(FLOAT * (activations + 2 * squares))
    return max(found)


def _tuning(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes, held: float
) -> tuple[float, float]:
    """Return the bytes of tuning at two moments: a block's forward passes, and a learning step."""
    sizes = require_declarations(model_layout)[1]
    passing = (
        held + _block_bytes(model_layout) / FLOAT + _activation_bytes(model_layout, sizes, run)
    )
    return passing, _tuning_step(tensors, model_layout, run) + 2 * _hidden_states(run, model_layout)


def _tuning_step(tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes) -> float:
    """Return the bytes of a learning step, without the hidden states of all rows."""
    sizes, whole = require_declarations(model_layout)[1], whole_model_epochs(run.tune)
    linears = [tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None]
    parts = {tensor.block for tensor in linears}
    by_part = [[one for one in linears if one.block == part] for part in parts]
    held = [linears] if whole else by_part
    codes = max(sum(math.prod(tensor.shape) for tensor in some) for some in held)
    learned = max(sum(_learned_scales(tensor) for tensor in some) for some in held)
    count, length = min(run.rows, ROWS_PER_STEP if whole else 1), run.length
    kinds = max(kind.inner_copies + 1 for kind in model_layout.layers)
    width = _widest(model_layout, sizes)
    passing = 10 * sizes.hidden + 6 * width.q + 6 * width.kv + kinds * width.ffn
    side = min(count, run.workers)
    states = side * length * max(passing, COPIES * sizes.vocab if whole else 0)
    states += count * length * sizes.hidden * (model_layout.blocks + 1 if whole else 1)
    states += count * length * max(sum(map(_saved_values, some)) for some in by_part)
    block = _block_bytes(model_layout) * (1 + 2 * side + FREED)
    if whole != 1:
        codes *= 1 + CODE_BYTES
    if state_copies(model_layout) > 1:
        states += MIXED * count * length * sizes.hidden
        states += 2 * min(count * length, EXPERT_BATCH_TOKENS) * (5 * sizes.hidden + 6 * sizes.ffn)
        block += _routing_bytes(model_layout, count * length)
    return (
        codes
        + block
        + FLOAT * (COPIES * learned + states + bool(whole) * sizes.vocab * sizes.hidden)
    )


def _saved_values(tensor: TensorPlan) -> int:
    """Return how many values per token a linear keeps for its gradients: inputs and outputs.

    Experts are differentiated one at a time and keep none.
    """
    return 0 if tensor.expert >= 0 else sum(tensor.matrix)


def _learned_scales(tensor: TensorPlan) -> int:
    """Return how many scales (and minima) of a linear are learned."""
    assert tensor.scheme is not None
    scheme = tensor.scheme.weight
    if not scheme.scaled:
        return 0
    if scheme.block is None:
        return math.prod(scheme.parameter_shape(tensor.matrix))
    blocks = math.prod(tensor.matrix) // scheme.block.columns
    return blocks * (1 if scheme.symmetric else 2)


@dataclass(frozen=True, slots=True)
class _Widths:
    """Numbers of all heads of queries, of all heads of keys, and inside of the MLP, in the widest layer."""

    q: int
    kv: int
    ffn: int


def _widest(model_layout: ModelLayout, sizes: Dimensions) -> _Widths:
    """Return the widths of a model."""
    keys = [
        (sizes.size(state.rows), sizes.size(state.width))
        for kind in model_layout.layers
        for state in kind.states or ()
        if state.part == KEYS
    ]
    return _Widths(
        max([sizes.q, *(sizes.heads * width for _, width in keys)]),
        max([sizes.kv, *(rows * width for rows, width in keys)]),
        max([sizes.ffn, *(size for name, size in sizes.own.items() if name.endswith("_ffn"))]),
    )


def _embedded(model_layout: ModelLayout, sizes: Dimensions) -> int:
    """Return how many numbers all embeddings have for a token: the usual one, and those of each layer."""
    others = (
        tensor.header.shape[-1]
        for tensor in model_layout.tensors
        if tensor.role is Role.OTHER and tensor.block < 0 and len(tensor.header.shape) > 1
        if "embed" in tensor.name
    )
    return sizes.hidden + sum(others)
