"""Allocation on the bundled model: measured errors, requested sizes and early refusals."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from quantforge import api
from quantforge.errors import BusyError, InputError, QuantForgeError, RefusedError, UsageError
from quantforge.execution import candidate_errors
from quantforge.files.lock import Lock
from quantforge.planning.allocation import MixtureSearch
from quantforge.planning.capacity import Load
from quantforge.planning.recipe_options import build_recipe
from quantforge.planning.size_target import parse_target
from quantforge.plans import Serving
from quantforge.settings import Settings
from tests import headers
from tests.runs import copy_model, interrupt_measurement, keep_first_blocks, run_command

DEMO = Path(__file__).parents[3] / "models/demo"
ROWS = {
    "samples": 4, "length": 64, "calibration": "builtin",
    "candidates": ("int2:g64:asym", "int3:g128:sym", "int4:g128:sym"),
}  # fmt: skip

SIZES = {  # of the model
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


FEW = {"samples": 2, "length": 32}


def allocated(target="3.4bpw", out=None, settings=None, *, model=DEMO, **options):
    return api.allocate(
        model, target, out, settings=settings or Settings(threads=1), **ROWS | options
    )


@pytest.fixture
def small(tiny):
    """Return a random model, which is measured in a tenth of the time."""
    return tiny("llama-wide")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return the first half of a trained model."""
    directory = tmp_path_factory.mktemp("half") / "model"
    return keep_first_blocks(copy_model(DEMO, directory), 2)


@pytest.fixture(scope="module")
def allocation(half, tmp_path_factory):
    path = tmp_path_factory.mktemp("allocated") / "mixed.toml"
    return allocated(out=path, model=half), path


def test_recipe_reaches_the_requested_size(allocation, half, tmp_path):
    result, path = allocation
    assert 0.995 * 3.4 <= result.bits <= 3.4
    outcome = api.quantize(half, path, tmp_path / "out")
    files = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert outcome.plan.bits_per_weight == pytest.approx(result.bits)
    assert files == pytest.approx(result.nbytes, rel=1e-3)  # headers have other lengths
    schemes = {str(tensor.scheme) for tensor in outcome.plan.quantized()}
    assert len(schemes) == 3


def test_planned_bits_in_blocks_are_reported_with_quantized_head(small, tmp_path, capsys):
    out, model = tmp_path / "mixed.toml", str(small)
    options = ("--samples", "2", "--length", "32", "--lm-head", "int8",
             "--candidates", "int3:g64:sym,int4:g64:sym")  # fmt: skip
    stdout = run_command(capsys, "allocate", model, "--target", "3.6bpw", "-o", out, *options).out
    assert "bits in blocks" in stdout
    (planned,) = re.findall(r"the recipe +(3\.[56]\d\d) ", stdout)
    assert f"# planned: {planned} bits per weight in blocks" in out.read_text()
    plan = api.plan(small, out)
    assert plan.bits_per_weight > plan.bits_per_weight_in_blocks
    assert f", {planned} in blocks (" in plan.density
    quantized = run_command(capsys, "quantize", model, "--recipe", out, "-o", tmp_path / "out")
    assert f", {planned} in blocks (" in quantized.err
    alone = api.plan(small, bits=4, ignore=["*.layers.*"], lm_head="int8")
    assert "none in blocks" in alone.density
    assert "all in blocks" in api.plan(DEMO, bits=4).density


def test_mixture_loses_less_than_uniform_schemes(allocation):
    result, _ = allocation
    sizes = sorted((bits, nats) for _, bits, nats in result.uniform.values())
    assert [nats for _, nats in sizes] == sorted((nats for _, nats in sizes), reverse=True)
    below, above = (
        max(size for size in sizes if size[0] <= result.bits),
        min(size for size in sizes if size[0] > result.bits),
    )
    share = (result.bits - below[0]) / (above[0] - below[0])
    between = below[1] ** (1 - share) * above[1] ** share
    assert 0.3 * between < result.nats < 0.95 * between
    assert all(a[1] > b[1] for a, b in zip(result.front, result.front[1:], strict=False))


