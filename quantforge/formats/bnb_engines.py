"""Engines that load bitsandbytes files: through which package, and what its loader cannot do with experts."""

from __future__ import annotations

from quantforge.formats.engines import UNTRIED, Engine, by_engine
from quantforge.scheme import LayerScheme

_JOINED = "its loader joins the matrices of experts into one tensor, which packed ones of bitsandbytes cannot be"
_UNREAD = Engine(never="does not read bitsandbytes")


def _no_bytes(layer: LayerScheme) -> str:
    return "its plugin (0.0.3) has no experts in 8 bits" if layer.weight.integer else ""


ENGINES = by_engine(
    transformers=Engine(note="through bitsandbytes", experts=_JOINED, unrolls=True),
    vllm=Engine(
        note="through vllm-bnb-plugin (since vLLM 0.28)",
        packed_experts=_no_bytes,
        kept_experts="its plugin (0.0.3) takes all experts for packed ones",
    ),
    sglang=Engine(note=UNTRIED),
    tensorrt_llm=_UNREAD,
    lmdeploy=_UNREAD,
    mlx=_UNREAD,
)
