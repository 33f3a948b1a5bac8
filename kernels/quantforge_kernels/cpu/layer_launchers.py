"""Launchers of the programs for layers: norm, bias, gate, rotary, dense products, attention and its cache.

A launcher takes what its ``accepts...`` says; everything else is left to plain torch, in `layers` and
`attention`, where the definitions are too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge_kernels.cpu import many_rows
from quantforge_kernels.cpu.features import LANES, feature
from quantforge_kernels.kv import PAGE, Store
from quantforge_kernels.kv_runs import run_of

if TYPE_CHECKING:
    from quantforge_kernels.attention import Scores
    from quantforge_kernels.cpu.cache_programs import Entries
    from quantforge_kernels.cpu.compiler import Program

_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
# Most rows of a dense product of ours; more are torch's work, by way of `many_rows`.
DENSE_ROWS = {torch.bfloat16: 32, torch.float16: 48, torch.float32: 16}
LARGE = 1 << 23  # weights, of which 16 lanes multiply more rows
LARGE_ROWS = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 32}
NATIVE_ROWS = 8  # likewise, where torch has instructions of the processor for 16 bits
_SHARED = 1 << 15  # numbers that are worth a second thread


def accepts(width: int, *values: Tensor) -> bool:
    """Return whether programs compute with these tensors.

    They have to be of one floating type, on a processor with vectors, with neighbouring numbers in their last
    dimension, and whole vectors have to fill ``width`` (of a row, a head or half a head).
    """
    first, name = values[0], feature()
    return (
        first.device.type == "cpu"
        and first.dtype in _TYPES
        and all(value.dtype == first.dtype and value.stride(-1) == 1 for value in values)
        and name is not None
        and width % LANES[name] == 0
        and first.numel() > 0
    )


def accepts_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `linear` multiplies this: a few rows."""
    more = () if bias is None else (bias,)
    return (
        len(x) <= dense_rows(x, weight)
        and accepts(x.shape[-1], x, weight, *more)
        and weight.is_contiguous()
        and len(weight) % _lanes() == 0
    )


def dense_rows(x: Tensor, weight: Tensor) -> int:
    """Return the most rows that `linear` multiplies."""
    if x.dtype != torch.float32 and many_rows.computes(x):
        return NATIVE_ROWS
    large = weight.numel() >= LARGE and feature() is not None and _lanes() == 16
    return (LARGE_ROWS if large else DENSE_ROWS).get(x.dtype, 0)


