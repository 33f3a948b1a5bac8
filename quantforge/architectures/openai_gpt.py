"""GPT-1: a gpt2 whose norms come after the halves of a layer, on the residual, so that they absorb nothing."""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures import LayerKind, Parameter, SharedInput, gpt2

_KIND = gpt2.ARCHITECTURE.kinds[0]
ARCHITECTURE = replace(
    gpt2.ARCHITECTURE,
    model_type="openai-gpt",
    outer=(
        Parameter("transformer.tokens_embed.weight", ("vocab", "hidden")),
        Parameter("transformer.positions_embed.weight", ("positions", "hidden")),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=(
        LayerKind(
            parameters=_KIND.parameters,
            inputs=tuple(
                shared
                if shared.absorber and shared.absorber.rows
                else SharedInput(shared.linears, shared.within)
                for shared in _KIND.inputs
            ),
            inner_copies=_KIND.inner_copies,
            returned=1,
        ),
    ),
    embedding="transformer.tokens_embed",
    final_norm="",
    requires={},
    defaults={
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 512,
        "vocab_size": 40478,
        "tie_word_embeddings": True,
    },
    gguf=None,
)
