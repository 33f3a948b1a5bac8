"""What `verify --for transformers` says of names and shapes is what stock transformers reports on loading the files."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from quantforge import api
from quantforge.architectures import architecture_of
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.engine_verdicts import unmapped_reason
from quantforge.formats.open_model import open_model
from quantforge.model.transformers_loading import LoadingResult, check_loading
from quantforge.recipe import Recipe
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import copy_model, quantize, recipe, run_command
from tests.thorough import mark_others_thorough

Tensors = dict[str, torch.Tensor]
Made = Callable[[str, str], Path]

SCHEMES = {
    "plain": None,
    "compressed-tensors": "int8:g32:sym",
    "bnb": "nf4",
    "fp8": "fp8_e4m3:128x128",
    "gptq": "int8:g32:sym",
}


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def make(family: str, form: str) -> Path:
        if form == "plain":
            return tiny(family)
        out = tmp_path_factory.mktemp(family) / form
        quantize(tiny(family), out, recipe(format=form, scheme=SCHEMES[form], scales="absmax"))
        return out

    return make


def ours(path: Path) -> LoadingResult:
    model = open_model(path)
    return check_loading(
        model.config,
        [entry.to_stored_tensor() for entry in model.entries.values()],
        model.read,
        lambda: [entry.to_stored_tensor() for entry in decode_checkpoint(model).entries.values()],
    )


def theirs(path: Path) -> tuple[set[str], set[str]] | None:
    """Return the parameters that transformers makes up: missing ones, those of other shapes; None where it fails."""
    towers = "text_config" in json.loads((path / "config.json").read_text())
    auto = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    try:
        _, info = auto.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True)
    except NotImplementedError:  # it has no random numbers of packed weights
        return None
    return set(info["missing_keys"]), {name for name, *_ in info["mismatched_keys"]}


def agrees(path: Path) -> LoadingResult:
    found = ours(path)
    mismatched = {text.partition(" ")[0] for text in found.mismatched}
    assert (found.not_tried, found.failed, found.error) == ("", (), "")
    expected = theirs(path)
    assert found.reason if expected is None else (set(found.missing), mismatched) == expected
    return found


HEALTHY = [
    ("llama-tied", "plain"), ("llama-tied", "compressed-tensors"), ("llama-tied", "bnb"), ("llama-wide", "fp8"),
    ("gemma3-multimodal", "plain"), ("gemma3-multimodal", "compressed-tensors"), ("mixtral", "plain"),
    ("mixtral", "compressed-tensors"), ("qwen3-next", "compressed-tensors"), ("gpt-oss", "plain"),
    ("llama4", "compressed-tensors"), ("gpt2", "bnb"), ("nemotron-h", "compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form"),
    mark_others_thorough(HEALTHY, *HEALTHY[1:4], HEALTHY[5], HEALTHY[7], HEALTHY[11]),
)
def test_nothing_is_missed_in_healthy_results(made: Made, family: str, form: str) -> None:
    assert not agrees(made(family, form)).reason


def _renamed(tensors: Tensors, old: str, new: str) -> None:
    assert any(re.search(old, name) for name in tensors)
    for name in [*tensors]:
        tensors[re.sub(old, new, name)] = tensors.pop(name)


def _prefixed(tensors: Tensors) -> None:
    _renamed(tensors, "^", "language_model.")


def _norm_renamed(tensors: Tensors) -> None:
    _renamed(tensors, r"layers\.1\.(\w+)_layernorm", r"layers.1.\1_norm")


def _linear_renamed(tensors: Tensors) -> None:
    _renamed(tensors, r"layers\.2\.self_attn\.o_proj", "layers.2.self_attn.out")


def _without_a_norm(tensors: Tensors) -> None:
    del tensors["model.layers.0.input_layernorm.weight"]


def _longer_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(80)


def _fewer_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


def _base_model_alone(tensors: Tensors) -> None:
    """Take off a prefix that transformers puts on again: nothing is lost."""
    _renamed(tensors, r"^model\.", "")


PLANTED = (_prefixed, _norm_renamed, _linear_renamed, _without_a_norm, _longer_norm, _fewer_layers)
CASES = [(form, plant) for form in ("compressed-tensors", "plain", "bnb") for plant in PLANTED]


def planted(model: Path, place: Path, plant: Callable[[Tensors], None]) -> Path:
    damaged = copy_model(model, place)
    (file,) = damaged.glob("*.safetensors")
    tensors = load_file(file)
    plant(tensors)
    save_file(tensors, file, {"format": "pt"})
    return damaged


@pytest.mark.parametrize(("form", "plant"), mark_others_thorough(CASES, *CASES[:7]))
def test_planted_faults_are_missed_as_transformers_misses_them(
    made: Made, tmp_path: Path, form: str, plant: Callable[[Tensors], None]
) -> None:
    found = agrees(planted(made("llama-tied", form), tmp_path / "m", plant))
    assert found.reason
    assert "parameter(s)" in found.reason


@pytest.mark.parametrize("form", ["compressed-tensors", "plain"])
def test_a_prefix_that_transformers_adds_is_no_fault(made: Made, tmp_path: Path, form: str) -> None:
    assert not agrees(planted(made("llama-tied", form), tmp_path / "m", _base_model_alone)).reason


def test_what_its_converters_refuse_is_named(made: Made) -> None:
    """Of three convolutions it makes one, which it cannot beside packed layers."""
    found = ours(made("kimi-linear", "compressed-tensors"))
    assert (len(found.failed), "conv1d" in found.failed[0]) == (2, True)


def test_verify_names_what_would_be_random(made: Made, tmp_path: Path) -> None:
    broken = planted(made("gemma3", "compressed-tensors"), tmp_path / "m", _prefixed)
    report = verify(broken, engine="transformers", forward=False)
    (finding,) = (item for item in report.findings if item.check == "engine")
    assert "84 parameter(s) are in no file and would be random" in finding.detail
    assert "model.embed_tokens.weight" in finding.detail


@pytest.mark.parametrize(("plant", "lost"), [(None, 0), (_prefixed, 1)])
def test_without_the_library_of_a_quantizer_it_is_not_tried_unless_names_alone_tell(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Tensors], None] | None, lost: int
) -> None:  # fmt: skip
    from transformers.quantizers import quantizer_gptq

    monkeypatch.setattr(quantizer_gptq, "is_optimum_available", lambda: False)
    model = made("gemma3", "gptq")
    model = planted(model, tmp_path / "m", plant) if plant else model
    report = verify(model, engine="transformers", forward=False)
    found = [item for item in report.findings if item.check == "engine"]
    assert len(found) == lost
    said = report.skipped.get("engine", "")
    assert ("not tried" in said, "optimum" in said) == (not lost, not lost)


def test_code_beside_a_model_is_never_run(made: Made, tmp_path: Path) -> None:
    """A type that only such code defines is not tried."""
    model = copy_model(made("llama-tied", "plain"), tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config |= {"model_type": "own", "auto_map": code}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text("raise SystemExit(7)")
    found = ours(model)
    assert (found.reason, "'own' is unknown to transformers" in found.not_tried) == ("", True)


def test_a_plan_leaves_open_what_it_cannot_tell_and_a_result_says_it(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = planted(tiny("gemma3"), tmp_path / "m", _prefixed)
    wanted = Recipe(scheme="int8:row", scales="absmax", method="rtn")
    (said,) = (one for one in api.plan(str(source), wanted).engines if one.engine == "transformers")
    assert (said.loads, "language_model.model." in said.reason) == (None, True)
    asked = run_command(
        capsys, "plan", source, "--scheme", "int8:row", "--method", "rtn", "--scales", "absmax"
    )
    assert re.search(r"transformers +not tried", asked.out)
    refused = run_command(
        capsys, "plan", source, "--scheme", "int8:row", "--method", "rtn", "--for", "transformers"
    )
    assert (refused.code, "would be random" in refused.err) == (4, True)
    quantize(source, tmp_path / "q", wanted)
    assert re.search(
        r"\| transformers \| no \| \d+ parameter", (tmp_path / "q/README.md").read_text()
    )


def test_a_family_without_declarations_is_settled_when_it_is_published(
    tiny: Tiny, tmp_path: Path
) -> None:
    source = planted(tiny("llama-tied"), tmp_path / "m", _prefixed)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "jais2", "architectures": []}
    (source / "config.json").write_text(json.dumps(config))
    done = quantize(source, tmp_path / "q", recipe(scheme="int8:row", scales="absmax"))
    (said,) = (one for one in done.plan.engines if one.engine == "transformers")
    assert (said.loads, "without declarations" in said.reason) == (None, True)
    card = (tmp_path / "q/README.md").read_text()
    assert re.search(r"\| transformers \| no \| \d+ parameter", card)


TOWERS = (
    "gemma3",
    "gemma3-multimodal",
    "gemma4",
    "gemma4-multimodal",
    "llama4",
    "llama4-multimodal",
    "mistral3",
)


@pytest.mark.parametrize("family", mark_others_thorough(TOWERS, *TOWERS[:2]))
def test_declared_names_are_those_that_transformers_looks_for(tiny: Tiny, family: str) -> None:
    """A plan leaves open every prefix under which it finds nothing, and no other."""
    model = open_model(tiny(family))
    architecture = architecture_of(model.config)
    assert architecture is not None
    stored = [entry.to_stored_tensor() for entry in model.entries.values()]
    whole = model.config.get("text_config") is not None
    for prefix in ("", "language_model.", "model.language_model."):
        names = [_under(prefix, tensor.name, whole=whole) for tensor in stored]
        moved = [
            type(tensor)(name, tensor.dtype, tensor.shape)
            for name, tensor in zip(names, stored, strict=True)
        ]
        found = check_loading(model.config, moved, model.read, list)
        left_open = bool(unmapped_reason(architecture, model.config, names))
        assert (prefix, found.not_tried, left_open) == (prefix, "", bool(found.reason))


def _under(prefix: str, name: str, *, whole: bool) -> str:
    """Return the name of a decoder's tensor under another prefix; towers stay where they are."""
    if whole and "language_model." not in name and not name.startswith("lm_head."):
        return name
    alone = re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name)
    alone = alone.removeprefix("language_model.")
    if prefix == "model.language_model.":
        return re.sub(r"^model\.", prefix, alone)
    return prefix + alone
