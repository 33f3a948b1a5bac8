"""The NLL through packed weights equals that through decoded ones on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quantforge.api import quantize
from quantforge.evaluation.divergence import score_reference
from quantforge.evaluation.text_windows import Windows, cut_windows
from quantforge.recipe import Recipe
from quantforge.runtime import linear
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge_kernels import fallback
from quantforge_kernels.cpu import instruction_sets
from quantforge_kernels.gpu import plane_products
from quantforge_kernels.matmul_spec import Kernel
from tests.conftest import make_tiny
from tests.evaluations import load_tokenizer

SHARED = Path(__file__).parents[4] / "shared"
WREN = SHARED / "models" / "wren"
TEXT = "the weights of the model are rounded to the nearest point of the grid; 1 + 1 = 2. " * 12
SCHEMES = {
    "int4:g32:sym": "compressed-tensors",
    "int8:row:sym": "compressed-tensors",
    "int3:g32:asym": "gptq_v2",
}
INTERPRETED = Kernel("triton-int", lambda _: True, plane_products.prepare, plane_products.matmul)


@pytest.fixture(scope="module", params=SCHEMES)
def quantized(request, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "model"
    recipe = Recipe(scheme=request.param, format=SCHEMES[request.param], scales="absmax")
    quantize(str(tiny("llama-tied")), recipe, out, Settings())
    return out


def decoded(model: nn.Module) -> nn.Module:
    """Replace packed layers by dense ones that hold what their codes stand for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            kept, problem = module.packed, module.problem
            weight = fallback.decode_rows(kept, problem, slice(None)).to(problem.dtype)
            dense = nn.Linear(problem.in_features, problem.out_features, bias=False)
            dense.weight = nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, dense)
    return model


def nll(model, windows: Windows) -> float:
    return score_reference(model, windows).scores.mean_nll.mean


def check(path, monkeypatch, dtype, kernel, windows) -> None:
    if kernel is not None:
        monkeypatch.setattr(linear, "select_kernel", lambda _problem: kernel)
    ours = nll(load(path, dtype=dtype).model, windows)
    monkeypatch.setattr(linear, "select_kernel", lambda _problem: fallback.KERNEL)
    exact = nll(decoded(load(path, dtype=dtype).model), windows)
    # In bfloat16 a product of packed weights is rounded once, one of decoded weights twice.
    assert abs(ours - exact) <= (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nll_through_packed_weights(quantized, monkeypatch, dtype):
    check(quantized, monkeypatch, dtype, None, cut_windows(load_tokenizer(quantized), TEXT, 2, 24))


def test_nll_through_the_kernels_of_a_gpu(tmp_path, monkeypatch):
    """Interpreted, which is slow: a few tokens through one block."""
    model, out = make_tiny("llama-tied", tmp_path / "m", num_hidden_layers=1), tmp_path / "q"
    quantize(str(model), Recipe(scheme="int4:g32:sym", scales="absmax"), out, Settings())
    windows = cut_windows(load_tokenizer(out), TEXT, 1, 5)
    check(out, monkeypatch, torch.float32, INTERPRETED, windows)


@pytest.mark.skipif(not WREN.is_dir(), reason="needs ../shared")
def test_nll_of_a_trained_model(tmp_path, monkeypatch):
    """In bfloat16, by the operators that speed is measured with: within 0.001 nats."""
    quantize(str(WREN), Recipe(scheme="int4:g128:sym", scales="absmax"), tmp_path / "q", Settings())
    windows = cut_windows(
        load_tokenizer(WREN), (SHARED / "data/wikitext-2/valid.txt").read_text(), 4, 128
    )
    loaded = load(tmp_path / "q", dtype=torch.bfloat16)
    assert (
        loaded.kernels[
            "reference" if instruction_sets.best_instruction_set() is None else "llvm-int"
        ]
        > 0.1
    )
    monkeypatch.setattr(linear, "select_kernel", lambda _problem: fallback.KERNEL)
    exact = nll(decoded(load(tmp_path / "q", dtype=torch.bfloat16).model), windows)
    assert abs(nll(loaded.model, windows) - exact) <= 1e-3


def test_nll_through_the_decoder(quantized):
    windows = cut_windows(load_tokenizer(quantized), TEXT, 2, 24)
    model = load(quantized).model
    decoder = Decoder(model, join=True)
    cache = decoder.cache(2, 24)
    for sequence in range(2):
        cache.reserve(sequence, 24)
    with torch.inference_mode():
        logs = decoder.logits(decoder.hidden(windows.ids, cache))[:, :-1].log_softmax(-1)
    result = -logs.gather(2, windows.targets[:, :, None]).double().mean().item()
    assert result == pytest.approx(nll(model, windows), abs=1e-5)
