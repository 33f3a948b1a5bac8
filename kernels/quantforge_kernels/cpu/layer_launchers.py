"""Launchers of the CPU programs for norm, bias, gate, rotary, dense products, attention and its cache.

Each launcher handles what its ``accepts...`` function accepts; plain torch in `layers` and
`attention`, which also contains the definitions, does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.instruction_sets import LANES, best_instruction_set
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV
from quantforge_kernels.kv_row_layout import channels_per_scale

if TYPE_CHECKING:
    from quantforge_kernels.cpu.cache_programs import HeadFormat
    from quantforge_kernels.cpu.compiler import Program
    from quantforge_kernels.score_options import ScoreOptions

_FLOAT_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
# Most rows of a dense product of ours; more are torch's work, by way of `many_rows`.
MAX_LINEAR_ROWS = {torch.bfloat16: 32, torch.float16: 48, torch.float32: 16}
LARGE_WEIGHT_ELEMENTS = 1 << 23  # weights, of which 16 lanes multiply more rows
MAX_LARGE_LINEAR_ROWS = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 32}
MAX_NATIVE_LINEAR_ROWS = 8  # likewise, where torch has instructions of the processor for 16 bits
_MIN_PARALLEL_ELEMENTS = 1 << 15  # numbers that are worth a second thread


def accepts(width: int, *values: Tensor) -> bool:
    """Return whether programs can compute with these tensors.

    The tensors must have the same floating-point type, be on a CPU with AVX2 or AVX-512, and be contiguous in their
    last dimension, and ``width`` (of a row, a head or half a head) must be a multiple of the vector length.
    """
    first, instruction_set = values[0], best_instruction_set()
    return (
        first.device.type == "cpu"
        and first.dtype in _FLOAT_DTYPES
        and all(value.dtype == first.dtype and value.stride(-1) == 1 for value in values)
        and instruction_set is not None
        and width % LANES[instruction_set] == 0
        and first.numel() > 0
    )


def accepts_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `linear` handles this product: few rows and supported tensors."""
    bias_tensors = () if bias is None else (bias,)
    return (
        len(x) <= max_linear_rows(x, weight)
        and accepts(x.shape[-1], x, weight, *bias_tensors)
        and weight.is_contiguous()
        and len(weight) % _lanes() == 0
    )


def max_linear_rows(x: Tensor, weight: Tensor) -> int:
    """Return the maximum number of rows that `linear` handles."""
    if x.dtype != torch.float32 and many_rows.torch_is_fast(x):
        return MAX_NATIVE_LINEAR_ROWS
    large = (
        weight.numel() >= LARGE_WEIGHT_ELEMENTS
        and best_instruction_set() is not None
        and _lanes() == 16
    )
    return (MAX_LARGE_LINEAR_ROWS if large else MAX_LINEAR_ROWS).get(x.dtype, 0)


