"""A rotated model computes what its source does, in every family in which all readers and writers are known."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.architectures import Parameter, architecture_of
from quantforge.architectures.families import declared_families
from quantforge.architectures.match import Role, match_tensors
from quantforge.architectures.residual_stream import find_residual_stream
from quantforge.artifacts import manifest
from quantforge.errors import InputError, RefusedError
from quantforge.execution import data_free
from quantforge.files.computed_tensors import ROTATION
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.files.safetensors import read_tensor
from quantforge.model.stream import ModelStream
from quantforge.plans import Plan
from quantforge.progress import Progress
from quantforge.quantizers import METHODS, apply_source_transforms
from quantforge.quantizers.rotate import RotatedTensorReader
from quantforge.recipe import NO_DATA, CalibrationOptions
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import FAMILIES, MIXTURES, VOCABULARY, Tiny, make_tiny
from tests.runs import fast_recipe, quantize, recipe, run_command
from tests.thorough import mark_others_thorough, representative_families, thorough_case

ROWS = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1))
ROTATED = (
    "llama", "llama-tied", "llama-wide", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "glm", "granite", "seed-oss",
    "ernie4.5", "hunyuan", "ministral", "ministral3", "apertus", "arcee", "gemma", "helium", "cwm",
    "mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "glm4-moe", "dots1", "minimax-m2", "ernie4-5-moe", "hunyuan-v1-moe",
)  # fmt: skip
REFUSED = {
    "gemma2": "post_attention_layernorm.weight is of a norm over what is added",
    "gemma3-multimodal": "multi_modal_projector.* lies outside of the decoder",
    "olmo2": "post_attention_layernorm.weight is of a norm over what is added",
    "glm4": "post_self_attn_layernorm.weight is of a norm over what is added",
    "cohere": "model.norm.weight is of a norm that subtracts the mean",
    "cohere2": "model.norm.weight is of a norm that subtracts the mean",
    "phi": "model.final_layernorm.bias has channels of the residual stream",
    "olmo": "model.norm.weight is not there",
    "gpt2": "gpt2 has no declared graph",
    "deepseek-v3": "deepseek_v3 has no declared graph",
    "gpt-oss": "gpt_oss has no declared graph",
}


def logits(checkpoint: Checkpoint) -> Tensor:
    model_layout = match_tensors(
        checkpoint.config, [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    )
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        for part in stream:
            part.advance()
        return torch.cat(list(stream.logits()))


@pytest.mark.parametrize("family", representative_families(ROTATED, "granite", "gemma", "mixtral"))
def test_the_model_computes_what_it_did(tiny: Tiny, family: str) -> None:
    source = open_checkpoint(tiny(family))
    rotated = apply_source_transforms(source, ["rotate"])
    before, after = logits(source), logits(rotated)
    assert float((after - before).norm() / before.norm()) <= 3e-6
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    stream = find_residual_stream(model_layout, "this")
    for name in stream.norms:
        gain = rotated.read(model_layout.by_name[name].header.name)
        assert torch.equal(gain, torch.full_like(gain, 0.0 if family == "gemma" else 1.0)), name
    for name in stream.axes:
        stored = model_layout.by_name[name].header.name
        assert not torch.allclose(source.read(stored).float(), rotated.read(stored), atol=1e-3)


@pytest.mark.parametrize(
    "family",
    mark_others_thorough(
        REFUSED, *("gemma2", "gemma3-multimodal", "cohere", "phi", "olmo", "gpt2")
    ),
)
def test_what_is_not_proven_is_refused(tiny: Tiny, family: str) -> None:
    with pytest.raises(RefusedError, match=f"^--method rotate: .*{REFUSED[family]}"):
        apply_source_transforms(open_checkpoint(tiny(family)), ["rotate"])


def test_every_family_is_rotated_exactly_or_refused(tiny: Tiny) -> None:
    """A new family that is taken has to be among those whose logits are compared."""
    taken = set()
    for family in {**FAMILIES, **MIXTURES}:
        try:
            apply_source_transforms(open_checkpoint(tiny(family)), ["rotate"])
        except (RefusedError, InputError):
            continue
        taken.add(family)
    assert taken == set(ROTATED)
    shown = {{**FAMILIES, **MIXTURES}[family][0] for family in {**FAMILIES, **MIXTURES}}
    declared = [architecture_of({"model_type": name}) for name in declared_families()]
    graphs = {family.model_type for family in declared if family and family.graph_if_complete}
    assert not graphs - shown, "no tiny model shows whether these are rotated exactly"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (Parameter("mlp.up_proj.scale", ("hidden",)), "multiplies or adds to single channels"),
        (Parameter("self_attn.k_proj.twice", ("kv", "2*hidden")), "in a way that is not known"),
        (Parameter("mlp.gate_proj.both", ("hidden", "hidden")), "in a way that is not known"),
    ],
)
def test_a_tensor_that_touches_the_stream_unknown_is_named(
    tiny: Tiny, item: Parameter, said: str
) -> None:
    source = open_checkpoint(tiny("llama"))
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    kinds = tuple(replace(k, parameters=(*k.parameters, item)) for k in model_layout.layers)
    first = replace(model_layout.tensors[0], name=f"{model_layout.block_name(0)}.{item.name}")
    changed = replace(model_layout, layers=kinds, tensors=(*model_layout.tensors, first))
    with pytest.raises(RefusedError, match=re.escape(first.name) + f".*{said}"):
        find_residual_stream(changed, "this")


def test_heads_for_further_tokens_are_to_be_dropped_first(tiny: Tiny) -> None:
    source = open_checkpoint(tiny("glm4-moe"))
    model_layout = match_tensors(
        source.config, [entry.to_stored_tensor() for entry in source.entries.values()]
    )
    head = replace(model_layout.tensors[0], name="further", role=Role.FOREIGN, draft_head=True)
    with pytest.raises(RefusedError, match="lies outside of the decoder") as refused:
        find_residual_stream(replace(model_layout, tensors=(*model_layout.tensors, head)), "this")
    assert refused.value.hint == "--mtp drop leaves heads for further tokens out"


def test_a_size_without_a_hadamard_matrix_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, hidden_size=92, head_dim=16)
    with pytest.raises(RefusedError, match=r"no Hadamard matrix of 92 channels is known"):
        apply_source_transforms(open_checkpoint(tmp_path), ["rotate"])


@pytest.mark.parametrize(
    "family", ["phi3", thorough_case("llama"), thorough_case("qwen2"), "mixtral"]
)
def test_rows_are_the_same_in_every_strip(tiny: Tiny, family: str) -> None:
    rotated = apply_source_transforms(open_checkpoint(tiny(family)), ["rotate"])
    for name, entry in rotated.entries.items():
        whole, rows = rotated.read(name), entry.shape[0]
        for first, last in ((0, rows // 3), (rows // 3, rows // 3 + 1), (rows // 3 + 1, rows)):
            assert torch.equal(rotated.read_rows(name, first, last), whole[first:last]), name


@pytest.mark.parametrize(
    ("family", "method", "values"),
    [
        ("llama-tied", "rotate+gptq", {"scheme": "int8:g32:sym"}),
        thorough_case("llama-wide", "rotate+awq+gptq", {"scheme": "int4:g32:sym"}),
        ("qwen2", "rotate+rtn", {"scheme": "int8:row:sym", "lm_head": "int8:row:sym"}),
        thorough_case("mixtral", "rotate+rtn", {"scheme": "int8:g32:sym"}),
        thorough_case("llama-wide", "rotate+smooth+gptq", {"scheme": "W8A8"}),
        thorough_case("gemma", "rotate+gptq", {"scheme": "int8:g32:sym"}),
        thorough_case("llama-tied", "rotate+rtn", {"format": "gptq", "scheme": "int8:g32:sym"}),
        thorough_case("llama-tied", "rotate+gptq", {"format": "gguf", "type": "Q8_0"}),
        thorough_case("llama-wide", "rotate+rtn", {"format": "mlx", "scheme": "int8:g64:min"}),
        ("llama-tied", "rotate", {"format": "plain"}),
    ],
)
def test_from_quantize_to_verify(
    tiny: Tiny, tmp_path: Path, family: str, method: str, values: dict[str, str]
) -> None:
    model, wanted = tiny(family), fast_recipe(method, **values)
    out = tmp_path / ("q.gguf" if values.get("format") == "gguf" else "q")
    done = quantize(model, out, wanted)
    assert done.plan.tensors == api.plan(str(model), wanted).tensors
    document = manifest.read_manifest(out)
    assert document is not None
    said = document["source"][ROTATION]
    assert re.match(r"residual stream \(\d+\) by a Hadamard matrix .* seed 0; ", said)
    assert ("the head stored on its own" in said) == (family in {"llama-tied", "gemma"})
    report = verify(out, model)
    assert report.findings == []
    assert reproduce(out, str(model), Settings()).differing == ()


def test_plan_forecasts_the_work(tiny: Tiny) -> None:
    def planned(method: str, samples: str) -> Plan:
        values = {"type": "Q4_K_S", "format": "gguf"}
        data = CalibrationOptions(source=samples)
        return api.plan(str(tiny("llama-wide")), recipe(method, calibration=data, **values))

    plain, rotated = planned("rtn", NO_DATA), planned("rotate+rtn", NO_DATA)
    assert rotated.work is not None
    assert plain.work is not None
    weights = sum(math.prod(tensor.shape) for tensor in rotated.tensors)
    added = rotated.work.operations["round"] - plain.work.operations["round"]
    assert added == pytest.approx(METHODS["rotate"].work.weights * weights)


@pytest.mark.parametrize("alike", [True, False])
def test_a_tied_head_may_be_stored_twice(tiny: Tiny, tmp_path: Path, *, alike: bool) -> None:
    model = tmp_path / "m"
    shutil.copytree(tiny("llama-tied"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not alike:
        tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    wanted = recipe("rotate+rtn", scheme="int8:g32:sym")
    if not alike:
        with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens"):
            quantize(model, tmp_path / "q", wanted)
        return
    quantize(model, tmp_path / "q", wanted)
    quantize(tiny("llama-tied"), tmp_path / "once", wanted)
    weights = "model.safetensors"
    assert (tmp_path / "q" / weights).read_bytes() == (tmp_path / "once" / weights).read_bytes()


def test_norms_that_are_not_one_are_found(tiny: Tiny, tmp_path: Path) -> None:
    model, out = tiny("llama-wide"), tmp_path / "q"
    quantize(model, out, recipe("rotate+rtn", scheme="int8:g32:sym"))
    result = open_checkpoint(out)
    gains = [name for name in result.entries if name.endswith("norm.weight")]
    assert len(gains) == 5
    assert all(bool((read_tensor(result.entries[name]) == 1).all()) for name in gains)
    quantize(model, tmp_path / "plain", recipe("rtn", scheme="int8:g32:sym"))
    stated = out / manifest.NAME
    document = json.loads(stated.read_text())
    stated.write_text(json.dumps(document | {"method": "rtn"}))
    assert {"unquantized-changed"} <= {item.check for item in verify(out, model).findings}


def test_plan_says_what_becomes_of_the_model(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run_command(
        capsys, "plan", tiny("llama-tied"), "--method", "rotate+rtn", "--scheme", "int8:g32"
    )
    assert told.code == 0, told.err
    assert (
        "source rotation: residual stream (64) by a Hadamard matrix under signs of seed 0;"
        " 7 norms in their readers; the head stored on its own, 40,960 bytes before rounding"
    ) in told.out
    assert re.search(r"^lm_head +1  keep", told.out, re.MULTILINE)
    refused = run_command(
        capsys, "plan", tiny("gemma2"), "--method", "rotate", "--scheme", "int8:g32"
    )
    assert refused.code == 4
    assert "post_attention_layernorm.weight is of a norm over what is added" in refused.err


def test_planning_imports_no_torch(tiny: Tiny) -> None:
    program = f"""
