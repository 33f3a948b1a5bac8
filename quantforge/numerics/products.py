"""Matrix products whose last bits do not depend on the number of threads.

A library shares a product out to its threads as it sees fit. Where it cuts the dimension that is summed over, or takes
another kernel for the shape that is left to each thread, the result depends on their number: seen with MKL on large
float32 products, on one and two threads of one machine. So each product is cut into tiles, which depend on its shape
alone, and each tile is computed on one thread. The other operations of a run compute each element, or sum each row, on
one thread anyway.

`matmul` and `addmm_` are for code of ours; `cutting` makes every product that torch is asked for such a one, for
transformers' code, and `cutting_linears` linears that gradients pass. This holds inside of
`quantforge.numerics.threads.reproducible`; outside, torch's own products are used.

torch has float32 products from MKL, which on processors of AMD are slower than oneDNN's, which it has as well (by a
fifth on one thread, see docs/results/speed-and-memory.md): there oneDNN computes those that it can take as they are.
It keeps code and plans for every shape that it was asked for, 0.4 MB each, up to 1024 of them, and experts differ in
their numbers of tokens: rows of zeros keep the shapes few, and change no bit of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.numerics.function_mode import Function, FunctionMode
from quantforge.numerics.threads import TEAMS, one_thread

LEAST = 1 << 27  # multiplications of a tile, a few milliseconds
SIDE = 256  # rows, or columns, of a tile
SETUP = 1 << 20  # multiplications that take longer than asking oneDNN for them
# oneDNN is asked for multiples of so many rows: of the second up to the first.
ROWS, FEW_ROWS = 32, 8
Job = Callable[[], object]  # computes one tile
Cut = tuple[Tensor, list[Job]]  # the result, and what fills it


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``."""
    found: Tensor = _computed(torch.matmul, (a, b), {})
    return found


def addmm_(out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1) -> None:
    """Add ``alpha * a @ b`` to ``out``; all are matrices."""
    _computed(torch.Tensor.addmm_, (out, a, b), {"alpha": alpha})


def cutting() -> AbstractContextManager[object]:
    """Compute every product of this thread as `matmul` does, inside of `reproducible`."""
    return _Mode() if TEAMS else nullcontext()


