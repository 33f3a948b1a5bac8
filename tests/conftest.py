"""Tiny random models of every family, with a real byte-level BPE tokenizer, made once per session when first asked for.

``tiny("llama")`` returns a directory. Weights are random but not small, so that no test passes because everything is
nearly zero; windows are shorter than the rows of the tests, head sizes differ from ``hidden / heads`` where a family
allows it, and every optional bias is there.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from hypothesis import settings

# A run in the background ignores interruptions, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A gate must say the same twice; `pytest --hypothesis-profile=explore` looks for new cases.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("gate")

if not torch.cuda.is_available():  # before anything imports triton: kernels are then interpreted
    os.environ["TRITON_INTERPRET"] = "1"


gc.disable()  # until all is collected: hardly anything of a hundred modules is garbage


def pytest_collection_finish() -> None:
    gc.enable()


# Loops that numba compiles take a minute: what one process has compiled, the others read, and later sessions.
NUMBA_CACHE_VARIABLE = "NUMBA_CACHE_DIR"


def numba_cache_folder() -> Path:
    """Return a cache folder named after the sources: numba sees no change in functions that a loop calls."""
    root = Path(__file__).parents[1]
    parts = (root / "quantforge" / name for name in ("numerics", "packers", "quantizers"))
    sources = [path for part in parts for path in sorted(part.rglob("*.py"))]
    made_of = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    folder = root / ".pytest_cache" / f"loops-{made_of[:16]}"
    for older in folder.parent.glob("loops-*"):
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    return folder


if NUMBA_CACHE_VARIABLE not in os.environ:
    os.environ[NUMBA_CACHE_VARIABLE] = str(numba_cache_folder())
numba.config.CACHE_DIR = os.environ[
    NUMBA_CACHE_VARIABLE
]  # it has read the variable when it was imported
numba.njit = functools.partial(numba.njit, cache=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a test that is skipped for want of a library has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None:
        return
    missing = [report for report in reporter.stats.get("skipped", [])
               if "could not import" in str(report.longrepr)]  # fmt: skip
    if missing:
        names = ", ".join(sorted({report.nodeid or str(report.fspath) for report in missing}))
        print(f"\nskipped for want of a library, which CI has to have: {names}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without a GPU that would note a whole traceback for one, for every test
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Hold tests that compare generated tokens to what `tests.choices` asks."""
    if pyfuncitem.get_closest_marker("tokens") is None:
        return (yield)
    from tests.choices import float32_verbs, plain_choices

    with float32_verbs(), plain_choices() as choices:
        try:
            return (yield)
        finally:
            choices.check()


