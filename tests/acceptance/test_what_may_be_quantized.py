"""Sources of every family, FP8, adapters and calibration texts are quantized; damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.acceptance import models
from tests.acceptance.decoders import decode
from tests.acceptance.support import (
    DEMO_GPTQ,
    EVALUATION,
    GPTQ,
    ROWS,
    RTN,
    Copy,
    Make,
    Model,
    command,
    config,
    digest,
    digests,
    document,
    manifest,
    refusal,
    relative_error,
    tensors,
)
from tests.thorough import mark_others_thorough, thorough_case

FAMILIES = ("llama", "tied", "gpt2", "mixture", "hybrid", "tower")


@pytest.mark.parametrize(
    ("family", "words"),  # by GPTQ every family; without data those whose linears lie otherwise
    mark_others_thorough(
        [*((family, GPTQ) for family in FAMILIES), *((name, RTN) for name in ("mixture", "tower"))],
        *((family, GPTQ) for family in FAMILIES if family != "llama"),
    ),
)
def test_all_linears_of_a_family_are_quantized(
    family: str, words: str, model: Model, make: Make, tmp_path: Path
) -> None:
    """All linears of the blocks have codes, the result is sound, and transformers loads its decoded weights."""
    result = make("quantize", family, words)
    assert result.document["quantized_share_in_blocks"] > 0.99
    report = document("verify", result.path, "--source", model(family))
    assert report["ok"] is True, report["findings"]
    (_, row) = document("eval", model(family), result.path, EVALUATION)["models"]
    assert 0 < row["kl_mean"] < 0.5


@pytest.mark.parametrize("family", ["mixture", thorough_case("hybrid"), "tower", "gpt2"])
def test_decoded_weights_load_in_transformers(
    family: str, model: Model, make: Make, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family == "tower" else AutoModelForCausalLM
    document("export", make("quantize", family, RTN).path, "--format plain -o", tmp_path / "plain")
    ids = torch.arange(24)[None]
    logits = []
    for path in (model(family), tmp_path / "plain"):
        network, loaded = auto.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not loaded["missing_keys"]
        assert not loaded["unexpected_keys"]
        with torch.inference_mode():
            logits.append(network(ids).logits)
    assert 0 < relative_error(logits[1], logits[0]) < 0.8


def test_transformers_loads_a_packed_result(model: Model, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    result = make("quantize", "llama", RTN).path
    document("export", result, "--format plain -o", tmp_path / "plain")
    ids, logits = torch.arange(24)[None], []
    for path in (result, tmp_path / "plain"):
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(network(ids).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_routers_vision_towers_and_state_parameters_stay_unquantized(
    model: Model, make: Make
) -> None:
    for family, part in (
        ("mixture", "mlp.gate.weight"),
        ("tower", "vision_tower"),
        ("hybrid", "A_log"),
    ):
        source, stored = tensors(model(family)), tensors(make("quantize", family, RTN).path)
        kept = [name for name in source if part in name]
        assert kept
        assert all(torch.equal(stored[name], source[name]) for name in kept), family


def test_expert_token_options_change_calibration(make: Make) -> None:
    result = make("quantize", "mixture", GPTQ)
    assert result.document["event_counts"]["expert-few-tokens"] >= 1
    enough = make("quantize", "mixture", GPTQ, "--min-expert-tokens 1")
    assert "expert-few-tokens" not in enough.document["event_counts"]
    every = make("quantize", "mixture", GPTQ, "--expert-tokens all")
    assert digest(every.path / "model.safetensors") != digest(result.path / "model.safetensors")


def test_prune_experts_removes_a_share_of_experts(make: Make, model: Model) -> None:
    result = make("quantize", "mixture", "--method rtn --bits 4 --prune-experts 25%", ROWS).path
    settings = config(result)
    assert 3 in (settings.get("num_experts"), settings.get("num_local_experts"))
    stored = tensors(result)
    assert stored["model.layers.0.mlp.gate.weight"].shape[0] == 3
    assert not any("experts.3." in name for name in stored)
    assert document("verify", result, "--source", model("mixture"))["ok"] is True


def test_an_undeclared_family_defaults_to_rtn_and_allows_gptq(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPTJConfig

    small = GPTJConfig(vocab_size=320, n_embd=128, n_layer=1, n_head=4, rotary_dim=8, n_positions=128,
                       bos_token_id=0, eos_token_id=1)  # fmt: skip
    network = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    models.fill(network)
    network.save_pretrained(tmp_path / "own")
    models.tokenizer().save_pretrained(tmp_path / "own")
    assert document("plan", tmp_path / "own", "--bits 4")["method"] == "rtn"
    document("quantize", tmp_path / "own", "--method gptq --bits 4", ROWS, "-o", tmp_path / "q")
    assert document("verify", tmp_path / "q", "--source", tmp_path / "own")["ok"] is True
    derived = document("inspect", tmp_path / "own", "--derive")
    reading = [{*group["linears"]} for kind in derived["kinds"] for group in kind["inputs"]]
    assert any({"attn.q_proj", "attn.k_proj", "attn.v_proj"} <= group for group in reading)


def test_an_fp8_source_is_decoded_before_quantization(
    model: Model, copied: Copy, tmp_path: Path
) -> None:
    source = copied(model("llama"))
    stored, plain = tensors(source), {}
    for name in [name for name in stored if "mlp" in name]:
        weight = stored[name].float()
        rows, columns = (size // 128 for size in weight.shape)
        tiles = weight.reshape(rows, 128, columns, 128)
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        plain[name] = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
        stored[name] = codes.reshape(weight.shape)
        stored[f"{name}_scale_inv"] = scale
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    left = [f"model.layers.{block}.self_attn.{part}_proj" for block in range(2) for part in "qkvo"]
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128], "modules_to_not_convert": [*left, "lm_head"]}  # fmt: skip
    (source / "config.json").write_text(
        json.dumps({**config(source), "quantization_config": quantization})
    )
    document(
        "quantize",
        source,
        "--method rtn --scheme int8:g128 --calibration none -o",
        tmp_path / "q",
    )
    for name, weight in decode(tmp_path / "q").items():
        if "mlp" in name:
            assert relative_error(weight, plain[f"{name}.weight"]) < 0.01, name
    assert document("verify", tmp_path / "q", "--source", source)["ok"] is True
    stored.pop("model.layers.0.mlp.up_proj.weight_scale_inv")
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    message = refusal(3, "quantize", source, RTN, "-o", tmp_path / "none")
    assert "up_proj" in message


def test_an_adapter_is_merged_before_quantization(
    model: Model, adapter: Path, tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    document(
        "quantize",
        model("llama"),
        "--method rtn --format plain --adapter",
        adapter,
        "-o",
        merged,
    )
    halves, source, merged_weights = tensors(adapter), tensors(model("llama")), tensors(merged)
    for name, weight in source.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in halves:
            product = halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]
            expected = (weight.float() + 2 * product).to(weight.dtype)
        else:
            expected = weight
        assert torch.equal(merged_weights[name], expected), name
    result = tmp_path / "rounded"
    document("quantize", model("llama"), RTN, "--adapter", adapter, "-o", result)
    assert (
        document("verify", result, "--source", model("llama"), "--adapter", adapter)["ok"] is True
    )
    assert "--adapter" in refusal(3, "verify", result, "--source", model("llama"))
    assert "lora" in manifest(result)["recipe"]


def test_calibration_reads_text_jsonl_parquet_and_mixtures(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as arrow
    from pyarrow import parquet

    lines = [
        f"row {number}: the weights are rounded to the nearest point of the grid " * 8
        for number in range(40)
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    parquet.write_table(arrow.table({"text": lines}), tmp_path / "c.parquet")
    sources = {"a": tmp_path / "a.txt", "b": tmp_path / "b.jsonl", "c": tmp_path / "c.parquet"}
    sources["mixed"] = f"builtin=1,{tmp_path / 'a.txt'}=1"
    manifests = {}
    for name, source in sources.items():
        out = tmp_path / name
        words = "--method gptq --bits 4 --samples 4 --length 32 --refine 0 --calibration"
        document("quantize", model("llama"), words, source, "-o", out)
        manifests[name] = manifest(out)
        assert str(tmp_path) not in json.dumps(manifests[name])  # names and digests, no paths
    assert digest(tmp_path / "a.txt") in manifests["a"]["recipe"]
    assert (
        manifests["b"]["calibration"]["digest"] == manifests["c"]["calibration"]["digest"]
    )  # the same rows


def test_conversations_are_rendered_with_the_chat_template(model: Model, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"say {number} " * 40}]} for number in range(20)
    ]
    chats, rendered = tmp_path / "chats.jsonl", tmp_path / "rendered.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [f"user: {row['messages'][0]['content']}\n" for row in rows]
    rendered.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = "--method gptq --bits 4 --samples 4 --length 32"
    weight_digests = []
    for source, more in ((chats, ("--chat-template",)), (rendered, ())):
        document(
            "quantize",
            model("llama"),
            words,
            "--calibration",
            source,
            more,
            "-o",
            tmp_path / source.stem,
        )
        weight_digests.append(digest(tmp_path / source.stem / "model.safetensors"))
    assert weight_digests[0] == weight_digests[1]


def test_unusable_calibration_texts_are_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    for name in ("empty.txt", "short.txt", "broken.jsonl", "absent.txt"):
        message = refusal(
            3,
            "quantize",
            model("llama"),
            GPTQ,
            "--calibration",
            tmp_path / name,
            "-o",
            tmp_path / "out",
        )
        assert name in message or "tokens" in message
    assert not (tmp_path / "out").exists()


# ---- what is refused, before anything is written


def set_weight(source: Path, name: str, value: float) -> None:
    stored = tensors(source)
    stored[name][3, 5] = value
    save_file(stored, source / "model.safetensors", {"format": "pt"})


def test_a_nan_weight_is_refused_by_name(model: Model, copied: Copy, tmp_path: Path) -> None:
    source, name = copied(model("llama")), "model.layers.1.mlp.up_proj.weight"
    set_weight(source, name, float("nan"))
    assert name in refusal(3, "quantize", source, RTN, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [*tmp_path.glob(".out*")]


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(
    model: Model, copied: Copy, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for change in ("missing", "left over", "of another shape"):
        source = copied(model("llama"))
        stored = tensors(source)
        weight = stored.pop(name) if change == "missing" else stored[name]
        if change == "left over":
            stored["model.layers.1.mlp.extra.weight"] = weight.clone()
        if change == "of another shape":
            stored[name] = weight[:64].contiguous()
        save_file(stored, source / "model.safetensors", {"format": "pt"})
        message = refusal(3, "plan", source, RTN)
        assert ("extra" if change == "left over" else "up_proj") in message, change


def test_damaged_pickled_and_linked_models_are_refused(
    model: Model, copied: Copy, tmp_path: Path
) -> None:
    cut = copied(model("llama"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refusal(3, "plan", cut, RTN)
    pickled = copied(model("llama"))
    torch.save({"a": torch.zeros(2)}, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "pytorch_model.bin" in refusal(3, "plan", pickled, RTN)
    linked = copied(model("llama"))
    (linked / "config.json").rename(tmp_path / "config.json")
    (linked / "config.json").symlink_to(tmp_path / "config.json")
    refusal(3, "plan", linked, RTN)
    huge = copied(model("llama"))
    (huge / "config.json").write_text(json.dumps({**config(huge), "num_hidden_layers": 10**9}))
    refusal(3, "plan", huge, RTN)


def test_model_code_is_neither_run_nor_copied(model: Model, copied: Copy, tmp_path: Path) -> None:
    source = copied(model("llama"))
    (source / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}
    (source / "config.json").write_text(json.dumps({**config(source), "auto_map": auto}))
    result = document("quantize", source, RTN, "-o", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out" / "modeling_own.py").exists()
    left = " ".join(result["not_copied"])
    assert "modeling_own.py" in left
    assert "auto_map" in left


def test_license_tokenizer_and_templates_are_copied_unchanged(
    model: Model, copied: Copy, make: Make, tmp_path: Path
) -> None:
    source, output = digests(model("demo")), digests(make("quantize", "demo", DEMO_GPTQ).path)
    for name in (
        "LICENSE",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert output[name] == source[name], name
    recorded = manifest(make("quantize", "demo", DEMO_GPTQ).path)["source"]["files"]
    assert {name: entry["sha256"] for name, entry in recorded.items()} == {
        name: source[name] for name in recorded
    }
    assert "model.safetensors" in recorded


def test_the_source_is_never_changed(model: Model, copied: Copy, tmp_path: Path) -> None:
    source = copied(model("llama"))
    before = digests(source)
    document("quantize", source, GPTQ, "-o", tmp_path / "out")
    document("verify", tmp_path / "out", "--source", source)
    assert digests(source) == before
    for output in (source, source / "inside"):
        ended = command("quantize", source, RTN, "-o", output)
        assert ended.code in {2, 3, 4}
    assert digests(source) == before
