"""Matrix products do not depend on the number of threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from quantforge import api
from quantforge.numerics import products
from quantforge.numerics.products import tiled_linears, tiled_products
from quantforge.numerics.threads import Team, one_thread, reproducible, run_parallel
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import fast_recipe, recipe
from tests.thorough import thorough_case

PRODUCTS = ("mm", "bmm", "addmv", "mv", "dot", "einsum", "matmul", "linear", "linalg", "cholesky", "triangular",
            "dot_product", "conv", "lstsq", "inverse")  # fmt: skip
SUMS = ("sum", "mean", "norm", "std", "var", "prod", "linalg_vector_norm")
LARGE = 32_768  # elements: torch shares out no reduction that is smaller


def _matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Watch(TorchDispatchMode):
    """Notes what is computed on several threads although the threads could show in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.shared_out: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        product = name not in SUMS and any(part in name for part in PRODUCTS)
        self.seen += product
        summed = (
            name in SUMS
            and isinstance(result, Tensor)
            and result.numel() == 1
            and args[0].numel() >= LARGE
            and args[0].is_floating_point()
        )
        if (product or summed) and torch.get_num_threads() > 1:
            self.shared_out.append(f"{name} {[tuple(getattr(arg, 'shape', ())) for arg in args]}")
        return result


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do on this thread what is shared out, with as many of torch's threads as it would have."""

    def done(
        _: object,
        kind: str,
        workers: int,
        share: int,
        work: Callable[[Any], Any],
        parts: Sequence[Any],
    ) -> list[Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(share)
        try:
            return [work(part) for part in parts]
        finally:
            torch.set_num_threads(before)

    monkeypatch.setattr(Team, "map", done)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


NAMES = defaultdict(lambda: "out", gguf="out.gguf")  # of results, by format


@pytest.mark.parametrize(
    ("family", "method", "values"),
    [
        thorough_case("llama-wide", "gptq", {"scheme": "int3:g32:asym"}),
        thorough_case("llama-wide", "awq+gptq", {"calibration.source": "self"}),
        ("llama-wide", "smooth+gptq", {"scheme": "w8a8"}),
        ("llama-wide", "gptq", {"format": "gguf", "type": "Q4_0"}),
        thorough_case("llama-wide", "awq", {"lm_head": "int4:g32:sym"}),
        ("gemma2", "gptq", {"scheme": "int4:g32:sym"}),
        thorough_case("gpt2", "awq+gptq", {"scheme": "int4:g32:asym"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_run_uses_no_multithreaded_torch_products(
    family: str, method: str, values: dict[str, Any], tiny: Tiny, tmp_path: Path, in_turn: None, threads: Any
) -> None:  # fmt: skip
    run_recipe = fast_recipe(method) if method == "awq+gptq" else recipe(method)
    for key, value in values.items():
        group, _, option = key.rpartition(".")
        inner = replace(getattr(run_recipe, group), **{option: value}) if group else value
        run_recipe = replace(run_recipe, **{group or key: inner})
    with Watch() as watch:
        api.quantize(
            str(tiny(family)), run_recipe, tmp_path / NAMES[run_recipe.format], Settings(threads=8)
        )
    assert watch.seen > 100
    assert not watch.shared_out


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "nf4:g64", "format": "bnb"},
        {"scheme": "fp8_e4m3:row:sym", "format": "compressed-tensors"},
        {"scheme": "nvfp4", "format": "compressed-tensors"},
        {"format": "gguf", "type": "Q4_K_M"},
        {"format": "gguf", "type": "IQ4_NL", "scales": "absmax"},
    ],
    ids=lambda values: values.get("scheme", values.get("type")),
)
def test_plain_rounding_uses_no_multithreaded_torch_sums(
    values: dict[str, Any], tiny: Tiny, tmp_path: Path, in_turn: None, threads: Any
) -> None:
    path = tiny("llama-wide")
    out = tmp_path / NAMES[values["format"]]
    with Watch() as watch:
        api.quantize(str(path), recipe(**values), out, Settings(threads=8))
    assert not watch.shared_out


def test_imatrix_uses_no_multithreaded_torch_products(
    tiny: Tiny, tmp_path: Path, in_turn: None, threads: Any
) -> None:
    threads(8)
    with Watch() as watch:
        api.make_imatrix(str(tiny("llama-wide")), recipe(), tmp_path / "imatrix", Settings())
    assert watch.seen > 20
    assert not watch.shared_out


def test_watch_detects_multithreaded_operations(threads: Any) -> None:
    threads(2)
    with torch.inference_mode(), Watch() as watch:
        _matrix(4, 4) @ _matrix(4, 4)
        functional.linear(_matrix(4, 4), _matrix(4, 4))
        _matrix(4, 4).addmm_(_matrix(4, 4), _matrix(4, 4))
        _matrix(LARGE).sum()
        _matrix(3, LARGE).sum(1)
    assert [line.split()[0] for line in watch.shared_out] == [
        "matmul", "linear", "addmm_", "sum",
    ]  # fmt: skip


Products = dict[str, Callable[[], Tensor]]


def _products() -> Products:
    x, weight, bias = _matrix(3, 400, 300), _matrix(700, 300, seed=1), _matrix(700, seed=2)
    tall, query = _matrix(1000, 300, seed=3), _matrix(3, 4, 90, 32, seed=4)
    mask = torch.zeros(3, 1, 90, 90).masked_fill(_matrix(3, 1, 90, 90) > 1, -1e4)
    attend = functional.scaled_dot_product_attention
    return {
        "linear": lambda: functional.linear(x, weight),
        "linear with bias": lambda: functional.linear(x, weight, bias),
        "linear of one row": lambda: functional.linear(x[0, 0], weight, bias),
        "linear with one output": lambda: functional.linear(x, weight[0]),
        "linear by names": lambda: functional.linear(input=x, weight=weight, bias=bias),
        "linear, few rows": lambda: functional.linear(x[0, :2], weight.repeat(9, 1), bias.repeat(9)),
        "matmul": lambda: tall @ weight.T,
        "batches": lambda: x @ x.transpose(1, 2),
        "batches by name": lambda: torch.bmm(x, mat2=x.transpose(1, 2)),
        "matmul by name": lambda: torch.matmul(tall, other=weight.T),
        "batches that are spread": lambda: x @ x[:1].transpose(1, 2),
        "vector": lambda: tall @ weight[0],
        "addmm": lambda: torch.addmm(bias, tall, weight.T, beta=2, alpha=-0.5),
        "addmm by names": lambda: torch.addmm(bias, mat1=tall, mat2=weight.T, beta=2),
        "addmm_": lambda: _matrix(1000, 700, seed=5).addmm_(tall, weight.T, alpha=-2),
        "addmm_ wide": lambda: _matrix(300, 700, seed=5)[:, 20:].addmm_(tall[:300], weight.T[:, 20:]),
        "nothing": lambda: x[:, :0] @ weight.T,
        "attention of one head": lambda: attend(query[:, 0], query[:, 0], query[:, 0]),
        "attention by names": lambda: attend(query=query, key=query, value=query, attn_mask=mask),
        "causal attention": lambda: attend(query, query, query, is_causal=True),
        "attention": lambda: attend(query, query[:, :2], query[:, :2], mask, scale=0.3, enable_gqa=True),
    }  # fmt: skip


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("name", _products())
def test_products_are_those_of_torch_for_any_threads(
    name: str, onednn: bool, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: onednn)
    monkeypatch.setattr(products, "SETUP", 0)
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    monkeypatch.setattr(products, "SIDE", 64)
    product, results = _products()[name], []
    with torch.inference_mode():
        expected = product()
        for count in (1, 2, 5):
            threads(count)
            with reproducible(), tiled_products():
                results.append(product())
            assert torch.get_num_threads() == count
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-4)
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("onednn", [False, True], ids=["mkl", "onednn"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_linears_are_those_of_torch_for_any_threads(
    bias: bool, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: onednn)
    monkeypatch.setattr(products, "SETUP", 0)
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    monkeypatch.setattr(products, "SIDE", 64)
    shared: list[int] = []
    given_out = Team.map

    def mapped(self: Team, kind: str, workers: int, *rest: Any) -> list[Any]:
        shared.append(workers)
        return given_out(self, kind, workers, *rest)

    monkeypatch.setattr(Team, "map", mapped)
    weight, start = _matrix(300, 256), _matrix(300, seed=1) if bias else None
    upon = _matrix(2, 300, 300, seed=2)

    def both(threads: int) -> tuple[Tensor, Tensor]:
        with one_thread(), torch.enable_grad():
            x = _matrix(2, 300, 256, seed=3).requires_grad_()
            with tiled_linears(threads):
                outputs = functional.linear(x, weight, start)
            (gradients,) = torch.autograd.grad(outputs, [x], upon)
        return outputs.detach(), gradients

    expected = both(1)  # outside of `reproducible`, so torch's own
    for threads in (1, 2, 5):
        with reproducible():
            result = both(threads)
        if threads == 1:
            first = result
            for gradient, reference in zip(result, expected, strict=True):
                torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-3)
        assert all(map(torch.equal, result, first))
    assert shared == [2, 2, 5, 5]


def test_linears_with_weight_gradients_use_torch() -> None:
    x, weight = _matrix(2, 3, 4).requires_grad_(), _matrix(5, 4).requires_grad_()
    with reproducible(), tiled_linears(2), torch.enable_grad():
        functional.linear(x, weight).sum().backward()
    assert weight.grad is not None


def test_products_in_bfloat16_are_those_of_autocast(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    threads(2)
    x, weight, bias = _matrix(600, 256), _matrix(300, 256, seed=1), _matrix(300, seed=2)
    start = _matrix(600, 300, seed=3)
    in_place = start.clone()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = functional.linear(x, weight, bias=bias)
        with reproducible(), tiled_products():
            result = functional.linear(x, weight, bias=bias)
            in_place.addmm_(x, weight.T)
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(in_place, start + x @ weight.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("module", "name"), [(torch, "mm"), (products, "_onednn_linear")], ids=["mkl", "onednn"]
)
def test_large_products_are_computed_on_the_threads_of_the_run(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: module is products)
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    used, product = set(), getattr(module, name)

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        used.add((threading.get_ident(), torch.get_num_threads()))
        result: Tensor = product(*args, **kwargs)
        return result

    monkeypatch.setattr(module, name, noted)
    threads(2)
    with torch.inference_mode(), reproducible():
        for _ in range(50):
            products.matmul(_matrix(2000, 300), _matrix(300, 200))
    assert {share for _, share in used} == {1}
    assert {ident for ident, _ in used} > {threading.get_ident()}
    assert len(used) == 2


def test_own_products_work_inside_tiled_products(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    a, b, total = _matrix(700, 300), _matrix(300, 500, seed=1), torch.zeros(700, 500)
    for count in (1, 2):
        threads(count)
        with torch.inference_mode(), reproducible(), tiled_products():
            product = products.matmul(a, b)
            products.addmm_(total, a, b)
        torch.testing.assert_close(product, a @ b, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total, 2 * (a @ b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", ["strided", "transposed", "bfloat16", "nothing", "small"])
def test_onednn_is_not_used_for_slow_layouts(
    layout: str, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    """Seen: a thousandth of the speed for a weight with gaps between its rows, an error for one without columns."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn_linear", lambda *_: pytest.fail("asked"))
    a, b = _matrix(256, 128), _matrix(128, 128, seed=1)
    a, b = {
        "strided": (a, _matrix(128, 200)[:, :128]),
        "transposed": (_matrix(128, 256).T, b),
        "bfloat16": (a.bfloat16(), b.bfloat16()),
        "nothing": (a[:, :0].contiguous(), b[:0]),
        "small": (a[:8], b),
    }[layout]
    threads(2)
    with torch.inference_mode(), reproducible():
        assert products.matmul(a, b).shape == (len(a), 128)
        if layout in {"strided", "bfloat16"}:
            with tiled_products():
                functional.linear(a, b)


def test_onednn_sees_few_shapes_for_any_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps 0.4 MB for each: with 64 experts the peak of a run was 1.85 times that with 8."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    x, weight = _matrix(256, 300), _matrix(256, 300, seed=1)
    bias = _matrix(256, seed=2)
    whole = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    row_counts: set[int] = set()

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket is torch.ops.mkldnn._linear_pointwise:
                row_counts.add(len(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), reproducible(), tiled_products(), Asked():
        for rows in range(2, 257):
            result = functional.linear(x[:rows], weight, bias)
            torch.testing.assert_close(result, whole[:rows], rtol=1e-5, atol=1e-4)
    assert row_counts == {16, 24, *range(32, 257, 32)}  # of fewer MKL is asked


@pytest.mark.parametrize("columns", [300, 3000])
def test_tiles_have_layouts_that_onednn_handles_fast(
    columns: int, monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1 << 18)
    requested, product = [], products._onednn_linear

    def noted(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        requested.append(a.is_contiguous() and (b.is_contiguous() or b.T.is_contiguous()))
        return product(a, b, bias)

    monkeypatch.setattr(products, "_onednn_linear", noted)
    threads(2)
    a, b = _matrix(1000, 400), _matrix(400, columns, seed=1)
    with torch.inference_mode(), reproducible():
        for factor in (b, b.T.contiguous().T):
            torch.testing.assert_close(products.matmul(a, factor), a @ b, rtol=1e-4, atol=1e-3)
    assert len(requested) > 4
    assert all(requested)


def test_no_part_starts_after_another_failed(threads: Any) -> None:
    threads(2)
    started = []

    def work(part: int) -> int:
        started.append(part)
        if part == 3:
            raise IndexError(f"part {part}")
        return part

    with reproducible():
        with pytest.raises(IndexError, match="part 3"):
            run_parallel(work, range(100))
        assert 4 <= len(started) <= 5
        assert run_parallel(work, [0, 2, 1]) == [0, 2, 1]
    assert torch.get_num_threads() == 2
