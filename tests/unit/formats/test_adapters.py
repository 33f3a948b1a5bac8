"""LoRA adapters are merged like PEFT merges them, recorded, verified, and refused if they do not fit."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.files import checksums
from quantforge.files.reader import open_checkpoint
from quantforge.formats.open_model import open_plain_source
from quantforge.formats.sources import adapter as opening
from quantforge.recipe import AdapterOptions
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import StopError, crash_after, quantize, recipe, run_command
from tests.thorough import parametrize_each_value

RANK = 4


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> Path:
    """Write an adapter as PEFT's `save_pretrained` does."""
    directory.mkdir()
    named = {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": sorted({name.split(".")[-3] for name in tensors if "lora_A." in name}),
        **(config or {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def random_lora_tensors(
    model: Path, modules: tuple[str, ...], rank: int = RANK
) -> dict[str, Tensor]:
    """Return random LoRA matrices for every linear whose name has one of the endings."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, entry in open_checkpoint(model).entries.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(modules):
            rows, columns = entry.shape
            tensors[f"{module}.lora_A.weight"] = (
                torch.randn(rank, columns, generator=generator) / 16
            )
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 16
    return tensors


def load_tensors(model: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_float32_copy(model: Path, directory: Path) -> Path:
    shutil.copytree(
        model, directory, ignore=shutil.ignore_patterns("*.safetensors*", "config.json")
    )
    save_file(
        {name: value.float() for name, value in load_tensors(model).items()},
        directory / "model.safetensors",
    )
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return directory


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 2}}])
def test_merged_weights_follow_the_lora_formula(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = tiny("llama-wide")
    tensors = random_lora_tensors(model, ("q_proj", "v_proj", "down_proj"))
    source = open_plain_source(model, write_adapter(tmp_path / "a", tensors, options))
    base = load_tensors(model)
    changed = 0
    for name in source.entries:
        a = tensors.get(name.replace(".weight", ".lora_A.weight"))
        if a is None:
            assert torch.equal(source.read(name), base[name])
            continue
        b = tensors[name.replace(".weight", ".lora_B.weight")]
        alpha = 2 if "alpha_pattern" in options and "v_proj" in name else 16
        scaling = alpha / (math.sqrt(RANK) if options.get("use_rslora") else RANK)
        expected = base[name].float() + (b @ a) * scaling
        merged = source.read(name)
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)
        for first, last in ((0, 1), (3, 60), (len(merged) - 1, len(merged)), (64, 64)):
            assert torch.equal(source.read_rows(name, first, last), merged[first:last])
        changed += 1
    assert changed == 6
    assert "6 modules of rank 4; SHA-256" in source.source_notes["adapter"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "o_proj"], "use_rslora": True, "bias": "all"}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
        ("llama", {"target_modules": ["v_proj"], "lora_bias": True}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        ("llama", {"target_modules": ["embed_tokens", "k_proj"]}),
        ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
        ("llama", {"target_modules": ["q_proj", "gate_proj"], "rank_pattern": {"gate_proj": 7},
                   "alpha_pattern": {"model.layers.1.self_attn.q_proj": 5}, "layers_to_transform": [0, 1]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "use_dora": True}),
        ("phi3", {"target_modules": ["qkv_proj"]}),
    ],
)  # fmt: skip
def test_merged_weights_equal_peft(
    tiny: Tiny, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = write_float32_copy(tiny(family), tmp_path / "m")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=16, init_lora_weights=False, **options)
    trained = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for name, value in trained.named_parameters():
        if "magnitude" in name or "modules_to_save" in name or value.requires_grad:
            value.data *= 1 + 0.1 * torch.rand(value.shape, generator=generator)
    trained.save_pretrained(tmp_path / "a")
    expected = trained.merge_and_unload().state_dict()
    source = open_plain_source(model, tmp_path / "a")
    for name in source.entries:
        assert torch.equal(source.read(name), expected[name]), name
    before = load_tensors(model)
    assert any(not torch.equal(expected[name], before[name]) for name in source.entries)


def test_saved_original_modules_are_ignored(tiny: Tiny, tmp_path: Path) -> None:
    """PEFT saves them with ``save_embedding_layers`` and after a vocabulary change."""
    model = tiny("llama-wide")
    saved = {"lm_head.weight": torch.ones(load_tensors(model)["lm_head.weight"].shape)}
    saved["lm_head.original_module.weight"] = torch.zeros(3, 3)
    adapter_path = write_adapter(tmp_path / "a", random_lora_tensors(model, ("q_proj",)) | saved)
    merged = open_plain_source(model, adapter_path)
    assert torch.equal(merged.read("lm_head.weight"), saved["lm_head.weight"])


@parametrize_each_value(
    (
        "options",
        [
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
            {"target_modules": ["q_proj", "embed_tokens"]},
            {"target_modules": ["q_proj"]},  # PEFT saves what was resized
        ],
    ),
    ("added", [8, -8]),
)
def test_a_resized_vocabulary_is_refused_with_working_steps(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any], added: int
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = tiny("llama")
    rows = len(load_tensors(model)["lm_head.weight"])
    base = AutoModelForCausalLM.from_pretrained(model)
    base.resize_token_embeddings(rows + added)
    trained = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, **options))
    trained.save_pretrained(tmp_path / "a")
    with pytest.raises(InputError) as refused:
        open_plain_source(model, tmp_path / "a")
    what = f"{abs(added)} tokens were {'added' if added > 0 else 'removed'} before it was trained"
    assert what in refused.value.message
    assert re.search(
        rf"embed_tokens\.weight.* {rows + added} rows in the adapter, {rows} in",
        refused.value.message,
    )
    steps = refused.value.hint.partition("first: ")[2].partition("; save the tokenizer")[0]
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": peft.PeftModel}
    exec(steps.replace("'merged'", repr(str(tmp_path / "merged"))), names)
    common_rows = min(rows, rows + added)
    embedding = load_tensors(tmp_path / "merged")["model.embed_tokens.weight"]
    assert len(embedding) == rows + added
    if options.get("modules_to_save"):
        torch.testing.assert_close(
            embedding[:common_rows], load_tensors(model)["model.embed_tokens.weight"][:common_rows]
        )


def test_adapters_from_plan_to_reproduce(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, out = tiny("llama-wide"), tmp_path / "q"
    adapter_path = write_adapter(
        tmp_path / "tuned", random_lora_tensors(model, ("q_proj", "down_proj", "lm_head"))
    )
    requested_recipe = recipe(
        "gptq", scheme="int4:g32:sym", adapter=AdapterOptions(str(adapter_path))
    )
    plan = api.plan(model, requested_recipe)
    assert any(note.startswith("source adapter: tuned: 5 modules of rank 4") for note in plan.notes)
    quantize(model, out, requested_recipe)
    document = manifest.read_manifest(out)
    assert document is not None
    assert document["source"]["adapter"].startswith("tuned: 5 modules")
    assert str(tmp_path) not in json.dumps(document)
    assert plan.name == f"{model.name}-tuned-gptq-int4-g32"
    result = run_command(capsys, "inspect", out).out
    assert "adapter: tuned: 5 modules of rank 4; SHA-256 " in " ".join(result.split())
    merged = open_plain_source(model, adapter_path)
    assert torch.equal(
        load_tensors(out)["lm_head.weight"], merged.read("lm_head.weight").bfloat16()
    )
    assert verify(out, model, adapter=adapter_path).findings == []
    with pytest.raises(InputError, match="made with the adapter tuned"):
        verify(out, model)
    assert reproduce(out, model, Settings(adapter=adapter_path)).differing == ()
    monkeypatch.chdir(tmp_path)  # where a directory of its name lies
    with pytest.raises(InputError, match="made with the adapter tuned") as refused:
        reproduce(out, model, Settings())
    assert "--adapter DIR, of an adapter called tuned: SHA-256" in refused.value.hint
    other = write_adapter(tmp_path / "other", random_lora_tensors(model, ("q_proj",)))
    with pytest.raises(IntegrityError, match="not the adapter"):
        reproduce(out, model, Settings(adapter=other))
    with pytest.raises(IntegrityError, match="not the adapter"):
        verify(out, model, adapter=other)
    options = ("--windows", "2", "--length", "32", "--no-speed", "--json")
    with_it = json.loads(
        run_command(capsys, "eval", model, out, "--adapter", adapter_path, *options).out
    )
    without = json.loads(run_command(capsys, "eval", model, out, *options).out)
    assert with_it["models"][1]["kl_mean"] < without["models"][1]["kl_mean"] / 2


def test_eval_notes_a_reference_with_another_adapter(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama-wide")
    adapter_path = write_adapter(
        tmp_path / "tuned one", random_lora_tensors(model, ("q_proj", "down_proj"))
    )
    other = write_adapter(tmp_path / "other", random_lora_tensors(model, ("q_proj",)))
    monkeypatch.chdir(tmp_path)
    options = ("--windows", "2", "--length", "32", "--no-speed")
    quick = ("quantize", "--method", "rtn", "--scales", "absmax", "--bits", 8)
    result = run_command(capsys, *quick, model, "--adapter", adapter_path.name, "-o", "q")
    assert f"next: quantforge eval {model} q --adapter 'tuned one'\n" in result.err
    (tmp_path / "r.toml").write_text("[adapter]\nsource = 'tuned one'\n")
    words = (*quick, model, "--recipe", "r.toml", "-o", "q.gguf")
    assert f" {model} q.gguf --adapter 'tuned one'\n" in run_command(capsys, *words).err
    run_command(
        capsys,
        "quantize",
        model,
        "--format",
        "plain",
        "--adapter",
        adapter_path.name,
        "-o",
        "merged",
    )
    run_command(capsys, *quick, "merged", "-o", "of-merged")
    run_command(capsys, *quick, model, "-o", "base")

    def eval_output(*words: object) -> tuple[str, str]:
        ended = run_command(capsys, "eval", *words, *options)
        assert ended.code == 0
        return " ".join(ended.err.split()), " ".join(ended.out.split())

    merge = "--adapter DIR merges tuned one into"
    without, _ = eval_output(model, "q", "q.gguf", "base")
    for name in ("q", "q.gguf"):
        message = (
            f"{name} was made with the adapter tuned one, and the reference is measured without it"
        )
        assert f"{message}: {merge} {model}" in without
    assert without.count("was made with") == 2
    err, out = eval_output(model, "q", "q.gguf", "--adapter", adapter_path)
    assert "was made" not in err
    assert re.search(r"the adapter tuned one \(SHA-256 [0-9a-f]{64}\) merged into the ref", out)
    message = (
        "q was made with the adapter tuned one, and the reference is measured with the adapter"
    )
    assert f"{message} other: {merge}" in eval_output(model, "q", "--adapter", other)[0]
    message = "base was made without the adapter tuned one, which is merged into the reference"
    assert message in eval_output(model, "base", "--adapter", adapter_path)[0]
    err, out = eval_output("merged", "of-merged")
    assert "adapter" not in err + out
    before = Path("q/README.md").read_bytes()
    refused = run_command(capsys, "eval", model, "q", "--card", "q", *options)
    assert (refused.code, Path("q/README.md").read_bytes()) == (2, before)
    assert "--card q: q was made with the adapter tuned one, and the reference" in refused.err
    eval_output(model, "base", "q", "--card", "base")  # the other is not of this card
    eval_output(model, "q", "--card", "q", "--adapter", adapter_path)
    assert Path("q/README.md").read_bytes() != before


@pytest.mark.thorough
def test_sweeps_and_releases_merge_the_adapter_into_the_reference(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, notes = tiny("llama-wide"), list[str]()
    adapter_path = write_adapter(
        tmp_path / "tuned", random_lora_tensors(model, ("q_proj", "down_proj"))
    )
    other = write_adapter(tmp_path / "other", random_lora_tensors(model, ("q_proj",)))
    settings = Settings(note=notes.append)

    def swept(out: str, over: Mapping[str, Any], **choices: Any) -> Any:
        measured: Any = {"windows": 2, "length": 32}
        quick = {"method": "rtn", "scales": "absmax", **choices}
        return api.sweep(model, over, tmp_path / out, None, settings, measured, **quick)

    sweep = swept("s", {"bits": [8, 4]}, adapter=str(adapter_path))
    assert sweep.evaluation.protocol.adapter.startswith("tuned (SHA-256 ")
    assert not [note for note in notes if "was made" in note]
    sweep = swept("t", {"adapter": [str(adapter_path), str(other)]}, bits=8)
    assert sweep.evaluation.protocol.adapter == ""
    assert len([note for note in notes if "was made with the adapter" in note]) == 2
    spec = tmp_path / "release.toml"
    spec.write_text(
        f"model = '{model}'\n[evaluation]\ntext = 'builtin'\nwindows = 2\nlength = 32\n"
        "[[variant]]\nname = 'a'\nmethod = 'rtn'\nbits = 8\n"
        f"recipe = {{scales = 'absmax', adapter = {{source = '{adapter_path}'}}}}\n"
    )
    assert run_command(capsys, "release", spec, "-o", tmp_path / "r").code == 0
    card = next((tmp_path / "r").rglob("a/README.md")).read_text()
    assert "merged into the reference" in card
    target = ("--target", "7bpw", "--candidates", "int4:g32:sym,int8:g32:sym")
    rows = ("--samples", 4, "--length", 16, "--adapter", adapter_path, "-o", tmp_path / "x.toml")
    allocated = run_command(capsys, "allocate", model, *target, *rows)
    assert f" --recipe {tmp_path / 'x.toml'} --adapter {adapter_path}\n" in allocated.err


def test_verify_requires_the_adapter_of_the_recipe(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, file = tiny("llama-wide"), tmp_path / "q", tmp_path / "q.gguf"
    adapter_path = write_adapter(tmp_path / "tuned", random_lora_tensors(model, ("q_proj",)))
    quantize(model, out, recipe(scheme="int4:g32:sym"))
    api.export(out, out=file, format="gguf")
    blocks = tmp_path / "b.gguf"
    quantize(model, blocks, recipe(format="gguf", type="Q8_0", scales="absmax"))
    for result in (out, file, blocks):
        with pytest.raises(IntegrityError, match="made without an adapter"):
            verify(result, model, adapter=adapter_path)
    for result, adapter_option in ((out, adapter_path), (file, tmp_path / "nothing")):
        output = run_command(capsys, "verify", result, "--adapter", adapter_option)
        assert (output.code, "name the source too" in output.err) == (2, True)
    output = run_command(capsys, "verify", file, "--source", model, "--adapter", adapter_path)
    assert (output.code, "hint: leave --adapter out" in output.err) == (5, True)
    (out / manifest.NAME).unlink()  # nobody says what it was made with
    assert verify(out, model, adapter=adapter_path, forward=False).tensors
    api.export(out, out=tmp_path / "of-it.gguf", format="gguf")
    assert verify(tmp_path / "of-it.gguf", model, adapter=adapter_path).tensors
    merged = recipe(scheme="int4:g32:sym", adapter=AdapterOptions(str(adapter_path)))
    quantize(model, tmp_path / "m", merged)
    api.export(tmp_path / "m", out=tmp_path / "m.gguf", format="gguf")
    for result in (tmp_path / "m", tmp_path / "m.gguf"):
        assert not verify(result, model, adapter=adapter_path).findings
        with pytest.raises(InputError, match="made with the adapter tuned"):
            verify(result, model)


def test_a_card_names_the_merged_adapter_also_after_export(tiny: Tiny, tmp_path: Path) -> None:
    model, path = tiny("llama-wide"), tmp_path / "tuned"
    write_adapter(path, random_lora_tensors(model, ("q_proj",)))
    requested_recipe = recipe(
        scheme="int4:g32:sym", scales="absmax", adapter=AdapterOptions(str(path))
    )
    quantize(model, tmp_path / "q", requested_recipe, base_model="org/name")
    document = manifest.read_manifest(tmp_path / "q")
    assert document is not None
    moved = api.export(tmp_path / "q", format="gptq", out=tmp_path / "moved")
    assert moved.name == f"{model.name}-tuned-rtn-int4-g32-gptq"
    for card in ((tmp_path / item / "README.md").read_text() for item in ("q", "moved")):
        fields, text = card.split("\n---\n")
        assert {"base_model: org/name", "base_model_relation: finetune"} <= {*fields.splitlines()}
        assert f"# {model.name} with tuned quantized by rtn (" in text
        merged = f" with the adapter `{document['source']['adapter']}` merged into it"
        assert f"[org/name](https://huggingface.co/org/name){merged}, quantized by `rtn`" in text
        assert f"1. `{model.name}`{merged}: quantized by `rtn`" in text
    file = recipe(type="Q8_0", format="gguf", adapter=AdapterOptions(str(path)))
    assert api.plan(model, file).name == f"{model.name}-tuned-Q8_0.gguf"
    quantize(model, tmp_path / "x.gguf", file)
    assert f"{model.name}-tuned".encode() in (tmp_path / "x.gguf").read_bytes()[:4096]


@pytest.mark.thorough
def test_merged_models_are_quantized_like_saved_ones(tiny: Tiny, tmp_path: Path) -> None:
    model = write_float32_copy(tiny("llama-wide"), tmp_path / "m")
    adapter_path = write_adapter(tmp_path / "a", random_lora_tensors(model, ("q_proj", "up_proj")))
    source = open_plain_source(model, adapter_path)
    plain = write_float32_copy(tiny("llama-wide"), tmp_path / "p")
    save_file({name: source.read(name) for name in source.entries}, plain / "model.safetensors")
    for method in ("rtn", "awq+gptq"):
        requested_recipe = recipe(method, scheme="int4:g32:sym")
        quantize(plain, tmp_path / f"{method}-1", requested_recipe)
        with_it = recipe(method, scheme="int4:g32:sym", adapter=AdapterOptions(str(adapter_path)))
        quantize(model, tmp_path / f"{method}-2", with_it)
        first, second = (
            load_tensors(tmp_path / f"{method}-1"),
            load_tensors(tmp_path / f"{method}-2"),
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_tied_head_changed_by_an_adapter_is_untied(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama-tied")
    entry = open_checkpoint(model).entries["model.embed_tokens.weight"]
    rows, columns = entry.shape
    change = {
        "lm_head.lora_A.weight": torch.randn(RANK, columns) / 16,
        "lm_head.lora_B.weight": torch.randn(rows, RANK) / 16,
    }
    adapter_path = write_adapter(tmp_path / "a", change)
    source = open_plain_source(model, adapter_path)
    base = load_tensors(model)["model.embed_tokens.weight"]
    assert source.config["tie_word_embeddings"] is False
    assert torch.equal(source.read("model.embed_tokens.weight"), base)
    product = change["lm_head.lora_B.weight"] @ change["lm_head.lora_A.weight"] * 4
    torch.testing.assert_close(source.read("lm_head.weight"), base.float() + product)
    out = tmp_path / "q"
    quantize(model, out, recipe(scheme="int8:g32:sym", adapter=AdapterOptions(str(adapter_path))))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert verify(out, model, adapter=adapter_path).findings == []


def test_a_run_resumes_only_with_the_same_adapter(tiny: Tiny, tmp_path: Path) -> None:
    model, out = tiny("llama-wide"), tmp_path / "q"
    adapter_path = write_adapter(tmp_path / "a", random_lora_tensors(model, ("q_proj",)))
    requested_recipe = recipe(
        "gptq", scheme="int4:g32:sym", adapter=AdapterOptions(str(adapter_path))
    )
    with pytest.raises(StopError):
        quantize(model, out, requested_recipe, progress=crash_after("block 0"))
    assert quantize(model, out, requested_recipe).resumed
    with pytest.raises(StopError):
        quantize(model, tmp_path / "r", requested_recipe, progress=crash_after("block 0"))
    weights = adapter_path / "adapter_model.safetensors"
    save_file({name: value * 2 for name, value in load_file(weights).items()}, weights)
    from quantforge.errors import QuantForgeError

    with pytest.raises(QuantForgeError, match="adapter"):
        quantize(model, tmp_path / "r", requested_recipe)


def test_an_adapter_changed_during_the_run_is_noticed(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama-wide")
    adapter_path = write_adapter(tmp_path / "a", random_lora_tensors(model, ("q_proj",)))
    source = open_plain_source(model, adapter_path)
    weights = adapter_path / "adapter_model.safetensors"
    data, times = bytearray(weights.read_bytes()), weights.stat()
    data[-3] ^= 1
    weights.write_bytes(data)
    import os

    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    checksums._CACHE.clear()  # what is in memory is what was digested
    with pytest.raises(IntegrityError, match="changed while it was being read"):
        source.read("model.layers.1.self_attn.q_proj.weight")


FIRST = "model.layers.0.self_attn.q_proj"
A, B, LENGTHS = (f"{FIRST}.lora_{part}.weight" for part in ("A", "B", "magnitude_vector"))


def move_to_another_layer(tensors: dict[str, Tensor]) -> None:
    for name in (A, B):
        tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)


def without_tensors(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


EDITS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "name": move_to_another_layer,
    "shape": lambda t: t.update({A: t[A][:, :64]}),
    "half": without_tensors(B),
    "gone": without_tensors(A, B),
    "codes": lambda t: t.update({"lm_head.weight": torch.ones((320, 64), dtype=torch.int32)}),
    "other": lambda t: t.update({f"{FIRST}.lora_C.weight": torch.ones(2)}),
    "flat": lambda t: t.update({A: t[A][0]}),
    "deep": lambda t: t.update({B: t[B][..., None]}),
    "length": lambda t: t.update({LENGTHS: torch.ones(7)}),
    "nothing": lambda t: t.clear(),
    "many": lambda t: t.update(
        {f"model.layers.0.gone{n}.weight": torch.ones(2, 2) for n in range(11)}
    ),
    "bias": lambda t: t.update({f"{FIRST}.lora_B.bias": torch.ones(128)}),
    "nan": lambda t: t[B][0].fill_(torch.nan),
}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("name", r"model\.layers\.9\.self_attn\.q_proj\.weight: the model has no such tensor"),
        ("shape", r"q_proj\.weight: \[128, 64\], that of the model is \[128, 128\]"),
        ("half", "the other half of the product is missing"),
        ("rank", "adapter_config.json says rank 8"),
        ("prefix", "does not begin with base_model.model."),
        ("kind", "peft_type 'LOHA': not merged here"),
        ("bias", r"lora_bias adds to model\.layers\.0\.self_attn\.q_proj\.bias, which"),
        ("key", "use_qalora = True: not merged here"),
        ("pissa", "has changed the weights of the model as well"),
        ("pickle", "is a pickle, which is never read"),
        ("config", "no adapter_config.json"),
        ("dora", "use_dora and the magnitude vectors disagree"),
        ("other", "a tensor of no kind that is merged here"),
        ("nan", "holds nan"),
        ("switch", "use_rslora = 'yes' is of another type"),
        ("saved", "lm_head': missing, although adapter_config.json has it in modules_to_save"),
        (
            "gone",
            r"layers\.0\.self_attn\.q_proj\.weight: target_modules name it, and the adapter does not",
        ),
        ("codes", "I32 is no type of an adapter"),
        ("flat", r"A and B are \[128\] and \[128, 4\]"),
        ("deep", r"A and B are \[4, 128\] and \[128, 4, 1\]"),
        ("length", r"magnitude_vector.weight': \[7\], expected \[128\]"),
        ("nothing", "the adapter holds nothing"),
        ("zero", "r = 0 of model.layers.0.self_attn.q_proj"),
        ("word", "lora_alpha = 'sixteen' of"),
        ("flag", "lora_alpha = True of"),
        ("huge", "lora_alpha = 1e[+]308 of"),
        ("list", "alpha_pattern is no table"),
        ("PiSSA", "has changed the weights of the model as well"),
        ("many", r"does not fit .* \(11\): .*; and 1 more"),
    ],
)
def test_unsuitable_adapters_are_refused_with_the_cause(
    tiny: Tiny, tmp_path: Path, damage: str, words: str
) -> None:
    model = tiny("llama-wide")
    tensors = random_lora_tensors(model, ("q_proj",))
    config: dict[str, Any] = {
        "rank": {"r": 8}, "kind": {"peft_type": "LOHA"}, "key": {"use_qalora": True},
        "pissa": {"init_lora_weights": "pissa_niter_4"}, "dora": {"use_dora": True},
        "switch": {"use_rslora": "yes"}, "saved": {"modules_to_save": ["lm_head"]}, "zero": {"r": 0},
        "word": {"lora_alpha": "sixteen"}, "flag": {"lora_alpha": True}, "huge": {"lora_alpha": 1e308},
        "list": {"alpha_pattern": [4]}, "PiSSA": {"init_lora_weights": "PiSSA"}, "length": {"use_dora": True},
    }.get(damage, {})  # fmt: skip
    if damage in EDITS:
        EDITS[damage](tensors)
    adapter_path = write_adapter(tmp_path / "a", tensors, config)
    weights = adapter_path / "adapter_model.safetensors"
    if damage == "prefix":
        save_file(
            {name.removeprefix("base_"): value for name, value in load_file(weights).items()},
            weights,
        )
    elif damage == "pickle":
        weights.rename(adapter_path / "adapter_model.bin")
    elif damage == "config":
        (adapter_path / "adapter_config.json").unlink()
    requested_recipe = recipe(scheme="int4:g32:sym", adapter=AdapterOptions(str(adapter_path)))
    with pytest.raises(InputError, match=words):
        quantize(model, tmp_path / "q", requested_recipe)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("edit", "config", "hint"),
    [
        (lambda t: t.clear() or t.update({"x.weight": torch.ones(2)}), {}, "names 'org/base' as the model"),
        (lambda t: t.update({"lm_head.bias": torch.ones(2)}), {}, "its other tensors fit: train it without"),
        (EDITS["gone"], {}, "fetch it again: a part of it is missing"),
        (EDITS["name"], {"peft_type": "IA3"}, "merge_and_unload()"),
        (EDITS["name"], {"peft_type": "PROMPT_TUNING"}, "PEFT merges no such adapter either"),
        (EDITS["name"], {"trainable_token_indices": [3]}, "merge_and_unload()"),
    ],
)  # fmt: skip
def test_adapter_hints_depend_on_the_cause(
    tiny: Tiny, tmp_path: Path, edit: Any, config: dict[str, Any], hint: str
) -> None:
    model = tiny("llama-wide")
    tensors = random_lora_tensors(model, ("q_proj",))
    edit(tensors)
    settings = {"base_model_name_or_path": "org/base", **config}
    with pytest.raises(InputError) as refused:
        open_plain_source(model, write_adapter(tmp_path / "a", tensors, settings))
    assert hint in refused.value.hint


def test_dora_with_a_zero_row_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = write_float32_copy(tiny("llama-wide"), tmp_path / "m")
    tensors = random_lora_tensors(model, ("layers.0.self_attn.q_proj",))
    weights = load_tensors(model)
    weights[f"{FIRST}.weight"][5] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    tensors[B][5] = 0
    tensors[LENGTHS] = torch.ones(128)
    adapter_path = write_adapter(
        tmp_path / "a", tensors, {"use_dora": True, "layers_to_transform": [0]}
    )
    with pytest.raises(InputError, match=f"those of output 5 of {FIRST}.weight are all") as refused:
        open_plain_source(model, adapter_path).read(f"{FIRST}.weight")
    assert "use_dora=False" in refused.value.hint


def test_invalid_adapters_are_refused_before_digesting(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    adapter_path = write_adapter(tmp_path / "lora", random_lora_tensors(model, ("q_proj",)))
    digested: list[Path] = []
    real = opening.compute_checksums

    def record_digest(path: Path, inside: Path | None) -> Any:
        digested.append(path)
        return real(path, inside)

    monkeypatch.setattr(opening, "compute_checksums", record_digest)
    opening.open_adapter(adapter_path)
    assert digested == [adapter_path / opening.WEIGHTS]
    os.truncate(adapter_path / opening.WEIGHTS, 1 << 40)
    with pytest.raises(InputError, match=opening.WEIGHTS):
        opening.open_adapter(adapter_path)
    (adapter_path / opening.WEIGHTS).write_bytes(b"")
    os.truncate(adapter_path / opening.WEIGHTS, 3 << 30)
    with pytest.raises(InputError, match=opening.WEIGHTS):
        opening.open_adapter(adapter_path)
    assert len(digested) == 1


def test_an_adapter_may_cover_some_layers_only(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama-wide")
    tensors = random_lora_tensors(model, ("layers.1.self_attn.q_proj",))
    adapter_path = write_adapter(tmp_path / "a", tensors, {"layers_to_transform": [1]})
    assert "1 modules of rank 4" in open_plain_source(model, adapter_path).source_notes["adapter"]


def test_merging_into_quantized_codes_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama-wide")
    adapter_path = write_adapter(tmp_path / "a", random_lora_tensors(model, ("q_proj",)))
    quantize(model, tmp_path / "q", recipe(scheme="int4:g128:sym"))
    with pytest.raises(UsageError, match="nothing is merged into codes"):
        api.export(
            str(tmp_path / "q"),
            recipe(format="gptq"),
            tmp_path / "g",
            Settings(adapter=adapter_path),
        )