def accepts_cache(head_dim: int, kinds: tuple[str, str], *values: Tensor) -> bool:
    """Return whether `attend` and `store_kv` handle these tensors with a cache of these two kinds (keys, values)."""
    codes_per_byte = 2 if "int4" in kinds else 1
    return accepts(head_dim // codes_per_byte, *values)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Compute `layers.add_rms_norm` with a compiled program."""
    x = make_heads_contiguous(x) if x.dim() == 3 and residual is None else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    hidden = x if residual is None else torch.empty_like(out)
    residual_rows = x if residual is None else residual.contiguous()
    rows, lanes = x.numel() // len(weight), _lanes()
    addresses = [value.data_ptr() for value in (x, residual_rows, weight, out, hidden)]
    heads_per_token = x.shape[1] if x.dim() == 3 else 1
    sizes = [len(weight) // lanes, heads_per_token, x.stride(0) * x.element_size()]
    program = _compile_layer_program("norm", lanes, x.dtype, epsilon, offset, residual is not None)
    program([0, rows, _threads(x), rows, *addresses, *sizes])
    return out, hidden


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Compute `layers.add_bias` in place with a compiled program."""
    (rows, width), lanes = y.shape, _lanes()
    sizes = [y.stride(0) * y.element_size(), width // lanes]
    _compile_layer_program("bias", lanes, y.dtype)(
        [0, rows, _threads(y), rows, y.data_ptr(), bias.data_ptr(), *sizes]
    )
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `layers.linear` with a compiled program."""
    x, lanes = x.contiguous(), _lanes()
    (rows, columns), width = x.shape, len(weight)
    y = x.new_empty(rows, width)
    tiles = width // lanes
    operands = (x, weight, x if bias is None else bias, y)
    arguments = [0, tiles, _threads(weight), rows, *(value.data_ptr() for value in operands)]
    strip_rows, program = _compile_linear(lanes, x.dtype, rows, columns, bias is not None)
    program([*arguments, columns // lanes, tiles, -(-rows // strip_rows)])
    return y


def gate(gates: Tensor, ups: Tensor, tanh: bool) -> Tensor:
    """Compute `layers.silu_gate`, or `layers.gelu_gate` if ``tanh``, with a compiled program."""
    (rows, width), lanes = gates.shape, _lanes()
    out = gates.new_empty(rows, width)
    addresses = [value.data_ptr() for value in (gates, ups, out)]
    strides = [value.stride(0) * value.element_size() for value in (gates, ups)]
    arguments = [0, rows, _threads(gates), rows, *addresses, *strides, width // lanes]
    _compile_layer_program("gate", lanes, gates.dtype, tanh)(arguments)
    return out


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute `layers.apply_rotary` for whole heads with a compiled program."""
    x, cosine, sine = make_heads_contiguous(x), cosine.contiguous(), sine.contiguous()
    (tokens, heads, head_dim), lanes = x.shape, _lanes()
    out = torch.empty(x.shape, dtype=x.dtype)
    addresses = [value.data_ptr() for value in (x, cosine, sine, out)]
    sizes = [x.stride(0) * x.element_size(), heads, head_dim // 2 // lanes]
    _compile_layer_program("rotate", lanes, x.dtype)(
        [0, tokens, _threads(x), tokens, *addresses, *sizes]
    )
    return out


def attend(
    q: Tensor,
    keys: EncodedKV,
    values: EncodedKV,
    page_table: Tensor,
    lengths: Tensor,
    options: ScoreOptions,
) -> Tensor:
    """Compute `attention.attend` with a compiled program."""
    q = q.contiguous()
    sequences, heads, head_dim = q.shape
    kv_heads, lanes = keys.codes.shape[2], _lanes()
    formats = tuple(_head_format(lanes, q.dtype, head_dim, pool.kind) for pool in (keys, values))
    heads_per_unit, program = _compile_attention(
        (formats[0], formats[1]), heads // kv_heads, options
    )
    max_tokens = page_table.shape[1] * PAGE_SIZE
    out, score_vectors = torch.empty_like(q), -(-max_tokens // lanes)
    scratch = torch.empty(
        sequences * heads * (score_vectors * lanes + head_dim), dtype=torch.float32
    )
    addresses = [value.data_ptr() for value in (q, page_table, lengths, out, scratch)]
    units = sequences * heads // heads_per_unit
    threads = torch.get_num_threads() if max_tokens * q.numel() > _MIN_PARALLEL_ELEMENTS else 1
    sizes = [page_table.stride(0), score_vectors, heads, kv_heads]
    pools = [*_tensor_addresses(keys), *_tensor_addresses(values)]
    program([0, units, threads, units, *addresses, *sizes, *pools])
    return out


def store_kv(
    new_kv: tuple[Tensor, Tensor],
    pools: tuple[EncodedKV, EncodedKV],
    slots: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Quantize new keys and values ``[tokens, kv_heads, head_dim]`` and store them in the cache.

    Args:
        new_kv: keys and values.
        pools: pages ``[pages, PAGE_SIZE, kv_heads, ...]`` of keys and of values.
        slots: int64 index of each token in the pages.
        scales: calibrated scales of keys and of values (`kv.expand_scale`), or None to compute them per token.
    """
    new_kv = (make_heads_contiguous(new_kv[0]), make_heads_contiguous(new_kv[1]))
    tokens, kv_heads, head_dim = new_kv[0].shape
    addresses = [value.data_ptr() for value in (*new_kv, slots)]
    strides = [value.stride(0) * value.element_size() for value in new_kv]
    arguments = [
        *addresses,
        *strides,
        kv_heads,
        *_tensor_addresses(pools[0]),
        *_tensor_addresses(pools[1]),
    ]
    arguments += [0 if scale is None else scale.data_ptr() for scale in scales]
    formats = [_head_format(_lanes(), new_kv[0].dtype, head_dim, pool.kind) for pool in pools]
    program = _compile_store(formats[0], formats[1], scales[0] is not None, scales[1] is not None)
    program([0, tokens, _threads(new_kv[0]), tokens, *arguments])


def _tensor_addresses(pool: EncodedKV) -> list[int]:
    tensors = (pool.codes, pool.scales, pool.minima)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@cache
def _head_format(lanes: int, dtype: torch.dtype, head_dim: int, kind: str) -> HeadFormat:
    from quantforge_kernels.cpu.cache_programs import HeadFormat

    return HeadFormat(
        dtype, lanes, head_dim // lanes, kind, channels_per_scale(head_dim, kind) // lanes
    )


def make_heads_contiguous(x: Tensor) -> Tensor:
    """Return ``[tokens, heads, head_dim]`` with contiguous heads; the stride between tokens may be larger."""
    heads_contiguous = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if heads_contiguous else x.contiguous()


def _lanes() -> int:
    instruction_set = best_instruction_set()
    assert instruction_set is not None
    return LANES[instruction_set]


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() > _MIN_PARALLEL_ELEMENTS else 1


@cache
def _compile_layer_program(instruction_set: str, lanes: int, *arguments: Any) -> Program:
    from quantforge_kernels.cpu import compiler, dense, layer_programs

    make: dict[str, Callable[..., Any]] = {
        "norm": layer_programs.build_add_rms_norm,
        "bias": layer_programs.build_add_bias,
        "gate": layer_programs.build_gate,
        "rotate": layer_programs.build_rotary,
        "linear": dense.build_linear,
    }
    return compiler.Program(
        make[instruction_set](*arguments, lanes, compiler.load_openmp()), instruction_set
    )


@cache
def _compile_linear(
    lanes: int, dtype: torch.dtype, rows: int, columns: int, bias: bool
) -> tuple[int, Program]:
    """Return the number of rows of a strip, and the program."""
    from quantforge_kernels.cpu.dense import choose_strip_rows, choose_unrolling

    strip_rows = choose_strip_rows(rows, dtype, lanes)
    unrolling = choose_unrolling(strip_rows, columns, dtype, lanes)
    return strip_rows, _compile_layer_program("linear", lanes, dtype, strip_rows, unrolling, bias)


@cache
def _compile_store(keys: HeadFormat, values: HeadFormat, *measured: bool) -> Program:
    from quantforge_kernels.cpu import compiler
    from quantforge_kernels.cpu.cache_programs import build_store as make

    module = make((keys, values), (measured[0], measured[1]), compiler.load_openmp())
    return compiler.Program(module, "store")


@cache
def _compile_attention(
    formats: tuple[HeadFormat, HeadFormat], group: int, options: ScoreOptions
) -> tuple[int, Program]:
    """Return the number of query heads of a unit of work, and the program."""
    from quantforge_kernels.cpu import cache_programs, compiler

    spec = cache_programs.AttentionSpec(
        *formats, group, options.scale, options.softcap, options.window
    )
    return spec.heads_per_unit, compiler.Program(
        cache_programs.build_attend(spec, compiler.load_openmp()), "attend"
    )
