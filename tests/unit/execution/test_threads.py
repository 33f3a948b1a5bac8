"""Work shared among threads, with results in order."""

import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api, settings
from quantforge.errors import InputError
from quantforge.execution import data_free
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.numerics.threads import BackgroundTask, in_order
from quantforge.packers import row_encoding
from quantforge.planning.recipe_options import build_recipe
from quantforge.quantizers.rtn import error_importance, round_matrices
from quantforge.recipe import Recipe, Rounding
from quantforge.scheme import LayerScheme
from quantforge.settings import MOST_WORKERS, Settings, rounding_workers
from tests import gguf_models
from tests.gguf_exports import NO_CALIBRATION


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whoever_is_ready_first(workers):
    def work(item):
        time.sleep(0.01 * (item % 3 == 0))
        return item * item, torch.get_num_threads()

    assert list(in_order(work, range(20), workers)) == [(item * item, 1) for item in range(20)]


def test_in_order_starts_few_items_ahead():
    started, before = [], torch.get_num_threads()
    with closing(in_order(started.append, range(100), 3)) as results:
        for _ in range(5):
            next(results)
        time.sleep(0.05)
        assert len(started) <= 5 + 2 * 3
    assert torch.get_num_threads() == before
    assert threading.active_count() < 50


def test_thread_error_is_raised_in_the_caller():
    def work(item):
        if item == 7:
            raise ValueError("seven")
        return item

    outputs = []
    with pytest.raises(ValueError, match="seven"), closing(in_order(work, range(20), 3)) as results:
        outputs.extend(results)
    assert outputs == list(range(7))


@pytest.mark.parametrize("workers", [1, 3])
def test_background_tasks_run_in_order_and_raise_errors(workers):
    done = []
    with BackgroundTask(workers) as background:
        for number in range(5):
            background.do(partial(done.append, number))
        background.wait()
        assert done == [*range(5)]
        background.do(partial(done.append, 5))
    assert done == [*range(6)]
    with (
        pytest.raises(ZeroDivisionError),
        BackgroundTask(workers) as background,
    ):  # at the next piece, or the end
        background.do(lambda: 1 / 0)


@pytest.mark.parametrize("format_key", ["compressed-tensors", "gguf"])
def test_nan_in_a_strip_is_reported_at_its_matrix_position(format_key, tmp_path, monkeypatch):
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 4096)
    model = gguf_models.make("llama", tmp_path / "m", torch.bfloat16)
    name, file = "model.layers.1.mlp.gate_proj.weight", model / "model.safetensors"
    tensors = load_file(file)
    rows, columns = tensors[name].shape
    tensors[name][rows - 2, 7] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    choices = {"format": format_key} | ({"type": "Q8_0"} if format_key == "gguf" else {"bits": 4})
    recipe = build_recipe(None, method="rtn", scales="absmax", **choices)
    out = tmp_path / ("x.gguf" if format_key == "gguf" else "out")
    with pytest.raises(InputError) as raised:
        api.quantize(str(model), recipe, out, Settings(threads=2))
    assert f"{name!r} holds nan at [{rows - 2}, 7] of [{rows}, {columns}]" in str(raised.value)


def test_damaged_tile_scale_is_reported_at_its_matrix_position(tiny, tmp_path, monkeypatch):
    source, name = tmp_path / "m", "model.layers.1.mlp.gate_proj.weight_scale_inv"
    source_recipe = build_recipe(
        None, method="rtn", scheme="fp8_e4m3:128x128", scales="absmax", format="fp8"
    )
    api.quantize(str(tiny("llama-wide")), source_recipe, source)
    (source / "quantforge.manifest.json").unlink()  # one that others have published
    tensors = load_file(source / "model.safetensors")
    assert tensors[name].shape == (2, 1)
    tensors[name][1, 0] = torch.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 1280)  # strips across the two tiles
    recipe = build_recipe(None, method="rtn", scheme="int8:row:sym", scales="absmax")
    with pytest.raises(InputError, match=f"{name}: scale inf of row 1, group 0"):
        api.quantize(str(source), recipe, tmp_path / "out")


