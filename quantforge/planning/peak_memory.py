"""Predict the peak memory of a run from headers alone; `plan` prints it, and tests compare runs with it.

The peak is reached in one of six phases; each needs the sum of what is in memory at the same time:

    self      the whole model in float32, if it generates its own calibration text
    embed     the rows of the embedding that occur, the hidden states, one read of the table
    observe   a block in float32, its Hessians, the hidden states, the activations of one micro-batch
    search    the same, and the workspace of a transform
    round     a block in float32, its Hessians, the hidden states, the workspace of the rounder
    write     one tensor as it is read and as it is stored

Without calibration only rounding (one matrix at a time) and writing remain. Figures are bytes above what the imports
take. The record of each method (`METHODS`) gives its peak workspace in float32 copies of its inputs.

Experts are processed one at a time, whatever their number: in addition to the rest of the block there are the inputs
and outputs of the mixture for all rows, one expert in float32, and the activations of one batch of its tokens. There
are four Hessians: that of the layer, two of the expert, and the one that it is shrunk toward. Tuning holds the codes of
the blocks it tunes and the learned parameters, a block with its gradients, and the states of a step.
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

FLOAT_BYTES = 4
# Bytes of the tokenizer, the plan, and first computations: library code that is paged in, buffers of matrix products,
# memory that the heap keeps (`quantforge.numerics.allocator`).
OVERHEAD = 50_000_000
# For a matrix that is rounded in strips of rows (`quantforge.execution.data_free`): weights of a strip, float32 copies
# of it inside ggml's packers, and bytes that remain from compiling their loops.
STRIP_ELEMENTS = 1 << 19  # 2 MB: small enough to stay in the CPU's cache from one step to the next
STRIP_COPIES = 13.0
STRIP_COMPILER_BYTES = 45_000_000
CODE_COPIES = 0.3  # float32 copies of all matrices of one shared input, inside a rounder
# Float32 copies of a matrix whose strips are joined: codes, and packed codes
JOINED_CODE_COPIES = 0.75
PART_ROWS = 2048  # rows of the two parts that are rounded at a time
# For experts.
SPREAD_COPIES = 2.5  # copies of tokens that are sent to all experts: weighted inputs, and outputs
ROUTING_BYTES = 8  # an index and a routing weight
# For tuning.
FREED_BLOCKS = 2  # size, in blocks, of freed results that the allocator keeps (measured)
LEARNED_COPIES = 6  # float32 copies of the logits of a row and of every learned parameter
CODE_BYTES = 6  # bytes of a learned code: its offset, a moment of its gradients, two snapshots
# Copies per token of a step: inputs and outputs of the experts, and their gradients
EXPERT_STATE_COPIES = 4


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes and options of a run that its memory and time depend on, besides the model.

    Attributes:
        calibration: number and length of calibration rows, and other calibration options.
        method_words: names of the transforms and of the rounder, in order.
        search_rows: number of rows on which a transform compares outputs.
        needs: the statistics to collect; if empty, no calibration rows pass through the model.
        in_memory: whether hidden states are held in memory and not on disk.
        workers: number of strips of rows that are rounded in parallel, see `settings.rounding_workers`.
        guided_strips: number of strips of a matrix that have a guided Hessian of their own; 0 without a backward pass.
        tune: number of tuning epochs; 0 for none.
        source_transforms: the transforms that change the whole source before the run.
    """

    calibration: CalibrationOptions
    method_words: tuple[str, ...]
    search_rows: int
    needs: frozenset[Statistic]
    in_memory: bool
    workers: int
    guided_strips: int = 0
    tune: int = 0
    source_transforms: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of calibration rows."""
        return self.calibration.samples

    @property
    def length(self) -> int:
        """Return the number of tokens in a row."""
        return self.calibration.length

    @property
    def micro_batch(self) -> int:
        """Return the number of rows in one forward pass."""
        return self.calibration.micro_batch

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one micro-batch."""
        return min(self.rows, self.micro_batch) * self.length

    @property
    def held_rows(self) -> int:
        """Return how many rows have their hidden states in memory: all, or two micro-batches if they are on disk."""
        return self.rows if self.in_memory else min(self.rows, 2 * self.micro_batch)