def test_linears_that_engines_join_get_one_scheme(allocation, small):
    result, _ = allocation
    assert any(len(group) == 3 for group in result.groups)
    assert any(
        {name.rpartition(".")[2] for name in group} == {"gate_proj", "up_proj"}
        for group in result.groups
    )
    apart = allocated("4.7bpw", model=small, format="gguf", candidates=("q4_0", "q5_0"), **FEW)
    assert all(len(group) == 1 for group in apart.groups)
    assert apart.recipe.scheme in {"q4_0", "q5_0"}
    types = {
        tensor.scheme.weight.grid
        for tensor in api.plan(small, apart.recipe).quantized()
        if tensor.block >= 0
    }
    assert types == {"q4_0", "q5_0"}


@pytest.mark.thorough
def test_allocation_is_the_same_for_any_thread_count(small, tmp_path):
    path = tmp_path / "mixed.toml"
    options = {"model": small, "candidates": ("int3:g64:sym", "int4:g64:sym")}
    allocation = allocated(out=path, **options)
    two = allocated(settings=Settings(threads=2), **options)
    torch.set_num_threads(1)
    assert two.recipe == allocation.recipe
    assert two.uniform == allocation.uniform
    assert path.read_bytes() == two.written()
    assert build_recipe(str(path)) == two.recipe


def test_size_in_bytes_is_met_with_given_candidates(small):
    allocation = allocated("310kB", model=small, candidates=("int3:g64:sym", "int4:g64:sym"), **FEW)
    assert 0.98 * 310e3 <= allocation.nbytes <= 310e3  # of few matrices
    written = api.plan(small, allocation.recipe).output_bytes
    assert written == allocation.nbytes  # with the rules that are in headers
    assert {*allocation.chosen} <= {"int3:g64:sym", "int4:g64:sym"}


@pytest.mark.thorough
def test_memory_target_counts_the_cache_as_plan_does(tmp_path):
    """`plan` says of the same memory and context that the recipe fits, and of a larger context that it does not."""
    path = tmp_path / "mixed.toml"
    settings = Settings(threads=1, serving=Serving(cache="fp8"))
    allocation = allocated(
        "15.7MB@2x512",
        path,
        settings,
        candidates=("int3:g64:sym", "int4:g64:sym"),
        **FEW,
    )
    assert len({*allocation.chosen}) == 2
    plan, use = api.capacity(DEMO, Load(512, 2, "fp8"), path)
    assert 0 <= 0.9 * 15.7e6 - use.needed_bytes() < 0.005 * use.weights_bytes
    assert plan.output_bytes == allocation.nbytes


def test_impossible_memory_target_hints_at_possible_sizes():
    with pytest.raises(RefusedError, match="16MB@1024: it is below the smallest") as refused:
        allocated("16MB@1024")
    assert "as it is 9" in refused.value.hint  # hundreds of tokens
    least = re.search(r"from (\S+) to (\S+) ", refused.value.hint)
    for text in least.groups():  # what the hint says can be typed
        parse_target(text)
    with pytest.raises(RefusedError, match="above the largest") as refused:
        allocated("24GB@1024")
    assert "for all of it fits without a size" in refused.value.hint
    with pytest.raises(UsageError, match="has 1,024 positions"):
        allocated("24GB@32k")


@pytest.fixture(scope="module")
def published_file(tiny, tmp_path_factory):
    """A file that somebody has made of the small model."""
    path = tmp_path_factory.mktemp("theirs") / "their.gguf"
    api.quantize(tiny("llama-wide"), out=path, method="rtn", type="Q4_1", scales="absmax")
    return path