@pytest.fixture(autouse=True, scope="session")
def _skip_fsync() -> Iterator[None]:
    """Replace `os.fsync` by `os.fstat` in this process: only a crash of the machine could lose data. Commands in
    processes of their own call `os.fsync` as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True, scope="module")
def _exclude_loaded_modules_from_garbage_collection() -> None:
    """Exclude the millions of objects of loaded libraries and test modules from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _compare_speeds_on_busy_machines() -> Iterator[None]:
    """Report speeds in the same way on a busy machine; tests of the busy case set the limit themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantforge.evaluation.verdict.FULL_SHARE", 0.0)
        patch.setattr("quantforge.cli.generate.FULL_SHARE", 0.0)
        yield


VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GEMMA3 = {**SIZES, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 8}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
               "patch_size": 8, "num_position_embeddings": 16}  # fmt: skip
DELTA = {**SIZES, "num_hidden_layers": 4, "head_dim": 32, "attention_bias": True, "linear_num_key_heads": 2,
         "linear_key_head_dim": 16, "linear_num_value_heads": 8, "linear_value_head_dim": 32,
         "full_attention_interval": 2, "rope_parameters": {
             "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2,
         "mamba_chunk_size": 16, "mamba_proj_bias": True}  # fmt: skip
NEMOTRON_H = {**{key: value for key, value in SIZES.items() if key != "num_hidden_layers"}, "head_dim": 32,
              "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
              "mlp_bias": True, "use_bias": True, "hybrid_override_pattern": "M-*M"}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
           "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
           "llama_4_scaling_beta": 0.3}  # fmt: skip
# Keys that are values, heads of full layers that are wider, a vector of each token for every layer.
GEMMA4 = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
          "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0,
          "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
K_EQ_V = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SHARED = {
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_MOE = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
              "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
              "moe_intermediate_size": 32}  # fmt: skip
LLAMA4 = {**SIZES, "head_dim": 32, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size": 96,
          "num_hidden_layers": 4, "intermediate_size_mlp": 128, "moe_layers": [2, 3], "attention_chunk_size": 16,
          "floor_scale": 8, "attn_scale": 0.5}  # fmt: skip
# family: (model_type, configuration, stored type, bytes of a shard or 0)
FAMILIES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "llama": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}, "bfloat16", 150_000),
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True}, "bfloat16", 0),
    "mistral": ("mistral", {**SIZES, "sliding_window": 16, "head_dim": 32}, "bfloat16", 0),
    "qwen2": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
              "bfloat16", 150_000),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 32, "attention_bias": True}, "bfloat16", 0),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32,
                          "attention_bias": True}, "bfloat16", 0),
    "gemma3": ("gemma3_text", GEMMA3, "bfloat16", 0),
    "gemma3-multimodal": ("gemma3", {"text_config": GEMMA3, "vision_config": VISION,
                                     "mm_tokens_per_image": 4}, "bfloat16", 0),
    "gemma4-equal": ("gemma4_text", {**GEMMA4, **K_EQ_V, "attention_bias": True}, "bfloat16", 0),
    "gemma4": ("gemma4_text", {**GEMMA4, **GEMMA4_SHARED}, "bfloat16", 0),
    "gemma4-multimodal": ("gemma4", {
        "text_config": {**GEMMA4, "hidden_size_per_layer_input": 32},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "position_embedding_size": 16},
    }, "bfloat16", 0),
    "phi3": ("phi3", {**SIZES, "sliding_window": 16}, "bfloat16", 0),
    "smollm3": ("smollm3", {**SIZES, "no_rope_layer_interval": 2, "mlp_bias": True}, "float32", 0),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128,
                      "bos_token_id": 0, "eos_token_id": 1}, "float32", 0),
    "openai-gpt": ("openai-gpt", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4,
                                  "n_positions": 128}, "float32", 0),
    "opt": ("opt", {"vocab_size": VOCABULARY, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128,
                    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128,
                    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}, "float16", 0),
    "lfm2": ("lfm2", {**SIZES, "intermediate_size": 192, "block_multiple_of": 32, "conv_bias": True,
                      "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
             "bfloat16", 0),
    "olmo": ("olmo", SIZES, "bfloat16", 0),
    "olmo2": ("olmo2", {**SIZES, "attention_bias": True}, "bfloat16", 0),
    "olmo3": ("olmo3", {**SIZES, "sliding_window": 16, "layer_types": WINDOWS}, "bfloat16", 0),
    "glm": ("glm", {**SIZES, "head_dim": 32}, "bfloat16", 0),
    "glm4": ("glm4", {**SIZES, "head_dim": 32}, "bfloat16", 0),
    "granite": ("granite", {**SIZES, "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0,
                            "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5},
                "bfloat16", 0),
    "exaone4": ("exaone4", {**SIZES, "head_dim": 32, "sliding_window": 16, "layer_types": WINDOWS}, "bfloat16", 0),
    "seed-oss": ("seed_oss", {**SIZES, "head_dim": 32, "attention_out_bias": True, "mlp_bias": True}, "bfloat16", 0),
    "cohere": ("cohere", {**SIZES, "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}, "bfloat16", 0),
    "cohere2": ("cohere2", {**SIZES, "sliding_window": 16, "layer_types": WINDOWS, "logit_scale": 0.5}, "bfloat16", 0),
    "starcoder2": ("starcoder2", {**SIZES, "sliding_window": 16}, "bfloat16", 0),
    "gpt-neox": ("gpt_neox", {**SIZES, "num_key_value_heads": 4}, "float16", 0),
    "ernie4.5": ("ernie4_5", {**SIZES, "head_dim": 32, "use_bias": True}, "bfloat16", 0),
    "hunyuan": ("hunyuan_v1_dense", {**SIZES, "head_dim": 32, "attention_bias": True}, "bfloat16", 0),
    "ministral": ("ministral", {**SIZES, "head_dim": 32, "sliding_window": 16, "layer_types": WINDOWS}, "bfloat16", 0),
    "ministral3": ("ministral3", {**SIZES, "head_dim": 32, "rope_parameters": YARN_ROPE}, "bfloat16", 0),
    "stablelm": ("stablelm", {**SIZES, "use_qkv_bias": True}, "bfloat16", 0),
    "stablelm-parallel": ("stablelm", {**SIZES, "qk_layernorm": True, "use_parallel_residual": True}, "bfloat16", 0),
    "phi": ("phi", {**SIZES, "qk_layernorm": True}, "float16", 0),
    "nemotron": ("nemotron", {**SIZES, "head_dim": 32, "attention_bias": True, "mlp_bias": True}, "bfloat16", 0),
    "apertus": ("apertus", {**SIZES, "attention_bias": True}, "bfloat16", 0),
    "arcee": ("arcee", {**SIZES, "head_dim": 32, "attention_bias": True, "mlp_bias": True}, "bfloat16", 0),
    "gemma": ("gemma", {**SIZES, "head_dim": 32}, "bfloat16", 0),
    "helium": ("helium", {**SIZES, "head_dim": 16, "attention_bias": True}, "bfloat16", 0),
    "cwm": ("cwm", {**SIZES, "head_dim": 32, "sliding_window": 16, "layer_types": WINDOWS}, "bfloat16", 0),
    "qwen3.5": ("qwen3_5_text", DELTA, "bfloat16", 0),
    "qwen3.5-multimodal": ("qwen3_5", {"text_config": DELTA, "vision_config": QWEN_VISION}, "bfloat16", 0),
    "qwen3-vl": ("qwen3_vl", {"text_config": {**SIZES, "head_dim": 32, "rope_parameters": {
                     "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
                 "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}}, "bfloat16", 0),
    "qwen2.5-vl": ("qwen2_5_vl", {"text_config": {**SIZES, "rope_parameters": {
                       "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
                   "vision_config": {key: value for key, value in QWEN_VISION.items()
                                     if key != "num_position_embeddings"}}, "bfloat16", 0),
    "mistral3": ("mistral3", {"text_config": {**SIZES, "model_type": "ministral3", "head_dim": 32,
                                              "rope_parameters": YARN_ROPE},
                              "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
                              "tie_word_embeddings": False}, "bfloat16", 0),
    "falcon-h1": ("falcon_h1", {**SIZES, **MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mlp_bias": True,
                                "attention_bias": True, "projectors_bias": True}, "bfloat16", 0),
    "falcon-h1-plain": ("falcon_h1", {**SIZES, **MAMBA, "mamba_d_ssm": 96, "mamba_proj_bias": False}, "bfloat16", 0),
    "granite-hybrid": ("granitemoehybrid", {**SIZES, **MAMBA, "mamba_d_head": 16, "num_local_experts": 0,
                                            "layer_types": ["mamba", "attention", "mamba"], "attention_bias": True,
                                            "shared_intermediate_size": 96, "attention_multiplier": 0.25,
                                            "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                                            "logits_scaling": 2.0}, "bfloat16", 0),
    "nemotron-h": ("nemotron_h", NEMOTRON_H, "bfloat16", 0),
    # Wide enough for groups of 128, so that every default applies as it is.
    "llama-wide": ("llama", {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
                   "bfloat16", 0),
}  # fmt: skip
_EXPERTS = {**SIZES, "num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 32}
_LATENT = {**SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
           "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": 16}, "float32", 0),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1],
                                "norm_topk_prob": True,
                                "attention_bias": True}, "float32", 300_000),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32,
                                "mlp_only_layers": [1], "shared_expert_intermediate_size": 96}, "float32", 0),
    "olmoe": ("olmoe", {**_EXPERTS, "head_dim": 16, "attention_bias": True}, "float32", 0),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, "n_group": 2, "topk_group": 1, "attention_bias": True}, "float32", 0),
    "deepseek-v3-plain": ("deepseek_v3", {**_LATENT, "q_lora_rank": None, "n_group": 2, "topk_group": 1}, "float32", 0),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "attention_bias": True, "mlp_bias": True, "topk_method": "greedy"},
                    "float32", 0),
    "deepseek-v32": ("deepseek_v32", {**_LATENT, "n_group": 2, "topk_group": 1, "attention_bias": True,
                                      "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}, "float32", 0),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, "n_group": 2, "topk_group": 1, "attention_bias": True},
                      "float32", 0),
    "glm4-moe": ("glm4_moe", {**_LATENT, "num_key_value_heads": 2, "head_dim": 32, "n_group": 2, "topk_group": 1,
                              "attention_bias": True, "use_qk_norm": True}, "float32", 0),
    "dots1": ("dots1", {**_LATENT, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True}, "float32", 0),
    "phimoe": ("phimoe", {**_EXPERTS, "head_dim": 16, "attention_bias": True, "lm_head_bias": True}, "float32", 0),
    "minimax-m2": ("minimax_m2", _EXPERTS, "float32", 0),
    "ernie4-5-moe": ("ernie4_5_moe", {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2,
                                      "moe_intermediate_size": 32, "moe_layer_start_index": 1, "use_bias": True},
                     "float32", 0),
    "hunyuan-v1-moe": ("hunyuan_v1_moe", {**SIZES, "head_dim": 32, "num_experts": 4, "moe_topk": 2,
                                          "attention_bias": True}, "float32", 0),
    "afmoe": ("afmoe", {**SIZES, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
                        "num_shared_experts": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
                        "attention_bias": True}, "float32", 0),
    "lfm2-moe": ("lfm2_moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                              "num_dense_layers": 1, "num_hidden_layers": 4, "conv_bias": True,
                              "layer_types": ["conv", "full_attention", "conv", "full_attention"]}, "float32", 0),
    "granitemoe": ("granitemoe", {**_EXPERTS, "head_dim": 16, "attention_bias": True, "attention_multiplier": 0.25,
                                  "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
                   "bfloat16", 0),
    "granitemoeshared": ("granitemoeshared", {**_EXPERTS, "head_dim": 16, "shared_intermediate_size": 96},
                         "float32", 0),
    "kimi-linear": ("kimi_linear", {**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 4, "num_local_experts": 4,
                                    "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32,
                                    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                                    "v_head_dim": 24, "linear_num_heads": 6, "linear_head_dim": 16,
                                    "layer_types": ["linear_attention", "full_attention"] * 2}, "float32", 0),
    "qwen3-next": ("qwen3_next", {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                  "shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}, "float32", 0),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, "num_experts": 4, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
                    "float32", 0),
    "granitemoehybrid": ("granitemoehybrid", {**_EXPERTS, **MAMBA, "mamba_d_head": 16,
                                              "layer_types": ["mamba", "attention", "mamba"],
                                              "shared_intermediate_size": 96}, "float32", 0),
    "gemma4-moe": ("gemma4_text", {**GEMMA4, **K_EQ_V, **GEMMA4_MOE}, "float32", 0),
    "gpt-oss": ("gpt_oss", {**_EXPERTS, "sliding_window": 16}, "bfloat16", 0),
    "llama4": ("llama4_text", {**LLAMA4, "attention_bias": True}, "bfloat16", 0),
}  # fmt: skip
MULTIMODAL_MIXTURES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "llama4-multimodal": ("llama4", {"text_config": LLAMA4, "vision_config": {
                              **VISION, "vision_output_dim": 48, "projector_input_dim": 48,
                              "projector_output_dim": 48, "intermediate_size": 128}}, "bfloat16", 0),
}  # fmt: skip
# Transformers has a class for the decoder alone, which has other names than the whole model.
RENAMED_DECODER_FAMILIES = (
    "gemma3-multimodal",
    "gemma4-multimodal",
    "qwen3.5-multimodal",
    "mistral3",
)
TEXT_FAMILIES = tuple(
    name for name in FAMILIES if name not in {*RENAMED_DECODER_FAMILIES, "llama-wide"}
)

Tiny = Callable[[str], Path]


def tiny_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = [
        "the weights of the model are rounded to the nearest point of the grid, row by row"
    ] * 4
    tokenizer.train_from_iterator([*lines, "1 + 1 = 2", "def f(x): return x"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return fast


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill parameters with random numbers of the size that trained models have."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            gain = "norm" in name or ".ln_" in name
            base = float(gain and name.endswith("weight")) * float(parameter.flatten()[0] != 0)
            parameter.data.copy_(base + 0.2 * noise)
        else:
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)


def make_tiny(family: str, directory: Path, **changes: Any) -> Path:
    """Build, fill and save one model; ``changes`` are of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, values, dtype, shard = {**FAMILIES, **MIXTURES, **MULTIMODAL_MIXTURES}[family]
    config = AutoConfig.for_model(model_type, **{**values, **changes})
    auto = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    randomize(model)
    sharding = {"max_shard_size": shard} if shard else {}
    model.to(getattr(torch, dtype)).save_pretrained(directory, **sharding)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def make_once_per_session(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return a folder that one process of the session makes, whole or not at all, and all of them read."""
    own = factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made" / name
    out.parent.mkdir(exist_ok=True)
    with out.with_name(f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            stage = out.with_name(f".{name}")
            make(stage)
            stage.rename(out)
    return out


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a function from the name of a family to the directory of its tiny model. Do not write into it."""
    torch.set_num_threads(1)

    @cache
    def make(family: str) -> Path:
        return make_once_per_session(
            tmp_path_factory, family, lambda place: make_tiny(family, place)
        )

    return make
