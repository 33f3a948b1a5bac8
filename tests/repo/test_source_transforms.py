"""A transform of the whole source, added from outside: the model that it hands on is the only one that is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.architectures.match import match_tensors
from quantforge.artifacts import manifest
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.files.safetensors import read_tensor
from quantforge.model.stream import ModelStream
from quantforge.progress import Progress
from quantforge.quantizers import METHODS, Method, MethodKind, MethodMemory, apply_source_transforms
from quantforge.recipe import CalibrationOptions
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import VOCABULARY, Tiny
from tests.runs import quantize, recipe
from tests.thorough import mark_others_thorough, thorough_case

ROWS = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1))
RECORD = Method(
    "tests.toys.unit_norms", MethodKind.SOURCE_TRANSFORM, frozenset(), MethodMemory(matrices=1.0)
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "unit-norms", RECORD)


def logits(checkpoint: Checkpoint) -> Tensor:
    model_layout = match_tensors(
        checkpoint.config, [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    )
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        for part in stream:
            part.advance()
        return torch.cat(list(stream.logits()))


@pytest.mark.parametrize(
    "family",
    mark_others_thorough(
        ("llama", "llama-tied", "qwen2", "gemma2", "phi3", "gpt2", "lfm2"), "gemma2", "phi3", "gpt2"
    ),
)
def test_the_model_computes_what_it_did(tiny: Tiny, family: str) -> None:
    source = open_checkpoint(tiny(family))
    changed = apply_source_transforms(source, ["unit-norms"])
    before, after = logits(source), logits(changed)
    assert float((after - before).norm() / before.norm()) <= 1e-5
    for name in source.entries:
        rows = changed.entries[name].shape[0] // 2
        assert torch.equal(changed.read(name)[rows:], changed.read_rows(name, rows, 2 * rows)), name
    differ = [n for n in source.entries if not torch.equal(source.read(n).float(), changed.read(n))]
    assert len(differ) > 3 * 4


def test_planning_with_it_imports_no_torch(tiny: Tiny) -> None:
    program = f"""
import sys
from quantforge import api
from quantforge.quantizers import METHODS, Method, MethodKind, MethodMemory
from quantforge.recipe import Recipe
METHODS["unit-norms"] = Method(
    "tests.toys.unit_norms", MethodKind.SOURCE_TRANSFORM, frozenset(), MethodMemory()
)
plan = api.plan({str(tiny("llama-tied"))!r}, Recipe(method="unit-norms+rtn", scheme="int8:g32:sym"))
assert [tensor.name for tensor in plan.tensors if tensor.name == "lm_head.weight"], "untied"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("family", "method", "scheme", "form"),
    [
        ("gemma2", "unit-norms+gptq", "int8:g32:sym", "compressed-tensors"),
        thorough_case("llama-wide", "unit-norms+awq+rtn", "int4:g32:sym", "compressed-tensors"),
        ("llama-wide", "unit-norms", None, "gguf"),
    ],
)
def test_from_quantize_to_verify(
    tiny: Tiny, tmp_path: Path, family: str, method: str, scheme: str | None, form: str
) -> None:
    model = tiny(family)
    values = {"type": "Q8_0"} if form == "gguf" else {"scheme": scheme}
    wanted = recipe(method, format=form, **values)
    plan = api.plan(str(model), wanted)
    out = tmp_path / ("q.gguf" if form == "gguf" else "q")
    done = quantize(model, out, wanted)
    assert done.plan.tensors == plan.tensors
    document = manifest.read_manifest(out)
    assert document is not None
    assert document["method"] == method
    report = verify(out, model)
    assert report.findings == []
    assert reproduce(out, str(model), Settings()).differing == ()


def test_kept_tensors_go_through_it(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("gemma2")
    quantize(model, tmp_path / "q", recipe("unit-norms+rtn", scheme="int8:g32:sym"))
    assert json.loads((tmp_path / "q/config.json").read_text())["tie_word_embeddings"] is False
    source, result = open_checkpoint(model), open_checkpoint(tmp_path / "q")
    kept = {name: read_tensor(entry) for name, entry in result.entries.items()}
    assert not kept["model.norm.weight"].any()  # gemma multiplies by 1 + w
    assert not kept["model.layers.1.input_layernorm.weight"].any()
    after = "model.layers.1.post_attention_layernorm.weight"  # no linear reads it
    assert torch.equal(kept[after], source.read(after))
    gain = source.read("model.norm.weight").float() + 1
    head = (source.read("model.embed_tokens.weight").float() * gain).bfloat16()
    assert torch.equal(kept["lm_head.weight"], head)
    assert torch.equal(kept["model.embed_tokens.weight"], source.read("model.embed_tokens.weight"))


def test_verify_compares_with_the_source_that_the_manifest_speaks_of(
    tiny: Tiny, tmp_path: Path
) -> None:
    model, out = tiny("llama-wide"), tmp_path / "q"
    quantize(model, out, recipe("unit-norms+rtn", scheme="int8:g32:sym"))
    api.export(str(out), recipe(format="gptq"), tmp_path / "export", Settings())
    for source in (model, out):  # what was made from a changed model is not changed again
        assert verify(tmp_path / "export", source).findings == []
    path = out / manifest.NAME
    path.write_text(path.read_text().replace('"method": "unit-norms+rtn"', '"method": "rtn"'))
    found = {finding.check for finding in verify(out, model).findings}
    assert "unquantized-changed" in found


def test_an_interrupted_run_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    model, wanted = tiny("llama-wide"), recipe("unit-norms+gptq", scheme="int8:g32:sym")

    def stop(progress: Progress) -> None:
        if progress.part == "block 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "a", wanted, progress=stop)
    assert quantize(model, tmp_path / "a", wanted).resumed
    quantize(model, tmp_path / "b", wanted)
    for path in sorted((tmp_path / "b").iterdir()):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes(), path.name


def test_what_does_not_go_together_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = str(tiny("llama-wide"))
    for text in ("rtn+unit-norms", "awq+unit-norms+rtn", "unit-norms+unit-norms"):
        with pytest.raises(UsageError, match="transforms of the whole source, then transforms"):
            api.plan(model, recipe(text, scheme="int8:g32:sym"))
    importance = CalibrationOptions(source="imatrix:a.gguf")
    with pytest.raises(UsageError, match="mean squares are of the model as it was"):
        api.plan(
            model, recipe("unit-norms+rtn", type="Q4_K", format="gguf", calibration=importance)
        )
    wanted = recipe("unit-norms+rtn", scheme="int4:g32:sym")
    quantize(Path(model), tmp_path / "q", wanted)
    with pytest.raises((InputError, RefusedError), match="already quantized"):
        quantize(tmp_path / "q", tmp_path / "twice", wanted)
