"""``--scales reference`` writes the same blocks as llama.cpp's own quantizer."""

import numpy
import pytest
import torch

from benchmarks.peers.ggml import quantized
from quantforge import api
from quantforge.errors import UsageError
from quantforge.files.safetensors import read_tensor
from quantforge.formats.gguf.importance_file import Imatrix, WeightImportance, write_imatrix
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from tests import gguf_models
from tests.gguf_exports import NO_CALIBRATION, WIDE, export
from tests.runs import CALIBRATION_ARGUMENTS, run_command
from tests.thorough import mark_others_thorough, thorough_case

# What each has: heads whose rows are reordered, transposed matrices, experts in stacks.
MODELS = {
    "llama-tied": ("Q4_K_M", WIDE),
    "qwen2": ("Q5_1", {}),
    "gpt2": ("Q4_0", {}),
    "mixtral": ("IQ4_NL", {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return gguf_models.make("llama-tied", tmp_path_factory.mktemp("m") / "m", **WIDE)


def random_imatrix(path):
    """Return random mean squares for every block matrix and expert, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    entries = {}
    for name, tensor in read_gguf(path).tensors.items():
        if name.startswith("blk") and len(tensor.shape) > 1:
            shape = tensor.shape if len(tensor.shape) == 3 else (1, *tensor.shape)
            means = torch.rand(shape[0], shape[2], generator=generator) ** 4
            means[:, ::7] = 0
            entries[name] = WeightImportance(means, 4)
    return Imatrix(entries, "text", 1, 512)


def blocks_by_ggml(tensor, plain, importance):
    """Return the bytes that ggml makes of ``tensor`` from its float32 weights."""
    weights = read_tensor(plain.raw()).view(plain.shape)
    if tensor.type == "F32":
        return weights.numpy().tobytes()
    matrices = weights if weights.ndim == 3 else weights[None]
    means = [None] * len(matrices) if importance is None else importance.means
    parts = [quantized(matrix.contiguous(), tensor.type.lower(), columns)
             for matrix, columns in zip(matrices, means, strict=True)]  # fmt: skip
    return torch.cat(parts).numpy().tobytes()


@pytest.mark.parametrize("with_importance", [thorough_case(False), True])
@pytest.mark.parametrize("name", mark_others_thorough(MODELS, "llama-tied", "mixtral"))
def test_reference_scales_give_the_bytes_of_ggml(name, with_importance, tmp_path):
    gguf_type, sizes = MODELS[name]
    source = gguf_models.make(name, tmp_path / "m", torch.bfloat16, **sizes)
    plain = export(source, tmp_path / "plain.gguf", "F32")
    imatrix = random_imatrix(plain)
    write_imatrix(tmp_path / "im.gguf", imatrix)
    text = CalibrationOptions(source="imatrix:im.gguf") if with_importance else NO_CALIBRATION
    recipe = Recipe(format="gguf", type=gguf_type, scales="reference", calibration=text)
    settings = Settings(imatrix=tmp_path / "im.gguf" if with_importance else None)
    api.export(str(source), recipe, tmp_path / "x.gguf", settings)
    weights = read_gguf(plain).tensors
    types = set()
    for key, tensor in read_gguf(tmp_path / "x.gguf").tensors.items():
        importance = imatrix.entries.get(key) if with_importance else None
        types.add(tensor.type)
        stored = numpy.asarray(read_tensor(tensor.raw()).view(torch.uint8)).tobytes()
        assert stored == blocks_by_ggml(tensor, weights[key], importance), key
    assert len(types) > 1


def test_reference_scales_use_calibration_like_an_imatrix(model, tmp_path):
    text = CalibrationOptions(samples=8, length=32)
    recipe = Recipe(format="gguf", type="Q4_0", scales="reference", calibration=text)
    api.quantize(str(model), recipe, tmp_path / "a.gguf", Settings())
    api.make_imatrix(str(model), recipe, tmp_path / "im.dat", Settings())
    from_imatrix = CalibrationOptions(source="imatrix:im.dat")
    recipe = Recipe(format="gguf", type="Q4_0", scales="reference", calibration=from_imatrix)
    settings = Settings(imatrix=tmp_path / "im.dat")
    api.quantize(str(model), recipe, tmp_path / "b.gguf", settings)
    plain = export(model, tmp_path / "c.gguf", "Q4_0", scales="reference")
    a, b, c = (torch.cat([read_tensor(tensor.raw()).flatten().view(torch.uint8)
                          for tensor in read_gguf(path).tensors.values()])
               for path in (tmp_path / "a.gguf", tmp_path / "b.gguf", plain))  # fmt: skip
    assert (a == b).float().mean() > 0.999  # but for a mean that is rounded otherwise
    assert (a == c).float().mean() < 0.99


def test_the_command_line_accepts_reference_scales(model, tmp_path, capsys):
    options = ("--format", "gguf", "--type", "Q4_1", "--scales", "reference")
    quantize = ("quantize", model, *options, "--calibration", "none", "-o", tmp_path / "a.gguf")
    assert run_command(capsys, *quantize).code == 0
    assert run_command(capsys, "export", model, *options, "-o", tmp_path / "b.gguf").code == 0
    ours = export(model, tmp_path / "c.gguf", "Q4_1", scales="absmax")
    a, b, c = (
        [bytes(read_tensor(tensor.raw()).flatten().view(torch.uint8).numpy())
         for tensor in read_gguf(path).tensors.values()]
        for path in (tmp_path / "a.gguf", tmp_path / "b.gguf", ours)
    )  # fmt: skip
    assert a == b
    assert a != c


def test_reference_scales_are_refused_without_a_llama_cpp_quantizer(model, tmp_path, capsys):
    for values, match in (
        ({"method": "gptq", "format": "gguf", "type": "Q4_0"}, "plainly, without gptq"),
        ({"method": "awq", "format": "gguf", "type": "Q4_0"}, "plainly, without awq"),
        ({"bits": 4}, "no quantizer for int4:g128:sym"),
    ):
        recipe = Recipe(scales="reference", calibration=CalibrationOptions(samples=2), **values)
        with pytest.raises(UsageError, match=match):
            api.quantize(str(model), recipe, None, Settings())
    result = run_command(capsys, "quantize", model, "--scales", "refrence", "-o", tmp_path / "x")
    assert (result.code, "did you mean 'reference'" in result.err) == (2, True)
    assert not (tmp_path / "x").exists()


@pytest.mark.thorough
def test_scales_option_is_refused_for_quantized_models(model, tmp_path, capsys):
    quantized_model = tmp_path / "q"
    assert (
        run_command(
            capsys, "quantize", model, "--bits", 4, "-o", quantized_model, *CALIBRATION_ARGUMENTS
        ).code
        == 0
    )
    arguments = ("--format", "gguf", "--scales", "reference", "-o", tmp_path / "x.gguf")
    result = run_command(capsys, "export", quantized_model, *arguments)
    assert (result.code, "--scales" in result.err) == (2, True)
    result = run_command(
        capsys, "export", quantized_model, "--type", "Q4_0", "--source", model, *arguments
    )
    assert (result.code, "drop --scales" in result.err) == (2, True)
    result = run_command(
        capsys, "export", quantized_model, "--type", "Q4_0", "--requantize", *arguments
    )
    assert result.code == 0
