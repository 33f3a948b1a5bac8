"""Options of attention logits, shared by all programs that compute attention: scale, soft cap and window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How attention logits are computed.

    Attributes:
        scale: factor of the product of query and key.
        softcap: logits become ``softcap * tanh(logit / softcap)``; 0 for no cap.
        window: only the last ``window`` tokens are attended to; 0 for all tokens.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
