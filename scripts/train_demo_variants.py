"""Train the small mixture of experts and the small hybrid that go with the demo model.

Both are learned as the demo model is (`train_demo_model` has the text, the tokenizer, the optimizers and the schedule),
so that what is measured on them is about their layers and not about their training.

- ``moe``: a qwen2_moe of three layers, each with eight experts of which two see a token, and a shared expert with a
  gate. Experts are balanced by a penalty that is too weak to make them equal: some see nearly twice as many tokens
  as others. Every linear reads 256 columns, so that K-quants apply, but for the experts' second
  matrix, which reads 128: with 256 there the file would be twice as large.
- ``hybrid``: an lfm2 of five layers, short convolutions in three of them and attention in two; it learns in float32,
  because convolutions in bfloat16 are slow on most processors.

    python scripts/train_demo_variants.py moe --out models/demo-moe --state moe-state.pt
    python scripts/train_demo_variants.py hybrid --out models/demo-hybrid --state hybrid-state.pt

An interrupted run continues from its state file.
"""

import json
import sys
from typing import Any

import demo_text
import torch
from tokenizers import Tokenizer
from torch import Tensor
from train_demo_model import (
    CONTEXT_LIMIT,
    END_OF_TEXT,
    Settings,
    make_and_describe,
)
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

SETTINGS = Settings(
    steps=1700, lengthen_at=1450, decay_at=850, decay_steps=1900, cooldown_steps=700
)
HYBRID_SETTINGS = Settings(
    steps=900, lengthen_at=760, decay_at=450, decay_steps=1000, cooldown_steps=370
)
EXPERTS, ACTIVE = 8, 2
BALANCE = 0.01  # half of it, and one expert of the first layer sees nearly every token
COMMON: dict[str, Any] = {
    "max_position_embeddings": CONTEXT_LIMIT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}


def make_mixture() -> PreTrainedModel:
    """Build the untrained mixture; its head is its own, because llama.cpp wants one for this family."""
    config = Qwen2MoeConfig(
        vocab_size=1536,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **COMMON,
    )
    return Qwen2MoeForCausalLM(config).bfloat16()


def make_hybrid() -> PreTrainedModel:
    """Build the untrained hybrid."""
    config = Lfm2Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=5,
        layer_types=["conv", "full_attention", "conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **COMMON,
    )
    return Lfm2ForCausalLM(config).float()


def shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return which part of the tokens each expert sees, and its mean probability, from ``[tokens, experts]``."""
    probabilities = logits.float().softmax(-1)
    chosen = probabilities.topk(ACTIVE).indices.flatten()
    seen = torch.bincount(chosen, minlength=EXPERTS) / len(chosen)
    return seen, probabilities.mean(0)


def balance(routers: list[Tensor]) -> Tensor:
    """Return the penalty on uneven use: the sum over mixtures of one if it is even, times `BALANCE`."""
    pairs = [shares(logits) for logits in routers]
    uneven = torch.stack([EXPERTS * (seen * mean).sum() for seen, mean in pairs])
    return BALANCE * uneven.sum()


@torch.no_grad()
def use(model: PreTrainedModel, tokenizer: Tokenizer) -> list[list[float]]:
    """Return for each mixture which part of the evaluation text's tokens each expert sees."""
    tokens = torch.tensor(tokenizer.encode(demo_text.evaluation_text()).ids)
    windows = tokens[: len(tokens) // 512 * 512].view(-1, 512)[:32]
    routers = model.model(input_ids=windows, output_router_logits=True).router_logits
    return [[round(value, 3) for value in shares(logits)[0].tolist()] for logits in routers]


def main() -> None:
    """Train the one that the first argument names."""
    if sys.argv[1:2] == ["moe"]:
        model, tokenizer = make_and_describe(SETTINGS, 1536, make_mixture, balance)
        sys.stdout.write(json.dumps({"use": use(model, tokenizer)}) + "\n")
    elif sys.argv[1:2] == ["hybrid"]:
        make_and_describe(HYBRID_SETTINGS, 2048, make_hybrid)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
