"""Each rounding method and option changes the result as documented, and reports substitutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.acceptance.decoders import decode
from tests.acceptance.support import (
    EVALUATION,
    GPTQ,
    ROWS,
    RTN,
    Make,
    Model,
    command,
    config,
    digest,
    document,
    manifest,
    refusal,
    relative_error,
    tensors,
)
from tests.thorough import mark_others_thorough, thorough_case

METHODS = {
    "rtn": RTN,
    "gptq": GPTQ,
    "awq": f"--method awq --bits 4 {ROWS}",
    "awq+gptq": f"--method awq+gptq --bits 4 {ROWS}",
    "smooth": f"--method smooth --scheme W8A8 {ROWS}",
    "smooth+gptq": f"--method smooth+gptq --scheme W8A8 {ROWS}",
    "rotate+rtn": f"--method rotate+rtn --bits 4 {ROWS}",
    "guided": f"{GPTQ} --guided-hessians 2",
}


@pytest.mark.parametrize(
    "name", mark_others_thorough(METHODS, "awq+gptq", "smooth+gptq", "rotate+rtn", "guided")
)
def test_every_method_writes_a_result_that_verify_accepts(
    name: str, model: Model, make: Make
) -> None:
    result = make("quantize", "llama", METHODS[name])
    assert result.document["method"] == METHODS[name].split()[1]
    report = document("verify", result.path, "--source", model("llama"))
    assert (report["ok"], report["findings"]) == (True, [])


def test_calibrated_methods_diverge_less_than_rtn(model: Model, make: Make) -> None:
    names = ("rtn", "awq", "gptq", "awq+gptq", "guided")
    paths = [make("quantize", "llama", METHODS[name]).path for name in names]
    rows = document("eval", model("llama"), *paths, EVALUATION)["models"][1:]
    lost = {name: row["kl_mean"] for name, row in zip(names, rows, strict=True)}
    assert all(0 < value < lost["rtn"] for name, value in lost.items() if name != "rtn"), lost
    assert max(lost[name] for name in ("gptq", "awq+gptq", "guided")) < lost["rtn"] / 2, lost


def test_tuning_changes_scales_but_not_head_or_embedding(model: Model, make: Make) -> None:
    words = "--method gptq --bits 3 --samples 16 --length 64"
    plain, tuned = (make("quantize", "llama", words, f"--tune {epochs}").path for epochs in (0, 1))
    before, after = tensors(plain), tensors(tuned)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert any(name.endswith("weight_scale") for name in changed)
    assert not any("lm_head" in name or "embed_tokens" in name for name in changed)
    assert document("verify", tuned, "--source", model("llama"))["ok"] is True
    rows = document("eval", model("llama"), plain, tuned, EVALUATION)["models"][1:]
    assert rows[1]["kl_mean"] < 1.05 * rows[0]["kl_mean"]


def test_rtn_rounds_to_the_nearest_code(model: Model, make: Make) -> None:
    result = make("quantize", "llama", RTN, "--scales absmax")
    scale, decoded = tensors(result.path), decode(result.path)
    for name, weight in tensors(model("llama")).items():
        if "_proj" in name:
            module = name.removesuffix(".weight")
            steps = scale[f"{module}.weight_scale"].float().repeat_interleave(128, 1)
            away = (decoded[module] - weight.float()).abs() / steps
            clipped = decoded[module] >= 6.5 * steps  # beyond the last code
            assert float(away[~clipped].max()) <= 0.5001, name
            largest = weight.float().reshape(len(weight), -1, 128).abs().amax(2)
            assert (
                scale[f"{module}.weight_scale"].float() / (largest / 7.5) - 1
            ).abs().max() < 0.08


def test_scale_search_has_less_error_than_absmax(model: Model, make: Make) -> None:
    paths = [make("quantize", "llama", RTN, "--scales", how).path for how in ("absmax", "search")]
    source = tensors(model("llama"))
    absmax, search = (
        sum(
            relative_error(weight, source[f"{name}.weight"])
            for name, weight in decode(path).items()
        )
        for path in paths
    )
    assert search < absmax


@pytest.mark.parametrize(
    "words",
    [
        "--refine 0", "--seed 1", "--samples 6", "--length 48", "--scales absmax", "--calibration self",
        thorough_case("--guided-hessians 2"), thorough_case("--max-shard-bytes 200000"),
        thorough_case("--calibration TEXT"),
    ],
)  # fmt: skip
def test_an_option_changes_the_bytes(
    words: str, make: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = tmp_path_factory.mktemp("text") / "own.txt"
    text.write_text("Each row of a matrix is rounded by itself, to the nearest point. " * 60)
    base = make("quantize", "llama", GPTQ)
    changed = make("quantize", "llama", GPTQ, words.replace("TEXT", str(text)))
    weights = [
        {path.name: digest(path) for path in sorted(result.path.glob("*.safetensors"))}
        for result in (base, changed)
    ]
    assert weights[0] != weights[1]


def test_ignore_and_rule_patterns_select_layers(make: Make) -> None:
    words = "--ignore re:.*k_proj --rule down_proj=int8:g128:sym --rule *.1.mlp.*=int3:g128:sym"
    result = make("quantize", "llama", RTN, words, "--lm-head int8:g128:sym").path
    schemes = document("inspect", result)["schemes"]
    assert schemes["int8:g128:sym:bf16"] == 3  # both down_proj and the head: the first rule wins
    assert schemes["int3:g128:sym:bf16"] == 2
    assert schemes["int4:g128:sym:bf16"] == 4  # both o_proj; gate and up of the first block
    stored = tensors(result)
    for part in "qkv":  # engines join them, so they stay together
        assert f"model.layers.0.self_attn.{part}_proj.weight" in stored
    assert "lm_head.weight_packed" in stored


def test_embedding_option_quantizes_the_embedding(make: Make) -> None:
    result = make("quantize", "llama", RTN, "--embedding int8:row")
    assert "int8:row:sym:bf16" in document("inspect", result.path)["schemes"]


def test_a_pattern_without_a_match_suggests_the_nearest_name(model: Model, tmp_path: Path) -> None:
    for option in ("--ignore", "--rule"):
        word = "q_porj" if option == "--ignore" else "q_porj=int8:g128:sym"
        message = refusal(3, "quantize", model("llama"), RTN, option, word, "-o", tmp_path / "out")
        assert "q_porj" in message
        assert "q_proj" in message


def test_weights_are_split_into_shards_of_a_maximum_size(model: Model, make: Make) -> None:
    limit = 200_000
    result = make("quantize", "llama", GPTQ, "--max-shard-bytes", limit).path
    shards = sorted(result.glob("*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size <= limit for shard in shards)
    assert (result / "model.safetensors.index.json").exists()
    assert document("diff", result, make("quantize", "llama", GPTQ).path)["tensors"] is not None
    assert {*tensors(result)} == {*tensors(make("quantize", "llama", GPTQ).path)}


def test_kv_cache_scales_are_measured(make: Make) -> None:
    result = make("quantize", "llama", "--method rtn --bits 4 --kv-cache fp8", ROWS).path
    stored = tensors(result)
    for block in range(2):
        for part in ("k_scale", "v_scale"):
            assert float(stored[f"model.layers.{block}.self_attn.{part}"]) > 0
    assert config(result)["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    heads = make("quantize", "llama", "--method rtn --bits 4 --kv-cache fp8_head", ROWS).path
    assert tensors(heads)["model.layers.0.self_attn.k_scale"].shape[0] == 2


def test_static_input_scales_are_measured(make: Make) -> None:
    words = f"--method rtn --scheme FP8_STATIC {ROWS}"
    ranges = {}
    for how in ("absmax", "percentile", "mse"):
        stored = tensors(make("quantize", "llama", words, "--activation-range", how).path)
        ranges[how] = torch.cat(
            [
                tensor.flatten().float()
                for name, tensor in sorted(stored.items())
                if "input_scale" in name
            ]
        )
        assert len(ranges[how]) == 14
    assert (ranges["percentile"] <= ranges["absmax"]).all()
    assert (ranges["percentile"] < ranges["absmax"]).any()


@pytest.mark.parametrize("method", ["magnitude", thorough_case("wanda"), "sparsegpt"])
def test_pruning_reaches_the_requested_sparsity(method: str, model: Model, make: Make) -> None:
    words = f"--method {method} --format plain {'' if method == 'magnitude' else ROWS}"
    result = make("quantize", "llama", words, "--sparsity 2:4").path
    for name, weight in tensors(result).items():
        if "_proj" in name:
            assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all(), name
    assert document("verify", result, "--source", model("llama"))["ok"] is True
    half = make("quantize", "llama", words, "--sparsity 50%").path
    zeros = (tensors(half)["model.layers.0.mlp.up_proj.weight"] == 0).sum(1)
    assert (zeros == 64).all()


def test_magnitude_pruning_keeps_the_largest_weights(model: Model, make: Make) -> None:
    words = "--method magnitude --format plain --sparsity 2:4"
    stored = tensors(make("quantize", "llama", words).path)
    name = "model.layers.0.mlp.up_proj.weight"
    source, pruned = tensors(model("llama"))[name].reshape(-1, 4), stored[name].reshape(-1, 4)
    kept = pruned != 0
    assert torch.equal(pruned[kept], source[kept])
    size = source.float().abs()
    least = size.where(kept, torch.full_like(size, torch.inf)).amin(1)
    assert (size.where(~kept, torch.zeros_like(size)).amax(1) <= least).all()


def test_rtn_keeps_zero_weights_zero(make: Make) -> None:
    sparse = make("quantize", "llama", "--method magnitude --format plain --sparsity 2:4").path
    rounded = decode(make("quantize", sparse, RTN).path)
    weight = tensors(sparse)["model.layers.1.mlp.down_proj.weight"]
    assert (rounded["model.layers.1.mlp.down_proj"][weight == 0] == 0).all()


def test_the_default_method_depends_on_bits_and_options(model: Model) -> None:
    source = model("llama")
    assert document("plan", source, "--bits 4")["method"] == "awq+gptq"
    assert document("plan", source, "--bits 8")["method"] == "rtn"
    assert document("plan", source, "--bits 4 --effort low")["method"] == "rtn"
    assert document("plan", source, "--bits 4 --calibration none")["method"] == "rtn"
    assert document("plan", source, "--type Q4_K_M")["method"] == "gptq"


def test_effort_sets_the_options_that_are_not_given(model: Model, tmp_path: Path) -> None:
    ended = command(
        "quantize",
        model("llama"),
        "--method gptq --bits 4 --samples 2 --length 16 --effort high -o",
        tmp_path / "high",
        "--json",
    )
    assert ended.code == 0, ended.err
    recipe = manifest(tmp_path / "high")["recipe"]
    assert 'effort = "high"' in recipe
    assert "guided_hessians = 1\n" in recipe
    assert "tune = 4\n" in recipe


@pytest.mark.thorough  # as `tests/unit/execution/test_quantize_to_a_size.py` shows
def test_target_size_is_an_upper_limit(model: Model, tmp_path: Path) -> None:
    words = f"--target 3.5bpw --candidates int3:g128,int4:g128 {ROWS}"
    result = document("quantize", model("llama"), words, "-o", tmp_path / "sized")
    assert 3.13 < result["bits_per_weight_in_blocks"] <= 3.5
    message = refusal(4, "quantize", model("llama"), "--target 1bpw", ROWS, "-o", tmp_path / "none")
    assert "1bpw" in message or "smallest" in message


def test_strict_refuses_degradation_events_that_are_not_allowed(
    model: Model, make: Make, tmp_path: Path
) -> None:
    result = make("quantize", "llama", GPTQ)
    counts = result.document["event_counts"]
    assert counts == {"few-calibration-tokens": 1} == manifest(result.path)["event_counts"]
    message = refusal(4, "quantize", model("llama"), GPTQ, "--strict -o", tmp_path / "strict")
    assert "few-calibration-tokens" in message
    assert not (tmp_path / "strict").exists()
    words = "--strict --allow few-calibration-tokens=1"
    assert (
        document("quantize", model("llama"), GPTQ, words, "-o", tmp_path / "allowed")[
            "event_counts"
        ]
        == counts
    )


def test_a_group_size_that_does_not_divide_is_substituted(
    model: Model, make: Make, tmp_path: Path
) -> None:
    result = make("quantize", "mixture", RTN)
    assert (
        result.document["event_counts"]["substitution"] == 8
    )  # 64 columns of four experts in two blocks
    assert document("inspect", result.path)["schemes"]["int4:g64:sym:bf16"] == 8
    message = refusal(4, "quantize", model("mixture"), RTN, "--strict -o", tmp_path / "out")
    assert "substitution" in message
    message = refusal(2, "quantize", model("llama"), "--scheme int4:g127 -o", tmp_path / "out")
    assert "g128" in message or "128" in message