def _on_threads(threads: int, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """Return a product of torch's that is computed on so many threads, inside of `reproducible`."""
    found: Tensor = _computed(function, args, {}, threads)
    return found


class _Mode(FunctionMode):
    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _computed(function, args, kwargs)


def _computed(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    threads: int | None = None,
) -> Any:
    cut, names = CUTS.get(func, (None, ()))
    taken, options = [*args], dict(kwargs)
    for name in names[len(args) :]:
        if name not in options:
            break
        taken.append(options.pop(name))
    if cut is None or not TEAMS or not taken or taken[0].device.type != "cpu":
        return func(*args, **kwargs)
    if cut is not _addmm_:  # autocast leaves alone what is computed in place
        taken = [*map(_cast, taken)]
    # With a place for the result it is a tile itself, of a product of ours inside of `cutting`.
    found = None if "out" in options else cut(*taken, **options)
    threads = threads or torch.get_num_threads()
    if found is None:
        if threads == 1:
            return func(*args, **kwargs)
        with one_thread():
            return func(*args, **kwargs)
    result, jobs = found
    if threads == 1:
        for job in jobs:
            job()
    else:
        TEAMS[-1].map("tiles", threads, 1, torch.no_grad()(lambda job: job()), jobs)
    return result


def _cast(value: Any) -> Any:
    """Cast an argument as autocast would; autocast is active only on the thread that entered it."""
    if isinstance(value, Tensor) and value.is_floating_point() and torch.is_autocast_enabled("cpu"):
        return value.to(torch.get_autocast_dtype("cpu"))
    return value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cut | None:
    if x.dim() < 2 or weight.dim() != 2:
        return None
    found = _product(x.flatten(0, -2), weight.T, bias=bias)
    return found and (found[0].view(*x.shape[:-1], len(weight)), found[1])


def _matmul(a: Tensor, b: Tensor) -> Cut | None:
    if a.dim() >= 2 and b.dim() == 2:
        return _linear(a, b.T)
    if a.dim() < 3 or a.shape[:-2] != b.shape[:-2] or math.prod(a.shape) * b.shape[-1] < LEAST:
        return None
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    return out, [partial(torch.matmul, a[i], b[i], out=out[i]) for i in range(len(a))]


def _addmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Cut | None:
    return _product(a, b, start.expand(len(a), b.shape[1]), beta=beta, alpha=alpha)


def _addmm_(
    start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Cut | None:
    return _product(a, b, start, beta=beta, alpha=alpha, out=start)


def _product(
    a: Tensor,
    b: Tensor,
    start: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    **factors: float,
) -> Cut | None:
    """Plan ``a @ b`` of matrices, from ``start`` on: cut along the longer side of the result."""
    size = a.numel() * b.shape[1]
    onednn = start is None and size >= SETUP and _taken_by_onednn(a, b)
    tall = len(a) >= b.shape[1] or (onednn and not b.T.is_contiguous())
    length = len(a) if tall else b.shape[1]
    count = min(size // LEAST, length // SIDE)
    if count < 2:
        return (_by_onednn(a, b, bias), []) if onednn else None
    if bias is not None and not onednn:
        start = bias.expand(len(a), b.shape[1])
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    jobs: list[Job] = []
    for first in range(0, length, step := -(-length // count)):
        run = slice(first, first + step)
        tile = (run, slice(None)) if tall else (slice(None), run)
        factor = (a[run], b) if tall else (a, b[:, run])
        if onednn:
            jobs.append(partial(_fill, out[tile], *factor, bias if bias is None else bias[tile[1]]))
        elif start is None:
            jobs.append(partial(torch.mm, *factor, out=out[tile]))
        else:
            jobs.append(partial(torch.addmm, start[tile], *factor, **factors, out=out[tile]))
    return out, jobs


@cache
def _onednn_is_faster() -> bool:
    """Return whether oneDNN is faster at float32 products than MKL, as on AMD processors."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return (
        "AMD" in capabilities.get("cpu_name", "")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _taken_by_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN takes the factors as they are: it has no fast code for other layouts."""
    return (
        _onednn_is_faster()
        and a.dtype == b.dtype == torch.float32
        and a.is_contiguous()
        and (b.is_contiguous() or b.T.is_contiguous())
    )


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(a)
    more = -rows % (ROWS if rows > ROWS else FEW_ROWS)
    if rows > 1 and more:  # a single one is computed in another way, and ends in other last bits
        a = functional.pad(a, (0, 0, 0, more))
    with one_thread():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")
    return found[:rows]


def _fill(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    out.copy_(_by_onednn(a, b, bias))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Cut | None:
    """Plan attention of each row of the batch on its own.

    The result is laid out with tokens before heads, as the projection after it reads it.
    """
    if query.dim() != 4 or len(query) < 2:
        return None
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)

    def fill(i: int) -> None:
        row = slice(i, i + 1)
        each = attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1
        mask = attn_mask[row] if attn_mask is not None and each else attn_mask
        out[row] = functional.scaled_dot_product_attention(
            query[row], key[row], value[row], mask, **options
        )

    return out, [partial(fill, i) for i in range(batch)]


# Of each product what plans it, and torch's names of the tensors that it takes.
CUTS: dict[Callable[..., Any], tuple[Callable[..., Cut | None], Sequence[str]]] = {
    functional.linear: (_linear, ("input", "weight", "bias")),
    functional.scaled_dot_product_attention: (_attention, ("query", "key", "value", "attn_mask")),
    torch.matmul: (_matmul, ("input", "other")),
    torch.Tensor.matmul: (_matmul, ("self", "other")),
    torch.mm: (_matmul, ("input", "mat2")),
    torch.Tensor.mm: (_matmul, ("self", "mat2")),
    torch.bmm: (_matmul, ("input", "mat2")),
    torch.Tensor.bmm: (_matmul, ("self", "mat2")),
    torch.addmm: (_addmm, ("input", "mat1", "mat2")),
    torch.Tensor.addmm_: (_addmm_, ("self", "mat1", "mat2")),
}


def cutting_linears(threads: int) -> AbstractContextManager[object]:
    """Compute linears with frozen weights, and later the gradients of their inputs, on several threads.

    All else stays on this one. Weights must not change before gradients were taken.
    """
    return _Linears(threads) if TEAMS else nullcontext()


class _Linears(FunctionMode):
    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is functional.linear and len(args) > 1 and args[0].requires_grad:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1
            if plain and not any(one is not None and one.requires_grad for one in (weight, bias)):
                return _Linear.apply(x, weight, bias, self._threads)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)


class _Linear(torch.autograd.Function):
    """A linear without gradients of its weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
        ctx.weight, ctx.threads = weight, threads
        return _on_threads(threads, functional.linear, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _on_threads(ctx.threads, torch.matmul, *gradients, ctx.weight), None, None, None
