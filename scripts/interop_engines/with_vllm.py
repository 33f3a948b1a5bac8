"""All artifacts in the real vLLM on a CPU: largest difference of the prompt's log-probabilities, bfloat16."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}

import gc

from compare import run
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def start(path):
    """Start an engine, without what the one before has left in this process."""
    gc.collect()
    cleanup_dist_env_and_memory()
    return LLM(
        str(path.resolve()),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
    )


def measure(path, expected):
    """Load, score the prompt, compare."""
    ids = expected["ids"].tolist()
    try:
        engine = start(path)
    except AssertionError:  # one that failed ends groups of processes late, those of the next one
        engine = start(path)
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    result = engine.generate({"prompt_token_ids": ids}, wanted, use_tqdm=False)[0]
    found = [
        step[token].logprob for token, step in zip(ids[1:], result.prompt_logprobs[1:], strict=True)
    ]
    apart = [
        abs(ours - theirs)
        for ours, theirs in zip(expected["logprobs"].tolist(), found, strict=True)
    ]
    return {"difference": max(apart), "mean": sum(apart) / len(apart)}


run(measure, ("vllm-cpu", "vllm", "transformers", "compressed-tensors", "torch"), lambda _: True)