def accepts_cache(head: int, kinds: tuple[str, str], *values: Tensor) -> bool:
    """Return whether `attend` and `store` take queries, or keys and values, of a cache of two kinds."""
    halves = 2 if "int4" in kinds else 1
    return accepts(head // halves, *values)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Normalise a sum (as `layers.add_norm`)."""
    x = side_by_side(x) if x.dim() == 3 and residual is None else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(out)
    other = x if residual is None else residual.contiguous()
    rows, lanes = x.numel() // len(weight), _lanes()
    addresses = [value.data_ptr() for value in (x, other, weight, out, total)]
    side = x.shape[1] if x.dim() == 3 else 1
    sizes = [len(weight) // lanes, side, x.stride(0) * x.element_size()]
    program = _compiled("norm", lanes, x.dtype, epsilon, offset, residual is not None)
    program([0, rows, _threads(x), rows, *addresses, *sizes])
    return out, total


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to rows, in place (as `layers.add_bias`)."""
    (rows, width), lanes = y.shape, _lanes()
    sizes = [y.stride(0) * y.element_size(), width // lanes]
    _compiled("bias", lanes, y.dtype)(
        [0, rows, _threads(y), rows, y.data_ptr(), bias.data_ptr(), *sizes]
    )
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a weight that is not quantized (as `layers.linear`)."""
    x, lanes = x.contiguous(), _lanes()
    (rows, columns), width = x.shape, len(weight)
    y = x.new_empty(rows, width)
    tiles = width // lanes
    given = (x, weight, x if bias is None else bias, y)
    words = [0, tiles, _threads(weight), rows, *(value.data_ptr() for value in given)]
    together, program = _dense(lanes, x.dtype, rows, columns, bias is not None)
    program([*words, columns // lanes, tiles, -(-rows // together)])
    return y


def gate(gates: Tensor, ups: Tensor, tanh: bool) -> Tensor:
    """Multiply by a gate of rows ``[rows, width]`` (as `layers.silu_gate` and, for ``tanh``, `layers.gelu_gate`)."""
    (rows, width), lanes = gates.shape, _lanes()
    out = gates.new_empty(rows, width)
    addresses = [value.data_ptr() for value in (gates, ups, out)]
    strides = [value.stride(0) * value.element_size() for value in (gates, ups)]
    words = [0, rows, _threads(gates), rows, *addresses, *strides, width // lanes]
    _compiled("gate", lanes, gates.dtype, tanh)(words)
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate whole heads (as `layers.rotate`)."""
    x, cosine, sine = side_by_side(x), cosine.contiguous(), sine.contiguous()
    (tokens, heads, head), lanes = x.shape, _lanes()
    out = torch.empty(x.shape, dtype=x.dtype)
    addresses = [value.data_ptr() for value in (x, cosine, sine, out)]
    sizes = [x.stride(0) * x.element_size(), heads, head // 2 // lanes]
    _compiled("rotate", lanes, x.dtype)([0, tokens, _threads(x), tokens, *addresses, *sizes])
    return out


def attend(
    q: Tensor, keys: Store, values: Store, table: Tensor, lengths: Tensor, scores: Scores
) -> Tensor:
    """Attend to the cache (as `attention.attend`)."""
    q = q.contiguous()
    sequences, heads, head = q.shape
    kv_heads, lanes = keys.codes.shape[2], _lanes()
    forms = tuple(_entries(lanes, q.dtype, head, part.kind) for part in (keys, values))
    together, program = _attention((forms[0], forms[1]), heads // kv_heads, scores)
    most = table.shape[1] * PAGE
    out, room = torch.empty_like(q), -(-most // lanes)
    scratch = torch.empty(sequences * heads * (room * lanes + head), dtype=torch.float32)
    addresses = [value.data_ptr() for value in (q, table, lengths, out, scratch)]
    units = sequences * heads // together
    threads = torch.get_num_threads() if most * q.numel() > _SHARED else 1
    sizes = [table.stride(0), room, heads, kv_heads]
    pools = [*_addresses(keys), *_addresses(values)]
    program([0, units, threads, units, *addresses, *sizes, *pools])
    return out


def store(
    given: tuple[Tensor, Tensor],
    pools: tuple[Store, Store],
    slots: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Put keys and values ``[tokens, kv_heads, head]`` into ``slots`` (int64) of ``[pages, PAGE, kv_heads, ...]``.

    ``scales``: of keys and of values, measured before, see `kv.spread`; None where each token has its own.
    """
    given = (side_by_side(given[0]), side_by_side(given[1]))
    tokens, kv_heads, head = given[0].shape
    addresses = [value.data_ptr() for value in (*given, slots)]
    strides = [value.stride(0) * value.element_size() for value in given]
    words = [*addresses, *strides, kv_heads, *_addresses(pools[0]), *_addresses(pools[1])]
    words += [0 if scale is None else scale.data_ptr() for scale in scales]
    forms = [_entries(_lanes(), given[0].dtype, head, pool.kind) for pool in pools]
    program = _storing(forms[0], forms[1], scales[0] is not None, scales[1] is not None)
    program([0, tokens, _threads(given[0]), tokens, *words])


def _addresses(pool: Store) -> list[int]:
    parts = (pool.codes, pool.scales, pool.lows)
    return [0 if part is None else part.data_ptr() for part in parts]


@cache
def _entries(lanes: int, dtype: torch.dtype, head: int, kind: str) -> Entries:
    from quantforge_kernels.cpu.cache_programs import Entries

    return Entries(dtype, lanes, head // lanes, kind, run_of(head, kind) // lanes)


def side_by_side(x: Tensor) -> Tensor:
    """Return ``[tokens, heads, head]`` whose heads follow each other; tokens may be apart."""
    whole = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if whole else x.contiguous()


def _lanes() -> int:
    name = feature()
    assert name is not None
    return LANES[name]


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() > _SHARED else 1


@cache
def _compiled(name: str, lanes: int, *form: Any) -> Program:
    from quantforge_kernels.cpu import compiler, dense, layer_programs

    make: dict[str, Callable[..., Any]] = {
        "norm": layer_programs.norm,
        "bias": layer_programs.bias,
        "gate": layer_programs.gate,
        "rotate": layer_programs.rotate,
        "linear": dense.linear,
    }
    return compiler.Program(make[name](*form, lanes, compiler.openmp()), name)


@cache
def _dense(
    lanes: int, dtype: torch.dtype, rows: int, columns: int, bias: bool
) -> tuple[int, Program]:
    """Return the rows of a strip, and the program."""
    from quantforge_kernels.cpu.dense import cut, strip

    together = strip(rows, dtype, lanes)
    parts = cut(together, columns, dtype, lanes)
    return together, _compiled("linear", lanes, dtype, together, parts, bias)


@cache
def _storing(keys: Entries, values: Entries, *measured: bool) -> Program:
    from quantforge_kernels.cpu import compiler
    from quantforge_kernels.cpu.cache_programs import store as make

    module = make((keys, values), (measured[0], measured[1]), compiler.openmp())
    return compiler.Program(module, "store")


@cache
def _attention(both: tuple[Entries, Entries], group: int, scores: Scores) -> tuple[int, Program]:
    """Return the query heads of a unit of work, and the program."""
    from quantforge_kernels.cpu import cache_programs, compiler

    form = cache_programs.PagedForm(*both, group, scores.scale, scores.cap, scores.window)
    return form.together, compiler.Program(cache_programs.attend(form, compiler.openmp()), "attend")