import sys
from quantforge import api
from quantforge.recipe import Recipe
api.plan({str(tiny("llama-tied"))!r}, Recipe(method="rotate+gptq", scheme="int8:g32:sym"))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.thorough
def test_any_number_of_threads_gives_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    wanted = recipe("rotate+gptq", scheme="int4:g32:sym")
    for threads in (1, 2):
        quantize(tiny("llama-wide"), tmp_path / str(threads), wanted, threads=threads)
    same(tmp_path / "1", tmp_path / "2")


def test_strips_of_a_matrix_whose_rows_are_mixed_are_of_one_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("llama-wide", tmp_path / "m", hidden_size=256, num_hidden_layers=1)
    made: Counter[str] = Counter()
    whole = RotatedTensorReader.rotated

    def counted(self: RotatedTensorReader, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        made[self.base] += 1
        return whole(self, checkpoint, start, stop)

    monkeypatch.setattr(RotatedTensorReader, "rotated", counted)
    none = CalibrationOptions(source=NO_DATA)
    wanted = recipe("rotate+rtn", type="Q4_K_S", format="gguf", calibration=none)
    one, two = tmp_path / "1.gguf", tmp_path / "2.gguf"
    quantize(tmp_path / "m", one, wanted, threads=1)
    made.clear()
    monkeypatch.setattr(data_free, "STRIP_ELEMENTS", 1 << 13)
    quantize(tmp_path / "m", two, wanted, threads=2)
    assert one.read_bytes() == two.read_bytes()
    assert made["model.layers.0.mlp.down_proj.weight"] == 1
    assert made["model.layers.0.mlp.up_proj.weight"] == 8


def test_an_interrupted_run_goes_on_to_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    model, wanted = tiny("llama-tied"), fast_recipe("rotate+gptq", scheme="int8:g32:sym")

    def stop(progress: Progress) -> None:
        if progress.part == "block 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "a", wanted, progress=stop)
    assert quantize(model, tmp_path / "a", wanted).resumed
    quantize(model, tmp_path / "b", wanted)
    same(tmp_path / "a", tmp_path / "b")


def same(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
