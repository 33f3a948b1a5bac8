"""Derived declarations are the declared ones, and where nothing is declared they are proven in other ways."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.architectures import SharedInput
from quantforge.architectures.match import MatchedTensor, ModelLayout, Role, match_tensors
from quantforge.errors import InputError
from quantforge.files.reader import open_checkpoint
from quantforge.model.derive import derive
from quantforge.model.derive.derive import derive_declarations_for
from quantforge.model.scale_folding import fold_scale
from quantforge.model.skeleton import build_skeleton
from quantforge.model.stream import ModelStream
from quantforge.runtime.load import load
from quantforge.settings import Settings
from scripts import tiny_families
from tests.conftest import (
    MIXTURES,
    MULTIMODAL_MIXTURES,
    RENAMED_DECODER_FAMILIES,
    TEXT_FAMILIES,
    Tiny,
    tiny_tokenizer,
)
from tests.equivalence.test_stream import (
    FEW,
    ROWS,
    InFloat64,
    blocks_of,
    opened,
    random_scale,
    whole_model,
)
from tests.runs import quantize, recipe
from tests.thorough import mark_others_thorough, representative_families

# The convolution's b, c and x all absorb a scale of what out_proj reads: which one is declared is a matter of taste.
ANY_SLICE = {("lfm2", "conv.out_proj")}

# Declared to stay, although it is a linear
KEPT = ("indexer.weights_proj.weight", "indexer.weights_proj")

# Tokens are chosen among scores that may be equal, so that the least noise may change what is returned.
UNPROVEN = {
    ("deepseek-v32", "self_attn.q_a_proj"),
    # Computed in float32 by transformers; beside the other half of the layer too little of it is left to be seen.
    ("falcon-h1", "self_attn.o_proj"),
    ("falcon-h1-plain", "self_attn.o_proj"),
}


def derived(path: Path) -> ModelLayout:
    checkpoint = open_checkpoint(path)
    stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    return match_tensors(
        checkpoint.config, stored, derive_declarations_for(checkpoint.config, stored, whole=True)
    )


def facts(model_layout: ModelLayout, shared: SharedInput) -> object:
    """What a declaration says of one shared input, without words that only it has."""
    scale_fold, architecture = shared.scale_fold, model_layout.architecture
    assert architecture is not None
    assert model_layout.dimensions is not None
    produced = None
    if scale_fold is not None:
        rows = architecture.slice_rows(model_layout.dimensions, scale_fold.module, scale_fold.rows)
        produced = (scale_fold.kind, scale_fold.module, str(rows))
    # Of one linear that a norm precedes, the sub-block that is compared is a matter of taste, too.
    within = shared.compared_module if len(shared.linears) > 1 else ""
    linears = tuple(name for name in shared.linears if not name.endswith(KEPT))
    return linears, within, shared.heads, shared.expert, produced


def inner(model_layout: ModelLayout, tensor: MatchedTensor) -> str:
    """Return the name of a tensor in its block; outside of the blocks the decoder's own, without the whole model's."""
    if tensor.block >= 0:
        return tensor.name.removeprefix(f"{model_layout.block_name(tensor.block)}.")
    return tensor.name.replace("model.language_model.", "model.").replace("language_model.", "")


@pytest.mark.parametrize(
    "family",
    representative_families(
        [*TEXT_FAMILIES, *RENAMED_DECODER_FAMILIES, *MIXTURES, *MULTIMODAL_MIXTURES],
        *(
            "openai-gpt",
            "glm4",
            "exaone4",
            "starcoder2",
            "gpt-neox",
            "stablelm-parallel",
            "apertus",
            "nemotron-h",
        ),
        *("qwen2-moe", "deepseek-v32", "granitemoehybrid", "afmoe", "kimi-linear"),
    ),
)
def test_what_is_derived_is_what_is_declared(tiny: Tiny, family: str) -> None:
    _, declared = opened(tiny(family))
    found = derived(tiny(family))
    theirs = {tensor.header.name: tensor for tensor in found.tensors}
    own = [tensor for tensor in declared.tensors if tensor.role is not Role.FOREIGN]
    roles = {t.name: t.role for t in own if theirs[t.header.name].role is not t.role}
    assert roles == {name: Role.OTHER for name in roles if name.endswith(KEPT)}
    inside = [(t.header.name, inner(found, theirs[t.header.name])) for t in own]
    assert inside == [(t.header.name, inner(declared, t)) for t in own]
    assert len(theirs) == len(declared.tensors)
    assert not any(theirs[t.header.name].role is Role.LINEAR for t in declared.foreign_tensors)
    assert found.tied == declared.tied
    for mine, theirs in zip(found.layers, declared.layers, strict=True):
        one = {shared.key: shared for shared in mine.inputs}
        other = {shared.key: shared for shared in theirs.inputs}
        assert {key for key in one if not key.endswith(KEPT)} == other.keys()
        for key, shared in one.items():
            if key not in other:
                continue
            if (family, key) in ANY_SLICE:
                assert shared.linears == other[key].linears
                assert shared.scale_fold is not None
                continue
            if (family, key) in UNPROVEN:
                continue
            assert facts(found, shared) == facts(declared, other[key])
        assert set(mine.stacks) == set(theirs.stacks)
    assert found.dimensions is not None
    assert declared.dimensions is not None
    for name in ("hidden", "layers", "heads", "kv_heads", "vocab"):
        assert getattr(found.dimensions, name) == getattr(declared.dimensions, name), name


# Fused and separate projections, MLPs beside attention, ALiBi, state spaces, recurrences, mixtures, latent attention.
DENSE = ("bloom", "codegen", "gptj", "gpt_bigcode", "jais2", "minicpm3", "mpt", "persimmon")
OTHERS = (
    "exaone_moe",
    "falcon",
    "jamba",
    "mamba",
    "nemotron_h",
    "qwen3_next",
    "rwkv",
    "solar_open",
)


@pytest.fixture(scope="module")
def undeclared(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    @cache
    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        tiny_families.build(family).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        return directory

    return make


FEW_DENSE = ("bloom", "gpt_bigcode", "minicpm3", "persimmon")


@pytest.mark.parametrize(
    "family",
    mark_others_thorough(
        DENSE + OTHERS, *FEW_DENSE, "codegen", "falcon", "jamba", "mamba", "nemotron_h", "rwkv"
    ),
)
def test_the_stream_of_a_derived_family_is_the_model(undeclared: Tiny, family: str) -> None:
    path = undeclared(family)
    with ModelStream(open_checkpoint(path), derived(path), FEW, micro_batch=2) as stream:
        for part in stream:
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    model = whole_model(path)
    expected = torch.cat([model(rows).logits for rows in FEW.split(2)])
    assert (streamed - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", mark_others_thorough(DENSE, *FEW_DENSE))
def test_folding_every_derived_pair_preserves_the_function(undeclared: Tiny, family: str) -> None:
    model_layout = derived(undeclared(family))
    model = whole_model(undeclared(family), torch.float64)
    folded = 0
    with InFloat64():
        expected = model(FEW).logits
        for block in blocks_of(model, model_layout):
            for number, shared in enumerate(block.inputs):
                if shared.scale_fold is not None:
                    fold_scale(block, shared, random_scale(block, shared, number))
                    folded += 1
                    changed = (model(FEW).logits - expected).abs().max()
                    assert changed <= 1e-11 * expected.abs().max(), shared.key
    assert folded


def test_few_experts_tell_what_many_would(
    undeclared: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = undeclared("solar_open")
    expected = derived(path).architecture
    built: list[Mapping[str, Any]] = []
    monkeypatch.setattr(derive, "FEW_EXPERTS", 2)  # its four are many then
    monkeypatch.setattr(derive, "_CACHE", {})

    def watched(config: Mapping[str, Any], **options: bool) -> Any:
        built.append(config)
        return build_skeleton(config, **options)

    monkeypatch.setattr(derive, "build_skeleton", watched)
    assert derived(path).architecture == expected
    assert {config["n_routed_experts"] for config in built} == {4, 2}


def test_a_kind_of_layers_that_cuts_a_linear_otherwise_folds_nothing_into_it(
    undeclared: Tiny,
) -> None:
    """Heads of its last layer have no positions, and are wider."""
    model_layout = derived(undeclared("mistral_large4"))
    architecture, dimensions = model_layout.architecture, model_layout.dimensions
    assert architecture is not None
    assert dimensions is not None
    absorbs = []
    for kind in architecture.kinds:
        shapes = {
            item.name: [dimensions.size(text) for text in item.shape] for item in kind.parameters
        }
        (shared,) = (item for item in kind.inputs if "self_attn.o_proj" in item.linears)
        absorbs.append(shared.scale_fold is not None)
        if shared.scale_fold is not None:
            rows = architecture.slice_rows(
                dimensions, shared.scale_fold.module, shared.scale_fold.rows
            )
            assert isinstance(rows, list)
            assert len(rows) == shapes["self_attn.o_proj.weight"][1]
            assert max(rows) + 1 == shapes["self_attn.kv_b_proj.weight"][0]
    assert absorbs == [True, True, False]


def test_error_feedback_helps_a_family_that_nobody_declared(
    undeclared: Tiny, tmp_path: Path
) -> None:
    path = undeclared("gpt_bigcode")
    expected = whole_model(path)(ROWS).logits.log_softmax(-1)
    lost = {}
    for method in ("rtn", "gptq"):
        outcome = api.quantize(
            path, None, tmp_path / method, Settings(),
            method=method, scheme="int3:g32", format="compressed-tensors", samples=16, length=64,
        )  # fmt: skip
        logits = load(tmp_path / method).model(ROWS).logits.log_softmax(-1)
        lost[method] = float((expected.exp() * (expected - logits)).sum(-1).mean())
    assert any("derived from the code of transformers" in note for note in outcome.plan.notes)
    assert lost["gptq"] < lost["rtn"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("hrm_text", "not called once each"),
    ],
)
def test_what_a_stream_of_blocks_does_not_follow_is_refused(
    undeclared: Tiny, family: str, reason: str
) -> None:
    with pytest.raises(InputError, match=rf"gptq needs to know.*could not be derived: .*{reason}"):
        api.plan(undeclared(family), None, method="gptq")


def test_plain_rounding_misses_what_a_family_without_declarations_lacks(
    undeclared: Tiny, tmp_path: Path
) -> None:
    model = tmp_path / "m"
    shutil.copytree(undeclared("jamba"), model)
    file = model / "model.safetensors"
    tensors = load_file(file)
    wanted = recipe(scheme="int8:row:sym")
    quantize(model, tmp_path / "whole", wanted)
    name = "model.layers.2.feed_forward.down_proj.weight"
    others = {key: value for key, value in tensors.items() if key != name}
    save_file(others, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"1 parameter\(s\) are in no file, first: {name}"):
        quantize(model, tmp_path / "q", wanted)
    save_file({**others, name: tensors[name][:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{name} \[63, 128\], config.json asks for \[64, 128\]"):
        quantize(model, tmp_path / "q", wanted)
    assert not (tmp_path / "q").exists()
