"""Products with ternary weights on a GPU, by `gpu.ternary`: twenty digits of `base3` in a word.

A group is a whole number of words, 13 for 256 columns; rows are padded to 16 bytes. Which of the three
kernels multiplies follows the number of rows as in `packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantforge_kernels import base3
from quantforge_kernels.gpu.launching import Configuration, launch_kernel, split_of
from quantforge_kernels.gpu.plane_products import MOST_ROWS, SLAB_BYTES, add_splits, mode_of
from quantforge_kernels.problem import Kernel, Packed, Parameters, Problem, Weights, has_triton


def accepts(problem: Problem) -> bool:
    """Return whether a problem is solved: ternary codes in whole groups."""
    on_gpu = problem.on_gpu and not problem.activation and has_triton()
    return on_gpu and problem.grid == "ternary" and problem.in_features % problem.group_size == 0


def prepare(codes: Tensor, parameters: Parameters, problem: Problem) -> Packed:
    """Lay the codes out: digit ``d`` of word ``j`` of a group is its column ``d words + j``."""
    rows, count = len(codes), base3.words_of(problem.group_size)
    groups = codes.view(rows, -1, problem.group_size)
    filled = pad(groups, (0, base3.DIGITS * count - problem.group_size))
    digits = filled.view(rows, -1, base3.DIGITS, count).transpose(2, 3)
    words = base3.to_words(digits).flatten(1)
    words = pad(words, (0, -words.shape[1] % 4)).contiguous()
    return {"words": words, "scales": parameters["scales"].contiguous()}


def restore(packed: Packed, problem: Problem) -> Weights:
    """Undo `prepare`."""
    count = base3.words_of(problem.group_size)
    words = packed["words"][:, : problem.groups * count].reshape(-1, problem.groups, count)
    groups = base3.from_words(words).transpose(2, 3).flatten(2)[:, :, : problem.group_size]
    return groups.flatten(1), {"scales": packed["scales"]}


def matmul(x: Tensor, packed: Packed, problem: Problem) -> Tensor:
    """Multiply ``x`` ``[rows, in]``."""
    y: Tensor = operator()(x.contiguous(), packed["words"], packed["scales"], problem.group_size)
    return y


@cache
def operator() -> Callable[..., Tensor]:
    """Register ``quantforge::ternary_matmul``, opaque to `torch.compile`, with a shape rule."""
    operation = torch.library.custom_op(
        "quantforge::ternary_matmul", _ternary_matmul, mutates_args=()
    )
    operation.register_fake(lambda x, words, *_: x.new_empty(x.shape[0], words.shape[0]))
    return operation


def _ternary_matmul(x: Tensor, words: Tensor, scales: Tensor, group: int) -> Tensor:
    if len(x) == 0:
        return x.new_empty(0, len(words))
    if len(x) > MOST_ROWS:
        return _by_slabs(x, words, scales, group)
    block_n, block_w, warps = (8, 128, 1) if len(x) == 1 else (64, 16, 2)
    split = split_of(-(-len(words) // block_n) * warps, -(-words.shape[1] // block_w))
    return launch(x, words, scales, group, Configuration(block_n, block_w, warps, split))


def launch(
    x: Tensor, words: Tensor, scales: Tensor, group: int, tile: Configuration, mode: int | None = None
) -> Tensor:  # fmt: skip
    """Launch the kernel for so many rows and add up the splits; ``tile.block_k`` counts words."""
    from quantforge_kernels.gpu import ternary

    (tokens, columns), rows = x.shape, len(words)
    share = -(-words.shape[1] // tile.block_k // tile.split)
    out = x.new_empty(
        (tile.split, tokens, rows), dtype=x.dtype if tile.split == 1 else torch.float32
    )
    sizes = (columns // group, words.shape[1] // 4, share)
    programs = -(-rows // tile.block_n)
    constants = {
        "GROUP": group, "STEP": base3.words_of(group), "BLOCK_N": tile.block_n,
        "BLOCK_W": tile.block_k, "num_warps": tile.warps,
    }  # fmt: skip
    if tokens == 1:
        mode = mode_of(x.dtype, x.device) if mode is None else mode
        launch_kernel(
            ternary.row_kernel,
            (programs, tile.split),
            x,
            words,
            scales,
            out,
            rows,
            *sizes,
            **constants,
            MODE=mode,
        )
    else:
        widen = x.dtype == torch.bfloat16 and x.device.type == "cpu"
        launch_kernel(
            ternary.rows_kernel,
            (programs, -(-tokens // 16), tile.split),
            x,
            words,
            scales,
            out,
            tokens,
            rows,
            columns,
            *sizes,
            **constants,
            WIDEN=widen,
            BLOCK_M=16,
        )
    return add_splits(out, x.dtype)


def _by_slabs(x: Tensor, words: Tensor, scales: Tensor, group: int) -> Tensor:
    from quantforge_kernels.gpu.ternary import decode_kernel

    (tokens, columns), rows = x.shape, len(words)
    result = x.new_empty(tokens, rows)
    step = max(1, SLAB_BYTES // (columns * x.element_size()))
    for first in range(0, rows, step):
        part, scaled = words[first : first + step], scales[first : first + step]
        weight = x.new_empty(len(part), columns)
        launch_kernel(
            decode_kernel, (-(-len(part) // 8), -(-columns // 512)),
            part, scaled, weight, len(part), columns, columns // group, words.shape[1] // 4,
            GROUP=group, STEP=base3.words_of(group), BLOCK_N=8, BLOCK_K=512, num_warps=4,
        )  # fmt: skip
        result[:, first : first + step] = x @ weight.T
    return result


KERNEL = Kernel("triton-ternary", accepts, prepare, matmul, restore)