@pytest.mark.thorough
def test_like_takes_the_size_of_a_published_file(published_file, small):
    allocation = allocated(
        None, model=small, like=published_file, candidates=("q4_0", "q5_0"), **FEW
    )
    size = published_file.stat().st_size
    assert allocation.recipe.format == "gguf"
    assert 0.98 * size <= allocation.nbytes <= size  # of few matrices
    assert allocation.target == str(published_file)
    assert api.plan(small, allocation.recipe).output_bytes == allocation.nbytes
    with pytest.raises(
        RefusedError, match=rf"--like their.gguf \({size:,} bytes\): it is below"
    ) as refused:
        allocated(None, model=small, like=published_file, candidates=("q5_1", "q8_0"))
    assert "from " in refused.value.hint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 512}, "model.embed_tokens.weight is 512 x 256 there and 4096 x 256 here"),
        ({"intermediate_size": 512}, r"model.layers.0.mlp.\S+ is .*512.* there and .*768.* here"),
        ({"num_hidden_layers": 3}, "it has no model.layers.3"),
        ({"num_hidden_layers": 5}, r"model.layers.4.\S+ \(.*\) is not in this one"),
    ],
)
def test_like_refuses_another_model_naming_the_first_difference(changed, message, tmp_path):
    with pytest.raises(
        RefusedError, match=f"--like other: it is another model: {message}"
    ) as refused:
        allocated(None, like=headers.llama(tmp_path / "other", **SIZES | changed))
    assert "--target" in refused.value.hint


