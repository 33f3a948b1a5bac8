"""A model split over processes gives the logits of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quantforge.api import quantize
from quantforge.errors import RefusedError, UsageError
from quantforge.notation import parse
from quantforge.recipe import Recipe
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.kernel_weight import to_kernel_weight
from quantforge.runtime.load import load
from quantforge.runtime.tensor_parallel import TensorParallelRank, WeightShard, init_tensor_parallel
from quantforge.settings import Settings
from quantforge_kernels import fallback
from tests.quantized import random_tensor
from tests.runs import CALIBRATION
from tests.shares import load_part, run_on_ranks
from tests.thorough import mark_others_thorough, representative_families
from tests.unit.runtime.test_decoder import COMPUTED, COMPUTED_MIXTURES, filled, logits_of

HALF = TensorParallelRank(0, 2, lambda part: part)
CPU = torch.device("cpu")
# Norms over all heads of q and k, or one for each of them.
NORMS_OF_HEADS = ("olmo2", "olmo3", "stablelm-parallel")
SCHEMES = {
    "compressed-tensors": ("int4:g32:sym", "int8:row:sym", "int4:g32:asym", "nvfp4"),
    "gptq": ("int4:g32:asym",),
    "awq": ("int4:g32:asym",),
    "bnb": ("nf4:g64:sym:double",),
    "mlx": ("int4:g32:min",),
}


def shared_logits(path: Path, ranks: int = 2, kind: str = "") -> list[Tensor]:
    def work(share: TensorParallelRank) -> Tensor:
        decoder = Decoder(load_part(path, share).model)
        return logits_of(decoder, filled(decoder, kind), (50, 60, *range(61, 70)))

    return run_on_ranks(ranks, work)


def whole_logits(path: Path, kind: str = "") -> Tensor:
    decoder = Decoder(load(path).model)
    return logits_of(decoder, filled(decoder, kind), (50, 60, *range(61, 70)))


@pytest.fixture(scope="module")
def rounded(tiny, tmp_path_factory):
    """Return a function from a recipe to the directory of a rounded tiny llama."""

    @cache
    def make(family: str = "llama", **options: object) -> Path:
        out = tmp_path_factory.mktemp("shared") / "q"
        quantize(str(tiny(family)), Recipe(scales="absmax", **options), out, Settings())
        return out

    return make


@pytest.mark.parametrize(
    "family",
    representative_families(
        (name for name in COMPUTED if name not in COMPUTED_MIXTURES), "stablelm-parallel"
    ),
)
def test_two_ranks_give_the_logits_of_one(tiny, family):
    """Every family; sums of two parts differ from one sum by rounding in float32."""
    if family in NORMS_OF_HEADS:
        with pytest.raises(RefusedError, match="a norm of all heads"):
            shared_logits(tiny(family))
        return
    result = shared_logits(tiny(family))
    assert torch.equal(*result)
    torch.testing.assert_close(result[0], whole_logits(tiny(family)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format_key", "scheme"),
    mark_others_thorough(
        [(format_key, scheme) for format_key in SCHEMES for scheme in SCHEMES[format_key]],
        *(("compressed-tensors", scheme) for scheme in ("int4:g32:asym", "nvfp4")),
        *(("awq", "int4:g32:asym"), ("bnb", "nf4:g64:sym:double"), ("mlx", "int4:g32:min")),
    ),
)
def test_packed_weights_are_split_between_ranks(rounded, format_key, scheme):
    for family in ("llama", "llama-tied"):  # with biases and without
        path = rounded(family, scheme=scheme, format=format_key)
        result = shared_logits(path)
        assert torch.equal(*result)
        torch.testing.assert_close(result[0], whole_logits(path), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "k=int8,v=int4"])
def test_each_rank_caches_its_own_heads(tiny, kind):
    result = shared_logits(tiny("llama"), kind=kind)
    expected = whole_logits(tiny("llama"), kind)
    assert (result[0] - expected).norm() < 1e-2 * expected.norm()  # a last bit may move a code

    def entry_bytes(share: TensorParallelRank) -> int:
        return Decoder(load_part(tiny("llama"), share).model).cache_shape(kind).token_bytes

    whole = Decoder(load(tiny("llama")).model).cache_shape(kind).token_bytes
    assert run_on_ranks(2, entry_bytes) == [whole // 2] * 2


def test_each_rank_holds_half_of_the_block_weights(rounded):
    path = rounded(scheme="int4:g32:sym")
    whole = load(path)
    table = whole.model.get_input_embeddings().weight.nbytes * 2  # and the head, as large
    for held_bytes in run_on_ranks(2, lambda share: load_part(path, share).held_bytes):
        assert (
            (whole.held_bytes - table) / 2
            <= held_bytes - table
            <= 0.55 * (whole.held_bytes - table)
        )


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (4, {"scheme": "int4:g32:sym"}, "2 cannot be split over 4"),
        (2, {"scheme": "W8A8"}, "inputs are rounded by the range of a whole token"),
        (2, {"family": "mixtral", "scheme": "int4:g32:sym"}, "experts of a mixture are not split"),
        (2, {"family": "gpt2", "scheme": "int4:g32:sym"}, "not computed by the own decoder"),
    ],
)
def test_models_that_cannot_be_split_are_refused(rounded, ranks, options, message):
    with pytest.raises(RefusedError, match=message):
        load(rounded(**options), share=TensorParallelRank(0, ranks, lambda part: part))


@pytest.mark.parametrize(
    "scheme", ["int4:g32:sym", "int3:row:asym", "int8:tensor:sym", "fp8:32x32", "nvfp4", "mxfp8"]
)
def test_slice_of_a_packed_matrix_equals_the_decoded_slice(scheme):
    """Rows and columns of what the codes stand for, in the terms of the kernels."""
    from quantforge.packers import get_packer
    from quantforge.packers.tensor import QuantizedTensor

    rule = parse(scheme)
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    packer = get_packer(rule)
    parameters = packer.fit(weight, rule)
    tensor = QuantizedTensor(packer.encode(weight, parameters, rule), parameters, rule)
    whole, plain = to_kernel_weight(tensor, torch.float32, CPU), tensor.decode()
    for cut in (
        WeightShard("m", HALF, rows=(slice(0, 32), slice(64, 96))),
        WeightShard("m", HALF, columns=slice(64, 128)),
        WeightShard("m", HALF, rows=(slice(32, 64),), columns=slice(0, 64)),
    ):
        part = cut.slice_kernel_weight(whole)
        packed = fallback.KERNEL.prepare(part.codes, part.parameters, part.problem)
        eye = torch.eye(part.problem.in_features)
        result = fallback.KERNEL.matmul(eye, packed, part.problem).T
        expected = torch.cat([plain[run] for run in cut.rows]) if cut.rows else plain
        expected = expected[:, cut.columns] if cut.columns else expected
        assert torch.equal(result, expected)


def test_groups_and_tiles_are_never_cut():
    whole = to_kernel_weight(random_tensor("int4:g32:sym", (96, 128)), torch.float32, CPU)
    with pytest.raises(RefusedError, match="128 inputs in groups of 32 cannot be cut at 16 and 48"):
        WeightShard("m", HALF, columns=slice(16, 48)).slice_kernel_weight(whole)


def test_act_order_is_split_by_columns(tiny, tmp_path):
    """Files of other tools scatter the groups of a row over its columns; each column has its scale here."""
    from safetensors.torch import load_file, save_file

    quantize(
        str(tiny("llama")), Recipe(scheme="int4:g32:asym", format="gptq", scales="absmax"), tmp_path / "q", Settings()
    )  # fmt: skip
    file = tmp_path / "q/model.safetensors"
    tensors = load_file(file)
    for name, index in tensors.items():
        if name.endswith("g_idx"):
            order = torch.randperm(len(index), generator=torch.Generator().manual_seed(1))
            tensors[name] = index[order].contiguous()
    save_file(tensors, file, {"format": "pt"})
    for name in ("config.json", "quantize_config.json"):
        text = (tmp_path / "q" / name).read_text()
        (tmp_path / "q" / name).write_text(text.replace('"desc_act": false', '"desc_act": true'))
    result = shared_logits(tmp_path / "q")
    torch.testing.assert_close(result[0], whole_logits(tmp_path / "q"), rtol=1e-4, atol=1e-4)


def test_per_head_cache_scales_are_split_with_the_heads(tiny, tmp_path):
    recipe = Recipe(
        scheme="int4:g32:sym", kv_cache="fp8_head", scales="absmax", calibration=CALIBRATION
    )
    quantize(str(tiny("llama")), recipe, tmp_path / "q", Settings())
    whole = load(tmp_path / "q").kv_scales

    def scales(share: TensorParallelRank) -> Tensor:
        result = load_part(tmp_path / "q", share).kv_scales
        return torch.cat([part.flatten() for pair in result.values() for part in pair])

    first, second = run_on_ranks(2, scales)
    both = torch.stack((first, second), 1).flatten()
    assert torch.equal(
        both, torch.cat([part.flatten() for pair in whole.values() for part in pair])
    )


def test_tensor_parallel_without_launcher_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"over several processes: .*RANK") as refused:
        init_tensor_parallel("cpu")
    assert "torchrun" in refused.value.hint


def test_single_rank_holds_the_whole_model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert init_tensor_parallel("cpu") is None
    finally:
        dist.destroy_process_group()
