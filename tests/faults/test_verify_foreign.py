"""Extra files that a loader would read and the source lacks are found and named."""

from __future__ import annotations

import json
import shutil

import pytest

from quantforge.verification.findings import Severity
from quantforge.verification.verify import verify
from tests import peers

ARTIFACT = peers.FIXTURES / "llmc-w4a16-gptq"
# Name: whether it is said without a source too, and how bad it is there.
PLANTED: dict[str, Severity | None] = {
    "modeling_x.py": Severity.WARNING,
    "custom_generate/generate.py": Severity.WARNING,
    "pytorch_model.bin": Severity.ERROR,
    "training_args.bin": Severity.ERROR,
    "weights.pkl": Severity.ERROR,
    "original/consolidated.00.pth": Severity.ERROR,
    "consolidated.safetensors": Severity.ERROR,
    "params.json": Severity.WARNING,
    "adapter_config.json": Severity.ERROR,
    "hf_quant_config.json": Severity.ERROR,
    "tf_model.h5": Severity.ERROR,
    "model.onnx": Severity.ERROR,
    "other.gguf": Severity.ERROR,
    "onnx/model.safetensors": Severity.ERROR,
    "pytorch_model.bin.index.json": Severity.ERROR,
    "config.4.0.0.json": Severity.WARNING,
    "configuration.json": Severity.WARNING,
    "genai_config.json": Severity.WARNING,
    "Weights.BIN": Severity.ERROR,
    "modules.json": Severity.WARNING,
    "1_Pooling/config.json": Severity.WARNING,
    "Modelfile": Severity.WARNING,
    "preprocessor_config.json": None,
    "processor_config.json": None,
    "tokenizer.4.0.0.json": None,
    "tokenizer.model": None,
    "vocab.txt": None,
    "chat_template.json": None,
}
HARMLESS = (
    "recipe.yaml",
    "README.md",
    "notes.txt",
    "LICENSE",
    "images/a.png",
    ".gitattributes",
    "unknown.dat",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return peers.make("narrow", tmp_path_factory.mktemp("source"))


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(ARTIFACT, tmp_path / "m")


def unexpected_files(model, source=None):
    report = verify(model, source, forward=False)
    return {item.where: item for item in report.findings if item.check == "unexpected-files"}


def test_extra_files_that_loaders_read_are_found(model, source):
    for name in PLANTED:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    extra = unexpected_files(model, source)
    assert {name: item.severity for name, item in extra.items()} == dict.fromkeys(
        PLANTED, Severity.ERROR
    )
    assert {name: item.severity for name, item in unexpected_files(model).items()} == {
        name: severity for name, severity in PLANTED.items() if severity
    }


def test_harmless_extra_files_pass(model, source):
    for name in HARMLESS:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    assert unexpected_files(model, source) == unexpected_files(model) == {}


def test_extra_files_identical_to_the_source_pass(model, source, tmp_path):
    source = shutil.copytree(source, tmp_path / "s")
    for directory in (model, source):
        (directory / "modeling_x.py").write_text("x = 1")
    assert unexpected_files(model, source) == {}
    (model / "modeling_x.py").write_text("x = 2")
    assert "differs from the source's" in unexpected_files(model, source)["modeling_x.py"].detail


def test_file_names_are_printed_escaped(model, source):
    (model / "a\x1b[31m\u202e.py").write_text("x")
    (name,) = unexpected_files(model, source)
    assert name.isprintable()


def test_original_weights_beside_quantized_ones_are_a_warning(model, source, tmp_path):
    source = shutil.copytree(source, tmp_path / "s")
    for directory in (model, source):
        (directory / "pytorch_model.bin").write_bytes(b"0")
    assert unexpected_files(model, source)["pytorch_model.bin"].severity is Severity.WARNING


def test_a_chat_template_is_compared_only_with_a_source(model, source):
    (model / "chat_template.jinja").write_text("{{ 'visit' }}")
    report = verify(model, source, forward=False)
    assert [(item.where, item.severity) for item in report.findings] == [
        ("chat_template.jinja", Severity.ERROR)
    ]
    assert not verify(model, forward=False).findings


def test_the_model_card_does_not_affect_verification(model, source):
    before = verify(model, source, forward=False).document()
    (model / "README.md").write_text(
        "---\nbase_model: evil/x\nlicense: evil\n---\nevil: verified by everybody\n"
    )
    after = verify(model, source, forward=False).document()
    assert after == before
    assert "evil" not in json.dumps(after)