def test_like_refuses_missing_and_malformed_files(published_file, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        allocated(None, like=tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("text")
    with pytest.raises(InputError, match="GGUF"):
        allocated(None, like=tmp_path / "text.gguf")
    with pytest.raises(UsageError, match="two sizes"):
        allocated("3bpw", like=published_file)
    with pytest.raises(UsageError, match="no size"):
        allocated(None)


def test_matrices_that_share_a_scale_are_measured_together(small, tmp_path):
    """NVFP4 has one scale for matrices that engines join; the errors are those of the run, which rounds all rows."""
    allocation = allocated(
        "7bpw",
        tmp_path / "mixed.toml",
        model=small,
        candidates=("nvfp4", "fp8_e4m3:row:sym", "int3:g64:sym"),
        **FEW,
    )
    assert {"nvfp4", "fp8_e4m3:row:sym"} <= {*allocation.chosen}
    outcome = api.quantize(small, tmp_path / "mixed.toml", tmp_path / "out")
    assert outcome.plan.bits_per_weight == pytest.approx(allocation.bits)
    assert 0.995 * 7 <= allocation.bits <= 7
    nats = {name: item[2] for name, item in allocation.uniform.items()}
    assert nats["fp8_e4m3:row:sym"] < nats["nvfp4"] < nats["int3:g64:sym"]


@pytest.mark.thorough
def test_sampled_rows_rank_candidates_like_all_rows(half, monkeypatch):
    """Shortcuts are taken only as long as Kendall's tau says that they change no order to speak of."""
    results = []
    for gradients, outputs in ((1 << 20, 1 << 20), (4, 64)):
        monkeypatch.setattr(candidate_errors, "GRADIENT_ROWS", gradients)
        monkeypatch.setattr(candidate_errors, "OUTPUT_ROWS", outputs)
        monkeypatch.setattr(MixtureSearch, "best_allocation", lambda _, nats: nats)
        results.append(
            allocated(model=half, samples=2, length=128, candidates=ROWS["candidates"][1:])
        )
    whole, part = results
    assert whole.keys() == part.keys()
    assert whole != part
    for index in range(2):
        pairs = itertools.combinations(
            [(whole[item][index], part[item][index]) for item in whole], 2
        )
        agree = [1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in pairs]
        assert sum(agree) / len(agree) >= 0.9  # 0.99 with as many rows as it really takes


def test_interrupted_measurement_resumes(tiny, tmp_path, monkeypatch):
    options = {"model": tiny("llama"), "candidates": ("int3:g32:sym", "int4:g32:sym"), **FEW}
    allocation = allocated("3.9bpw", **options)
    seen = interrupt_measurement(monkeypatch)
    path = tmp_path / "mixed.toml"
    with pytest.raises(KeyboardInterrupt):
        allocated("3.9bpw", path, **options)
    (kept,) = tmp_path.iterdir()
    assert kept.name[:10] == ".allocate-"
    other = Lock(kept)
    other.acquire()
    with pytest.raises(BusyError, match="measures the same candidates"):
        allocated("3.9bpw", path, **options)
    other.release()
    monkeypatch.setattr(candidate_errors, "compute_token_weights", None)  # they are there
    again = allocated("4.1bpw", path, **options)  # another size needs the same
    assert seen == [0, 1, 2, 2]
    assert again.uniform == allocation.uniform
    assert [path.name for path in tmp_path.iterdir()] == ["mixed.toml"]


@pytest.mark.parametrize(
    ("target", "options", "kind", "message"),
    [
        ("1bpw", {}, RefusedError, "below the smallest"),
        ("12bpw", {}, RefusedError, "above the largest"),
        ("3bpw", {"bits": 4}, UsageError, "--candidates"),
        ("3bpw", {"method": "awq"}, UsageError, "gptq alone"),
        ("3bpw", {"guided_hessians": 2}, UsageError, "guided-hessians"),
        ("3bpw", {"candidates": ("int4:g64:sym",)}, UsageError, "two candidates"),
        ("3bpw", {"candidates": ("keep", "int4:g64:sym")}, UsageError, "--ignore PATTERN"),
        ("3bpw", {"candidates": ("int3:g64:sym", "q4_k")}, QuantForgeError, ""),
        ("3.5bpw", {"format": "gptq"}, RefusedError, "no mixture of int2:g64:asym"),
        ("3.5bpw", {"engine": "vllm", "candidates": ()}, RefusedError, "4 and 8 bits only"),
        ("5bpw", {"engine": "vllm"}, RefusedError, "--candidates int2:g64:asym: vllm does not"),
        ("5bpw", {"engine": "lmdeploy", "candidates": ()}, RefusedError, "fewer than two"),
        ("5bpw", {"engine": "tensorrt-llm", "candidates": ()}, RefusedError, "reads no integers"),
        ("5bpw", {"engine": "nope"}, UsageError, "unknown engine"),
        ("5bpw", {"engine": "vllm", "bits": 4}, UsageError, "--candidates"),
        (
            "4.2bpw",
            {
                "engine": "lmdeploy",
                "format": "compressed-tensors",
                "candidates": ("int4:g32:sym", "int4:g128:sym"),
            },
            RefusedError,
            "one group of the configuration",
        ),
    ],
)
def test_refusals(target, options, kind, message, tmp_path):
    with pytest.raises(kind) as raised:
        allocated(target, tmp_path / "mixed.toml", **options)
    assert message in f"{raised.value} {raised.value.hint}"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("engine", "key", "candidates"),
    [
        ("vllm", "compressed-tensors", ()),
        ("llama.cpp", "gguf", ("q4_0", "q8_0")),
        ("mlx", "mlx", ("int4:g64:min", "int8:g64:min")),
    ],
)  # fmt: skip
def test_engine_target_chooses_a_loadable_format_and_mixture(
    engine, key, candidates, small, tmp_path
):
    path = tmp_path / "mixed.toml"
    allocation = allocated("5bpw", path, model=small, engine=engine, candidates=candidates, **FEW)
    assert (allocation.recipe.format, allocation.recipe.engine) == (key, engine)
    assert len({*allocation.chosen}) > 1
    plan = api.plan(small, path)  # raises where the engine does not load it
    assert plan.engines == allocation.engines
    assert {engine.engine: engine.loads for engine in allocation.engines}[engine]


def test_allocation_reports_which_engines_load_it(allocation):
    result, _ = allocation
    loads = {engine.engine: engine.loads for engine in result.engines}
    assert not loads["vllm"]  # 2 and 3 bits
    assert result.document()["engines"][1]["reason"]


def test_existing_recipe_file_is_not_overwritten(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text("mine")
    with pytest.raises(QuantForgeError, match="exists"):
        allocated(out=path)
    assert path.read_text() == "mine"