def peak_bytes(model_layout: ModelLayout, tensors: tuple[TensorPlan, ...], run: RunSizes) -> int:
    """Predict the peak memory of a run in bytes above its imports."""
    streamed = bool(run.needs) and model_layout.dimensions is not None
    groups = group_by_shared_input(tensors, joined=streamed)
    phases: list[float] = [_largest_copied_tensor(tensors)]
    if run.needs and run.calibration.writes_own_text:
        phases.append(whole_model_bytes(model_layout))
    if not run.needs or model_layout.dimensions is None:
        phases += [_rounding_workspace(group, run) for group in groups.values()]
    else:
        num_copies = state_copies(model_layout) + bool(run.tune)  # of source and result
        outside_block = _hidden_state_bytes(run, model_layout) * num_copies + _replayed_input_bytes(
            run, model_layout
        )
        outside_block += _routing_bytes(model_layout, run.rows * run.length)
        resident: float = _block_bytes(model_layout) + outside_block
        hessians = _hessian_bytes(groups.values(), run)
        expert_hessians = Statistic.HESSIAN in run.needs or bool(run.method_words[:-1])
        expert_bytes = _expert_bytes(
            groups.values(), model_layout.dimensions, hessians=expert_hessians
        )
        phases += [
            _embedding_bytes(model_layout, model_layout.dimensions, run),
            resident + hessians + _activation_bytes(model_layout, model_layout.dimensions, run),
            *(
                resident
                + hessians
                + _search_workspace(group, model_layout, model_layout.dimensions, run)
                for (block, _), group in groups.items()
                if run.method_words[:-1] and block >= 0
            ),
            *(
                (
                    outside_block
                    if block < 0
                    else resident + (expert_bytes if group[0].expert >= 0 else hessians)
                )
                + _rounding_workspace(group, run)
                for (block, _), group in groups.items()
            ),
        ]
        if run.tune:
            phases += _tuning_peaks(tensors, model_layout, run, resident + expert_bytes)
    return OVERHEAD + int(max(phases))


def whole_model_bytes(model_layout: ModelLayout) -> int:
    """Return the bytes of all weights in float32, as they are held while the model generates its own text."""
    return FLOAT_BYTES * sum(math.prod(tensor.header.shape) for tensor in model_layout.tensors)


