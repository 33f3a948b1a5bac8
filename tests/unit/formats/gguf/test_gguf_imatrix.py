"""Importance matrices: both file layouts of llama.cpp, written from calibration and used instead of it."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace

import gguf
import numpy
import pytest
import torch

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, UsageError
from quantforge.execution import data_free
from quantforge.execution.rounding import MatrixRounder
from quantforge.formats.gguf.importance_file import (
    Imatrix,
    WeightImportance,
    read_imatrix,
    write_imatrix,
)
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.model import hidden_states
from quantforge.notation import parse_layer
from quantforge.plans import Action, TensorPlan
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from tests import gguf_models
from tests.runs import CALIBRATION_ARGUMENTS, run_command

IMATRIX = Imatrix(
    {
        "blk.0.attn_q.weight": WeightImportance(torch.tensor([[0.5, 2.0, 0.0, 8.0]]), 7),
        "blk.0.ffn_up.weight": WeightImportance(torch.tensor([[1.0, 3.0]]), 7),
    },
    "builtin",
    3,
    512,
)
TEXT = CalibrationOptions(samples=8, length=32)


def test_importance_statistics_are_on_the_device_of_the_run():
    scheme = parse_layer("int4:g32:asym")
    with_importance, other = (
        TensorPlan(name, "F32", (4, 32), Action.QUANTIZE, "", scheme) for name in "ab"
    )
    planned = SimpleNamespace(
        plan=SimpleNamespace(rounder="rtn", tensors=(with_importance, other)),
        recipe=Recipe(),
        model_layout=None,
    )
    inputs = SimpleNamespace(
        planned=planned, settings=SimpleNamespace(device="meta"), checkpoint=None,
        importance={"a": torch.ones(32)},
    )  # fmt: skip
    rounding = MatrixRounder(inputs, SimpleNamespace())
    assert rounding.importance_statistics(with_importance).squares.is_meta
    assert rounding.importance_statistics(other).squares is None


@pytest.mark.parametrize("name", ["x.gguf", "x.dat"])
def test_imatrix_files_are_read_as_written(name, tmp_path):
    write_imatrix(tmp_path / name, IMATRIX)
    imatrix = read_imatrix(tmp_path / name)
    assert (imatrix.dataset, imatrix.chunks) == ("builtin", 3)
    for key, entry in IMATRIX.entries.items():
        torch.testing.assert_close(imatrix.entries[key].means, entry.means)


def test_the_gguf_imatrix_layout_matches_llama_cpp(tmp_path):
    write_imatrix(tmp_path / "x.gguf", IMATRIX)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert "general.architecture" not in reader.fields
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.chunk_count"].contents() == 3
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    sums = tensors["blk.0.attn_q.weight.in_sum2"]
    counts = tensors["blk.0.attn_q.weight.counts"]
    assert (sums.shape.tolist(), counts.shape.tolist()) == ([4], [1])  # ggml drops a last 1
    assert sums.data.flatten().tolist() == [3.5, 14.0, 0.0, 56.0]
    assert counts.data.flatten().tolist() == [7.0]


def write_imatrix_by_gguf_py(path, tensors, **keys):
    """Write a file with gguf-py as llama-imatrix does, from numpy arrays by name."""
    writer = gguf.GGUFWriter(path, "")
    for key, number in keys.items():
        writer.add_uint16(f"split.{key}", number)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["some.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        writer.add_tensor(name, numpy.array(values, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_imatrix_entries_of_matrices_and_expert_stacks_are_read(tmp_path):
    tensors = {
        "blk.0.attn_q.weight.in_sum2": [3.5, 14, 0, 56],
        "blk.0.attn_q.weight.counts": [7],
        "blk.0.ffn_up_exps.weight.in_sum2": [[3, 6], [0, 0], [8, 2]],
        "blk.0.ffn_up_exps.weight.counts": [[3], [0], [4]],
    }
    write_imatrix_by_gguf_py(tmp_path / "x.gguf", tensors)
    imatrix = read_imatrix(tmp_path / "x.gguf")
    assert (imatrix.dataset, imatrix.chunks, imatrix.chunk_size) == ("some.txt", 3, 512)
    means = {name: entry.means.tolist() for name, entry in imatrix.entries.items()}
    assert means == {
        "blk.0.attn_q.weight": [[0.5, 2, 0, 8]],
        "blk.0.ffn_up_exps.weight": [[1, 2], [1, 1], [2, 0.5]],
    }


def test_a_split_imatrix_file_is_refused(tmp_path):
    for number, name in enumerate("vw"):
        path = tmp_path / f"x-{number + 1:05}-of-00002.gguf"
        write_imatrix_by_gguf_py(
            path, {f"{name}.in_sum2": [1], f"{name}.counts": [2]}, no=number, count=2
        )
    with pytest.raises(InputError, match="in parts"):
        read_imatrix(tmp_path / "x-00001-of-00002.gguf")


@pytest.mark.parametrize("counts", [[3, 4], [[3, 4]], [[3], [4]]])
def test_imatrix_counts_of_unexpected_shape_are_refused(counts, tmp_path):
    write_imatrix_by_gguf_py(tmp_path / "x.gguf", {"w.in_sum2": [1, 2], "w.counts": counts})
    with pytest.raises(InputError, match="sums and counts"):
        read_imatrix(tmp_path / "x.gguf")


def test_the_legacy_imatrix_layout_matches_llama_cpp(tmp_path):
    write_imatrix(tmp_path / "x.dat", IMATRIX)
    data = (tmp_path / "x.dat").read_bytes()
    name = b"blk.0.attn_q.weight"
    head = struct.pack("<ii", 2, len(name)) + name + struct.pack("<ii4f", 3, 4, 1.5, 6.0, 0.0, 24.0)
    assert data.startswith(head)
    assert data.endswith(struct.pack("<ii", 3, 7) + b"builtin")


def test_damaged_imatrix_files_are_refused(tmp_path):
    path = tmp_path / "x.dat"
    write_imatrix(path, IMATRIX)
    intact = path.read_bytes()
    for data in (b"", intact[:30], struct.pack("<i", 2**31 - 1), struct.pack("<ii", 1, -5), intact[:-1],
                 intact + b"\0", bytes(4),
                 struct.pack("<ii", 1, 1) + b"w" + struct.pack("<ii", 0, 4) + bytes(16)):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(InputError):
            read_imatrix(path)
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="begins as neither form"):
        read_imatrix(path)
    bad = Imatrix({"w": WeightImportance(torch.tensor([[float("nan")]]), 1)}, "", 1, 1)
    path.unlink()
    write_imatrix(path, bad)
    with pytest.raises(InputError, match="no mean of squares"):
        read_imatrix(path)
    write_imatrix(tmp_path / "x.gguf", IMATRIX)
    data = (tmp_path / "x.gguf").read_bytes().replace(b".counts", b".other_")
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(InputError, match="sums and counts"):
        read_imatrix(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return gguf_models.make(
        "llama-tied", tmp_path_factory.mktemp("m") / "m", hidden_size=256, intermediate_size=512
    )


def quantize_and_read(model, out, settings, **values):
    recipe = Recipe(**{"method": "rtn", "format": "gguf", "type": "Q4_K_M", **values})
    api.quantize(str(model), recipe, out, settings)
    return read_gguf(out)


def test_imatrix_files_give_nearly_the_blocks_of_their_calibration(model, tmp_path):
    path = tmp_path / "x.gguf"
    api.make_imatrix(str(model), Recipe(format="gguf", calibration=TEXT), path, Settings())
    imatrix = read_imatrix(path)
    assert len(imatrix.entries) == 7 * 3
    assert {entry.rows for entry in imatrix.entries.values()} == {8 * 32}
    q, k, up = (
        imatrix.entries[f"blk.1.{name}.weight"].means for name in ("attn_q", "attn_k", "ffn_up")
    )
    assert torch.equal(q, k)
    assert not torch.equal(q, up)
    from_imatrix = CalibrationOptions(source="imatrix:x.gguf")
    with_file = quantize_and_read(
        model, tmp_path / "a.gguf", Settings(imatrix=path), calibration=from_imatrix
    )
    calibrated = quantize_and_read(model, tmp_path / "b.gguf", Settings(), calibration=TEXT)
    without = quantize_and_read(
        model, tmp_path / "c.gguf", Settings(), calibration=CalibrationOptions(source="none")
    )
    assert with_file.value("quantize.imatrix.dataset", str) == "imatrix:x.gguf"
    assert "quantize.imatrix.dataset" not in without.metadata

    def blocks(file):
        from quantforge.files.safetensors import read_tensor

        names = [name for name in file.tensors if "ffn" in name and "norm" not in name]
        return torch.cat([read_tensor(file.tensors[name].raw()).flatten() for name in names])

    same = (blocks(with_file) == blocks(calibrated)).float().mean()
    assert same > 0.99  # but for a mean that is rounded otherwise
    assert (blocks(with_file) == blocks(without)).float().mean() < same


def test_make_imatrix_honors_precision_and_activation_settings(model, tmp_path, monkeypatch):
    def imatrix_bytes(name, settings=None, **values):
        recipe = Recipe(format="gguf", calibration=replace(TEXT, **values))
        api.make_imatrix(str(model), recipe, tmp_path / name, settings or Settings())
        return (tmp_path / name).read_bytes()

    directories, own = [], hidden_states.OnDisk.__init__

    def record_directory(self, *args):
        directories.append(args[-1])
        own(self, *args)

    monkeypatch.setattr(hidden_states.OnDisk, "__init__", record_directory)
    exact = imatrix_bytes("a.gguf")
    assert not directories
    assert imatrix_bytes("b.gguf", Settings(activations="disk")) == exact
    assert {*directories} == {tmp_path}
    assert imatrix_bytes("c.gguf", precision="bfloat16") != exact


@pytest.mark.parametrize("format_key", ["gguf", "compressed-tensors"])
def test_importance_weighted_errors_do_not_depend_on_strips(
    format_key, model, tmp_path, monkeypatch
):
    path, errors = tmp_path / "x.gguf", []
    api.make_imatrix(str(model), Recipe(format="gguf", calibration=TEXT), path, Settings())
    own = {"type": "Q4_K_M"} if format_key == "gguf" else {"scheme": "int4:g64:sym"}
    text = CalibrationOptions(source="imatrix:x.gguf")
    for name, elements in (("whole.gguf", 1 << 30), ("strips.gguf", 4096)):
        monkeypatch.setattr(data_free, "STRIP_ELEMENTS", elements)
        out = tmp_path / (name if format_key == "gguf" else name.removesuffix(".gguf"))
        recipe = Recipe(method="rtn", format=format_key, calibration=text, **own)
        api.quantize(str(model), recipe, out, Settings(imatrix=path))
        records = manifest.read_manifest(out)["tensors"]
        errors.append({entry["name"]: entry["error"] for entry in records if "error" in entry})
    assert len(errors[0]) >= 7 * 3
    assert errors[1] == pytest.approx(errors[0], rel=1e-5)  # a manifest has six digits


def test_importance_for_another_model_or_method_is_refused(model, tmp_path):
    path = tmp_path / "x.gguf"
    write_imatrix(path, IMATRIX)
    from_imatrix = CalibrationOptions(source="imatrix:x.gguf")
    with pytest.raises(InputError, match="columns, the weight 256"):
        quantize_and_read(
            model, tmp_path / "a.gguf", Settings(imatrix=path), calibration=from_imatrix
        )
    path.unlink()
    write_imatrix(path, Imatrix({"other": WeightImportance(torch.ones(1, 4), 1)}, "", 1, 1))
    with pytest.raises(InputError, match="nothing of it concerns"):
        quantize_and_read(
            model, tmp_path / "a.gguf", Settings(imatrix=path), calibration=from_imatrix
        )
    for method, match in (
        ("gptq", "gptq observes more"),
        ("awq+gptq", "awq and gptq observes"),
        ("awq", "awq obs"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            quantize_and_read(
                model,
                tmp_path / "a.gguf",
                Settings(imatrix=path),
                calibration=from_imatrix,
                method=method,
            )
        assert "the calibration text gives the importance too" in caught.value.hint
    with pytest.raises(UsageError, match="importance is for a search"):
        quantize_and_read(
            model,
            tmp_path / "a.gguf",
            Settings(imatrix=path),
            calibration=from_imatrix,
            scales="absmax",
        )
    assert not (tmp_path / "a.gguf").exists()


def test_imatrix_with_gptq_is_refused_before_it_is_made(model, tmp_path, capsys):
    path = tmp_path / "new.gguf"
    options = ("--format", "gguf", "--type", "Q4_K_M", "--method", "gptq", "--imatrix", path)
    result = run_command(
        capsys, "quantize", model, *options, "-o", tmp_path / "a.gguf", *CALIBRATION_ARGUMENTS
    )
    assert (result.code, "gptq observes more" in result.err) == (2, True)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "options"), [("a", ("--format", "plain")), ("a.gguf", ("--type", "F16"))]
)
@pytest.mark.parametrize("there", [True, False])
def test_imatrix_is_refused_when_nothing_is_rounded(model, tmp_path, capsys, name, options, there):
    path = tmp_path / "new.gguf"
    if there:
        write_imatrix(path, IMATRIX)
    result = run_command(
        capsys,
        "quantize",
        model,
        *options,
        "--imatrix",
        path,
        "-o",
        tmp_path / name,
        *CALIBRATION_ARGUMENTS,
    )
    assert (result.code, "--imatrix: nothing is rounded" in result.err) == (2, True)
    assert path.exists() == there
    assert not (tmp_path / name).exists()


WIDTHS = {
    "attn_q": 256,
    "attn_k": 256,
    "attn_v": 256,
    "attn_output": 128,
    "ffn_gate": 256,
    "ffn_up": 256,
    "ffn_down": 512,
}
IMATRIX_RECIPE = Recipe(
    format="gguf", type="Q4_K_M", method="rtn", calibration=CalibrationOptions(source="imatrix:x.gguf")
)  # fmt: skip


def write_imatrix_of_blocks(path, blocks, *others):
    """Write importance of every matrix of the first ``blocks`` blocks, and of the other names."""
    entries = {name: WeightImportance(torch.ones(1, 4), 7) for name in others}
    for block in range(blocks):
        for name, width in WIDTHS.items():
            entries[f"blk.{block}.{name}.weight"] = WeightImportance(torch.ones(1, width), 7)
    write_imatrix(path, Imatrix(entries, "", 1, 1))
    return path


def test_missing_importance_is_an_event_or_refused_by_type(model, tmp_path, capsys):
    path, out = write_imatrix_of_blocks(tmp_path / "x.gguf", 2), tmp_path / "a.gguf"
    planned = api.plan(model, IMATRIX_RECIPE, Settings(imatrix=path)).substitutions
    (event,) = [item for item in planned if item.kind == "importance-incomplete"]
    assert "no importance for 7 of 21 matrices: blk.2." in event.detail
    assert "and 4 more" in event.detail

    def run_quantize(gguf_type, *options):
        arguments = ("--type", gguf_type, "--method", "rtn", "--imatrix", path, "-o", out)
        return run_command(capsys, "quantize", model, *arguments, *options)

    shown = run_quantize("Q4_K_M", "--dry-run")
    assert (shown.code, "no importance for 7 of 21 matrices" in shown.out) == (0, True)
    strict = run_quantize("Q4_K_M", "--strict", "--allow", "substitution=9")
    assert (strict.code, "importance-incomplete" in strict.err) == (4, True)
    refused = run_quantize("IQ2_XXS")
    assert refused.code == 4
    assert "of 21 matrices whose types need it (IQ2_XXS): blk.2." in refused.err
    assert not out.exists()


def test_imatrix_with_more_layers_is_refused_and_unknown_names_noted(model, tmp_path):
    more = write_imatrix_of_blocks(tmp_path / "more.gguf", 4)
    with pytest.raises(InputError, match="importance of 4 layers, the model has 3"):
        api.plan(model, IMATRIX_RECIPE, Settings(imatrix=more))
    strange = write_imatrix_of_blocks(
        tmp_path / "x.gguf", 3, "blk.0.attn_kv_b.weight", "output.weight"
    )
    planned = api.plan(model, IMATRIX_RECIPE, Settings(imatrix=strange))
    assert not [item for item in planned.substitutions if item.kind == "importance-incomplete"]
    assert [note for note in planned.notes if "1 of its matrices are of no tensor" in note]
