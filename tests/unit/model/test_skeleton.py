"""Models without weights: what transformers builds from a configuration, and what is refused."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantforge.errors import InputError
from quantforge.evaluation.divergence import final_hidden
from quantforge.files.reader import open_checkpoint
from quantforge.model.skeleton import build_skeleton
from quantforge.runtime.load import load
from quantforge.verification.verify import verify
from tests.conftest import FAMILIES, Tiny
from tests.thorough import representative_families


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_sliding_and_full_layers_compute_like_transformers(
    tiny: Tiny, tmp_path: Path, kinds: list[str]
) -> None:
    copytree(tiny("mistral"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    layers = config["num_hidden_layers"]
    values = {"sliding_window": 4, "layer_types": (kinds * layers)[:layers]}
    (tmp_path / "m/config.json").write_text(json.dumps(config | values))
    ids = torch.arange(20)[None] % 50
    own = load(tmp_path / "m", dtype=torch.float32).model
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(own(ids).logits, peer(ids).logits, rtol=1e-4, atol=1e-5)
        states = torch.cat([hidden for _, hidden in final_hidden(own, ids)])
        expected = peer.model(ids).last_hidden_state[:, :-1]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", representative_families(FAMILIES))
def test_a_skeleton_has_computed_buffers_and_no_large_weights(tiny: Tiny, family: str) -> None:
    model = build_skeleton(open_checkpoint(tiny(family)).config)
    large = [v for k, v in model.named_parameters() if v.dim() > 1 and "norm" not in k]
    assert all(parameter.is_meta for parameter in large)
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_zero_initialized_experts_take_no_memory(tiny: Tiny) -> None:
    model = build_skeleton(open_checkpoint(tiny("llama4")).config)
    stacks = [value for value in model.parameters() if value.dim() == 3]
    assert len(stacks) == 4
    assert all(value.is_meta for value in stacks)
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_impossible_module_counts_are_refused_at_once(key: str) -> None:
    config = {"model_type": "jamba", key: 1 << 40}
    for shown in (config, {"model_type": "qwen2_vl", "text_config": config}):
        with pytest.raises(InputError, match=f"{key} = {1 << 40}"):
            build_skeleton(shown)


def test_a_large_skeleton_takes_no_memory() -> None:
    config = {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 8,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    start = time.process_time()
    model = build_skeleton(config)
    assert time.process_time() - start < 5
    assert sum(parameter.numel() for parameter in model.parameters()) > 25e9


def test_a_skeleton_accepts_rope_scaling_keys(tiny: Tiny) -> None:
    config = dict(open_checkpoint(tiny("llama")).config)
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    new = build_skeleton(config).model.rotary_emb.inv_freq
    del config["rope_parameters"]
    old = build_skeleton(
        {**config, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    assert torch.equal(new, old.model.rotary_emb.inv_freq)


def test_configurations_transformers_cannot_run_are_input_errors(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = copytree(tiny("llama"), tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"cannot run this llama configuration.*sliding_window"):
        load(model).model(torch.tensor([[1, 2]]))
    (finding,) = [item for item in verify(model).findings if item.check == "logits"]
    assert "sliding_window" in finding.detail


def test_errors_of_hooks_are_not_rewritten(tiny: Tiny) -> None:
    def broken(*_: object) -> None:
        raise ValueError("ours")

    model = load(tiny("llama")).model
    model.model.layers[0].register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match="ours"):
        model(torch.tensor([[1, 2]]))


def test_config_keys_that_load_code_are_ignored(tiny: Tiny) -> None:
    config = {
        **open_checkpoint(tiny("llama")).config,
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "_attn_implementation_internal": "someone/kernel",
        "_attn_implementation": "someone/kernel",
        "attn_implementation": "someone/kernel",
        "trust_remote_code": True,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "torch_dtype": "bfloat16",
    }
    seen: list[str] = []
    watching = [True]  # an audit hook cannot be removed
    sys.addaudithook(
        lambda event, _: seen.append(event) if watching and event.startswith("socket.") else None
    )
    model = build_skeleton(config)
    watching.clear()
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    text = json.dumps(model.config.to_dict())
    assert "evil" not in text
    assert "someone" not in text
    assert "gptq" not in text
    assert model.config._attn_implementation in {"sdpa", "eager"}
    assert model.dtype == torch.float32
    assert not seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "no-such-model", "architectures": ["NoSuchModel"]},
            "unknown to transformers",
        ),
        ({"model_type": None}, "unknown to transformers"),
        ({"model_type": ["llama"]}, "unknown to transformers"),
        ({"model_type": "vit"}, "vit"),
        ({"hidden_act": "no-such-function"}, "refuses"),
        ({"rms_norm_eps": "small"}, "refuses"),
        ({"rope_parameters": {"rope_type": "no-such"}}, "refuses"),
        ({"layer_types": ["full_attention"]}, "refuses"),
    ],
)
def test_configurations_transformers_refuses_are_input_errors(
    tiny: Tiny, change: dict[str, Any], message: str
) -> None:
    config = {**open_checkpoint(tiny("qwen2")).config, **change}
    with pytest.raises(InputError, match=message):
        build_skeleton(config)