def group_by_shared_input(
    tensors: Iterable[TensorPlan], *, joined: bool
) -> dict[tuple[int, str], list[TensorPlan]]:
    """Group quantized tensors that are rounded together, by block and shared input (each alone if not ``joined``)."""
    groups: dict[tuple[int, str], list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.action is Action.QUANTIZE or tensor.sparse:
            key = tensor.shared if joined and tensor.shared else tensor.name
            groups.setdefault((tensor.block, key), []).append(tensor)
    return groups


def can_round_in_strips(tensor: TensorPlan) -> bool:
    """Return whether strips of rows can be rounded separately: rows share no scale and no input is measured."""
    layer = tensor.scheme
    if tensor.strip_by_strip or layer is None:
        return tensor.strip_by_strip
    has_measured_input = layer.input is not None and layer.input.needs_calibration
    return not (tensor.transposed or layer.weight.rows_share_parameters or has_measured_input)


def _rounding_workspace(group: list[TensorPlan], run: RunSizes) -> float:
    """Return the workspace in bytes for rounding the matrices that share an input."""
    sizes = [math.prod(tensor.shape) for tensor in group]
    columns = group[0].matrix[1]
    part_weights = min(sum(sizes) // columns, PART_ROWS) * columns
    hessian_size = columns**2 if Statistic.HESSIAN in run.needs else 0
    workspace = METHODS[run.method_words[-1]].workspace
    rounding = workspace.part * part_weights + workspace.matrices * max(sizes)
    first = group[0]
    if (first.strip_by_strip and (not run.needs or first.block < 0)) or (
        can_round_in_strips(first) and not run.needs
    ):
        rounding = STRIP_COPIES * run.workers * min(max(sizes), STRIP_ELEMENTS)
        rounding += sum(
            METHODS[transform].workspace.matrices for transform in run.source_transforms
        ) * max(sizes)
        rounding += 0 if first.strip_by_strip else JOINED_CODE_COPIES * max(sizes)
        compiles_loops = max(sizes) >= COMPILED_FROM
        compiler = (
            STRIP_COMPILER_BYTES if first.strip_by_strip else workspace.compiler * compiles_loops
        )
    else:
        rounding += CODE_COPIES * sum(sizes)
        compiled = (part_weights // 2 if hessian_size else max(sizes)) >= COMPILED_FROM
        compiler = workspace.compiler if compiled else 0
    factorizing = FLOAT_BYTES * workspace.factorizing * hessian_size
    return max(factorizing, FLOAT_BYTES * (workspace.factor * hessian_size + rounding) + compiler)


def _search_workspace(
    group: list[TensorPlan], model_layout: ModelLayout, sizes: Dimensions, run: RunSizes
) -> float:
    """Return the workspace in bytes of a transform for one shared input: matrices, captured inputs and outputs."""
    elements = sum(math.prod(tensor.shape) for tensor in group)
    copies = max(METHODS[name].workspace.matrices for name in run.method_words[:-1])
    rows = min(run.rows, -(-run.search_rows // run.micro_batch) * run.micro_batch)
    captured = rows * run.length * (group[0].matrix[1] + 2 * sizes.hidden)
    return FLOAT_BYTES * (copies * elements + captured) + _activation_bytes(
        model_layout, sizes, run
    )


def _hessian_bytes(groups: Iterable[list[TensorPlan]], run: RunSizes) -> int:
    """Return the bytes of one block's Hessians, without those of its experts, which are computed afterwards."""
    if Statistic.HESSIAN not in run.needs:
        return 0
    blocks: dict[int, int] = {}
    for group in groups:
        if group[0].expert >= 0:
            continue
        block = group[0].block
        blocks[block] = blocks.get(block, 0) + FLOAT_BYTES * group[0].matrix[1] ** 2
    return max(blocks.values(), default=0)


def _hidden_state_bytes(run: RunSizes, model_layout: ModelLayout) -> int:
    architecture, sizes = require_declarations(model_layout)
    return FLOAT_BYTES * run.held_rows * run.length * sizes.hidden * architecture.num_streams


def _replayed_input_bytes(run: RunSizes, model_layout: ModelLayout) -> int:
    """Return the bytes kept to recompute per-row inputs of each block, in families that need it; 0 for others.

    They are the rows of the embedding that occur, and one hidden state of every held token for the extra outputs of
    earlier blocks.
    """
    architecture, sizes = require_declarations(model_layout)
    if not architecture.needs_model_replay:
        return 0
    rows = _embedding_width(model_layout, sizes) * min(sizes.vocab, run.rows * run.length)
    return FLOAT_BYTES * (rows + sizes.hidden * run.held_rows * run.length)


def _activation_bytes(model_layout: ModelLayout, sizes: Dimensions, run: RunSizes) -> int:
    """Return the activation bytes of one micro-batch inside a block at the larger of attention and MLP.

    Attention holds q, k, v, their rotated copies with two temporaries and the output, and the MLP several inner
    activations, both in addition to the residual stream and its normalized copy. The inputs of q, k and v and of the
    output projection are kept until the micro-batch has passed.
    """
    width = _widest_layer(model_layout, sizes)
    attention = 3 * sizes.hidden + 5 * width.q + 4 * width.kv
    family = model_layout.architecture
    assert family is not None  # other models are not calibrated
    if not family.fused_attention:
        attention = 2 * sizes.hidden + 6 * width.q + 2 * sizes.heads * run.length
    copies = max(kind.mlp_activations for kind in model_layout.layers)
    mlp = 4 * sizes.hidden + width.q + copies * width.ffn
    routed_width = SPREAD_COPIES * spread_experts(model_layout) * sizes.hidden
    # Each thread passes one row to its experts
    parallel_tokens = min(run.tokens, run.workers * run.length)
    return FLOAT_BYTES * max(run.tokens * max(attention, mlp), int(parallel_tokens * routed_width))


def _embedding_bytes(model_layout: ModelLayout, sizes: Dimensions, run: RunSizes) -> int:
    tokens = min(sizes.vocab, run.rows * run.length)
    embedding = next(
        tensor.header for tensor in model_layout.tensors if tensor.role is Role.EMBEDDING
    )
    chunk = min(embedding.nbytes, CHUNK_BYTES)
    micro_batch = 2 * FLOAT_BYTES * run.tokens * sizes.hidden
    return (
        FLOAT_BYTES * tokens * sizes.hidden
        + _hidden_state_bytes(run, model_layout)
        + chunk
        + micro_batch
    )


def _largest_copied_tensor(tensors: Iterable[TensorPlan]) -> int:
    """Return the bytes of the largest tensor that is copied unchanged."""
    return max(
        (
            sum(item.nbytes for item in tensor.outputs)
            for tensor in tensors
            if tensor.action is Action.KEEP
        ),
        default=0,
    )


def _block_bytes(model_layout: ModelLayout) -> int:
    """Return the float32 bytes of the largest block, with only one of its experts."""
    dense: dict[int, int] = {}
    experts: dict[tuple[int, int], int] = {}
    for tensor in model_layout.tensors:
        if tensor.block < 0:
            continue
        size = FLOAT_BYTES * math.prod(tensor.header.shape)
        if tensor.expert >= 0:
            key = tensor.block, tensor.expert
            experts[key] = experts.get(key, 0) + size
        else:
            num_slices = tensor.header.shape[0] if _is_stack(model_layout, tensor) else 1
            dense[tensor.block] = dense.get(tensor.block, 0) + size // num_slices
    largest_expert: dict[int, int] = {}
    for (block, _), size in experts.items():
        largest_expert[block] = max(largest_expert.get(block, 0), size)
    return max((size + largest_expert.get(block, 0) for block, size in dense.items()), default=0)


def _is_stack(model_layout: ModelLayout, tensor: MatchedTensor) -> bool:
    """Return whether a tensor stacks parameters of all experts."""
    if not model_layout.layers or not model_layout.layers[tensor.block].stacks:
        return False
    stacks = model_layout.layers[tensor.block].stacks
    parents = {stack.parameter.rpartition(".")[0] for stack in stacks}
    name_in_block = tensor.name.removeprefix(f"{model_layout.block_name(tensor.block)}.")
    return name_in_block.rpartition(".")[0] in parents


def state_copies(model_layout: ModelLayout) -> int:
    """Return the number of copies of all hidden states; experts need their inputs and outputs in addition."""
    return 3 if any(kind.stacks for kind in model_layout.layers) else 1


def spread_experts(model_layout: ModelLayout) -> int:
    """Return the number of experts to which a layer copies every token before they run; 0 if it does not copy."""
    kinds_with_routing = (
        kind
        for kind in model_layout.layers
        if any(stack.takes_weighted_tokens for stack in kind.stacks)
    )
    return max(
        (shared.expert + 1 for kind in kinds_with_routing for shared in kind.inputs), default=0
    )


def _routing_bytes(model_layout: ModelLayout, tokens: int) -> int:
    """Return the bytes of expert indices and routing weights of some tokens; 0 without experts."""
    if state_copies(model_layout) == 1:
        return 0
    experts_per_token = model_layout.config.get("num_experts_per_tok")
    return tokens * (
        2 * ROUTING_BYTES
        + ROUTING_BYTES * (experts_per_token if type(experts_per_token) is int else 8)
    )


def _expert_bytes(groups: Iterable[list[TensorPlan]], sizes: Dimensions, *, hessians: bool) -> int:
    """Return the peak bytes of statistics and activations while one expert is processed."""
    widths: dict[tuple[int, int], set[int]] = {}
    for first, *_ in groups:
        if first.expert >= 0:
            widths.setdefault((first.block, first.expert), set()).add(first.matrix[1])
    peaks = [0]
    for inputs in widths.values():
        inner = max(inputs - {sizes.hidden}, default=sizes.hidden)
        squares = sum(width**2 for width in inputs | {sizes.hidden}) if hessians else 0
        activations = EXPERT_BATCH_TOKENS * (5 * sizes.hidden + 6 * inner)
        peaks.append(FLOAT_BYTES * (activations + 2 * squares))
    return max(peaks)


def _tuning_peaks(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes, resident: float
) -> tuple[float, float]:
    """Return the bytes of tuning in two phases: the forward passes of a block, and a learning step."""
    sizes = require_declarations(model_layout)[1]
    forward = (
        resident
        + _block_bytes(model_layout) / FLOAT_BYTES
        + _activation_bytes(model_layout, sizes, run)
    )
    return forward, _tuning_step_bytes(tensors, model_layout, run) + 2 * _hidden_state_bytes(
        run, model_layout
    )


def _tuning_step_bytes(
    tensors: Iterable[TensorPlan], model_layout: ModelLayout, run: RunSizes
) -> float:
    """Return the bytes of a learning step, without the hidden states of all rows."""
    sizes, joint_epochs = require_declarations(model_layout)[1], whole_model_epochs(run.tune)
    linears = [tensor for tensor in tensors if tensor.block >= 0 and tensor.scheme is not None]
    blocks = {tensor.block for tensor in linears}
    linears_by_block = [[linear for linear in linears if linear.block == block] for block in blocks]
    held_linears = [linears] if joint_epochs else linears_by_block
    codes = max(sum(math.prod(tensor.shape) for tensor in group) for group in held_linears)
    learned = max(sum(_learned_scales(tensor) for tensor in group) for group in held_linears)
    count, length = min(run.rows, ROWS_PER_STEP if joint_epochs else 1), run.length
    mlp_copies = max(kind.mlp_activations + 1 for kind in model_layout.layers)
    width = _widest_layer(model_layout, sizes)
    layer_width = 10 * sizes.hidden + 6 * width.q + 6 * width.kv + mlp_copies * width.ffn
    parallel_rows = min(count, run.workers)
    step_bytes = (
        parallel_rows
        * length
        * max(layer_width, LEARNED_COPIES * sizes.vocab if joint_epochs else 0)
    )
    step_bytes += count * length * sizes.hidden * (model_layout.blocks + 1 if joint_epochs else 1)
    step_bytes += count * length * max(sum(map(_saved_values, group)) for group in linears_by_block)
    block_bytes = _block_bytes(model_layout) * (1 + 2 * parallel_rows + FREED_BLOCKS)
    if joint_epochs != 1:
        codes *= 1 + CODE_BYTES
    if state_copies(model_layout) > 1:
        step_bytes += EXPERT_STATE_COPIES * count * length * sizes.hidden
        step_bytes += (
            2 * min(count * length, EXPERT_BATCH_TOKENS) * (5 * sizes.hidden + 6 * sizes.ffn)
        )
        block_bytes += _routing_bytes(model_layout, count * length)
    return (
        codes
        + block_bytes
        + FLOAT_BYTES
        * (LEARNED_COPIES * learned + step_bytes + bool(joint_epochs) * sizes.vocab * sizes.hidden)
    )


def _saved_values(tensor: TensorPlan) -> int:
    """Return how many values per token a linear saves for the backward pass: its inputs and outputs.

    Experts save none: they are recomputed and differentiated one at a time.
    """
    return 0 if tensor.expert >= 0 else sum(tensor.matrix)


def _learned_scales(tensor: TensorPlan) -> int:
    """Return the number of learned scales (and minima) of a linear."""
    assert tensor.scheme is not None
    scheme = tensor.scheme.weight
    if not scheme.has_learnable_scales:
        return 0
    if scheme.block is None:
        return math.prod(scheme.parameter_shape(tensor.matrix))
    blocks = math.prod(tensor.matrix) // scheme.block.columns
    return blocks * (1 if scheme.symmetric else 2)


@dataclass(frozen=True, slots=True)
class _Widths:
    """Widths of the widest layer.

    Attributes:
        q: total width of all query heads.
        kv: total width of all key heads.
        ffn: inner width of the MLP.
    """

    q: int
    kv: int
    ffn: int


def _widest_layer(model_layout: ModelLayout, sizes: Dimensions) -> _Widths:
    """Return the widths of the widest layer."""
    keys = [
        (sizes.size(state.rows), sizes.size(state.width))
        for kind in model_layout.layers
        for state in kind.states or ()
        if state.part == KEYS
    ]
    return _Widths(
        max([sizes.q, *(sizes.heads * width for _, width in keys)]),
        max([sizes.kv, *(rows * width for rows, width in keys)]),
        max(
            [
                sizes.ffn,
                *(size for name, size in sizes.family_sizes.items() if name.endswith("_ffn")),
            ]
        ),
    )


def _embedding_width(model_layout: ModelLayout, sizes: Dimensions) -> int:
    """Return how many numbers all embeddings hold per token: the input embedding and per-layer ones."""
    extra_widths = (
        tensor.header.shape[-1]
        for tensor in model_layout.tensors
        if tensor.role is Role.OTHER and tensor.block < 0 and len(tensor.header.shape) > 1
        if "embed" in tensor.name
    )
    return sizes.hidden + sum(extra_widths)