def test_worker_count_follows_threads_or_processors(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(settings, "usable_processors", lambda: 5)
    assert rounding_workers(Settings()) == 5
    assert rounding_workers(Settings(threads=2)) == 2
    assert rounding_workers(Settings(threads=64)) == MOST_WORKERS
    assert rounding_workers(Settings(device="cuda")) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rounding_workers(Settings()) == 3


def test_thread_count_does_not_change_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 4096)  # many runs of a small model
    model = gguf_models.make("llama", tmp_path / "m", num_hidden_layers=1)
    files = []
    for threads in (1, 3):
        out = tmp_path / f"{threads}" / "x.gguf"
        out.parent.mkdir()
        recipe = Recipe(format="gguf", type="Q4_K_M", calibration=NO_CALIBRATION)
        api.export(str(model), recipe, out, Settings(threads=threads))
        files.append((out.read_bytes(), out.with_name("x.gguf.quantforge.json").read_bytes()))
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("format_key", "scheme"),
    [
        ("compressed-tensors", "int4:g64:sym"),
        ("compressed-tensors", "int3:g64:asym"),
        ("compressed-tensors", "fp8_e4m3:row+fp8_e4m3:token:dynamic"),
        ("gptq", "int4:g64:sym"),
        ("bnb", "nf4:g64"),
        ("compressed-tensors", "fp8_e4m3:128x128"),  # of tiles and whole matrices rows share scales
        ("compressed-tensors", "nvfp4"),
    ],
)
# By the compiled loops, and without.
@pytest.mark.parametrize("least", [1 << 12, row_encoding.COMPILED_FROM])
def test_rounding_in_strips_equals_rounding_the_whole_matrix(
    tiny, format_key, scheme, least, tmp_path, monkeypatch
):
    monkeypatch.setattr(row_encoding, "COMPILED_FROM", least)
    model, files = tiny("llama-wide"), []
    for elements, threads in ((1 << 30, 1), (4096, 1), (4096, 3)):
        monkeypatch.setattr(data_free, "STRIP_ELEMENTS", elements)
        out = tmp_path / f"{elements} {threads}"
        recipe = build_recipe(None, method="rtn", scheme=scheme, scales="absmax", format=format_key)
        api.quantize(str(model), recipe, out, Settings(threads=threads))
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("workers", [1, 3])
def test_events_of_strips_are_counted_together(workers, monkeypatch):
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 512)
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    weight[:, 40] = 1e4  # of one group in each row
    tensor = SimpleNamespace(name="w", scheme=LayerScheme(parse("q4_0")), matrix=(8, 256), heads=0)
    schemes, written = {"w": tensor.scheme.weight}, []
    matrix = data_free.StripRounding(
        tensor, lambda strip: round_matrices({"w": strip}, Statistics(), schemes, Recipe())["w"],
        lambda first, last: weight[first:last].clone(),
        lambda first, tensor: written.append((first, len(tensor.codes))),
    )  # fmt: skip
    ((_, record),) = data_free.round_in_strips([matrix], workers)
    assert written == [(0, 2), (2, 2), (4, 2), (6, 2)]
    (event,) = record["events"]
    assert event["kind"] == "group-outlier"
    assert event["detail"].startswith("8 groups of 32 ")


@pytest.mark.parametrize("scales", ["search", "reference"])
def test_error_over_strips_equals_error_of_the_matrix(scales, monkeypatch):
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 512)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 256, generator=generator)
    weight[:4, :32] *= 30  # what matters is large in one half of the rows, and rounded worse
    squares = torch.rand(256, generator=generator)
    squares[:32] *= 1e4
    tensor = SimpleNamespace(name="w", scheme=LayerScheme(parse("q4_0")), matrix=(8, 256), heads=0)
    schemes = {"w": tensor.scheme.weight}
    rounding, statistics = Rounding(scales=scales), Statistics(tokens=1, squares=squares)

    def rounded(rows):
        return round_matrices({"w": rows}, statistics, schemes, rounding)["w"]

    matrix = data_free.StripRounding(
        tensor, rounded, lambda first, last: weight[first:last].clone(),
        lambda first, tensor: None, error_importance(statistics, rounding),
    )  # fmt: skip
    ((_, record),) = data_free.round_in_strips([matrix])
    whole = rounded(weight.clone()).figures["error"]
    assert record["metrics"]["w"]["error"] == pytest.approx(whole, rel=1e-5)


def test_matrices_overlap_between_workers(monkeypatch):
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 512)
    met, schemes = threading.Barrier(2, timeout=20), {"w": parse("int4:g32:sym")}

    def matrix(name):
        def read(first, last):
            if (name, first) in {("a", 6), ("b", 0)}:  # neither ends before both have begun
                met.wait()
            return torch.ones(last - first, 256)

        def rounded(rows):
            return round_matrices({"w": rows}, Statistics(), schemes, Rounding())["w"]

        tensor = SimpleNamespace(name=name, matrix=(8, 256), heads=0)
        return data_free.StripRounding(
            tensor, rounded, read, lambda first, strip: written.append((name, first))
        )

    written: list[tuple[str, int]] = []
    result = data_free.round_in_strips(map(matrix, "ab"), 2)
    assert [item.tensor.name for item, _ in result] == ["a", "b"]
    assert written == [(name, first) for name in "ab" for first in (0, 2, 4, 6)]
