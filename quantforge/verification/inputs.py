"""Inputs of the source's linears while it computes a text: a sample of them, and their range.

How much an error of a weight matters is how far it moves the outputs. One pass of the source over the text that ships
with the program, which the divergence needs anyway, shows what each linear reads; a few hundred tokens of that are
kept. `Inputs.of` divides each by its root mean square, so that no single token outweighs all others, as the first ones
of a text often do. First tokens of windows are left out of the sample, but not of the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched
from quantforge.formats import kv_scales
from quantforge.runtime.kv_cache import CachePeaks, listen

SHARE = 32  # tokens of each window that are kept, 2 bytes a value


@dataclass(slots=True)
class Inputs:
    """Inputs that were seen, by canonical name of a linear.

    Attributes:
        samples: inputs ``[tokens, in]`` in batches, bfloat16 on the CPU.
        peaks: the largest magnitude of each column ``[in]``, of all tokens.
        shared: to each linear the one under whose name its input is kept.
        caches: by block, the largest magnitudes of keys and values.
    """

    samples: dict[str, list[Tensor]] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    caches: dict[int, CachePeaks] = field(default_factory=dict)

    def of(self, module: str) -> Tensor | None:
        """Return inputs of a linear in float32, each token with a root mean square of 1; None where none were seen."""
        found = self.samples.get(self.shared.get(module, module))
        if not found:
            return None
        x = torch.cat(found).float()
        return x / x.square().mean(1, keepdim=True).sqrt_().clamp_(min=1e-30)

    def raw(self, module: str) -> Tensor | None:
        """Return inputs of a linear as they were, in float32; None where none were seen."""
        found = self.samples.get(self.shared.get(module, module))
        return torch.cat(found).float() if found else None

    def peak(self, module: str) -> Tensor | None:
        """Return the largest magnitude of each column that a linear read, ``[in]``; None where none were seen."""
        return self.peaks.get(self.shared.get(module, module))

    def add(self, module: str, x: Tensor) -> None:
        """Keep some tokens of ``x``, spread evenly, and its range.

        ``x`` is ``[windows, tokens, in]``, or ``[tokens, in]`` where a family joins the windows (OPT).
        """
        x = x.detach().flatten(1, -2) if x.dim() > 2 else x.detach()[None]
        peaks = x.abs().amax((0, 1)).float().cpu()
        before = self.peaks.get(module)
        self.peaks[module] = peaks if before is None else torch.maximum(before, peaks)
        rest = x[:, 1:].flatten(0, 1) if x.shape[1] > 1 else x.flatten(0, 1)
        chosen = torch.linspace(0, len(rest) - 1, min(SHARE * len(x), len(rest))).round().long()
        kept = rest[chosen.to(rest.device)].to("cpu", torch.bfloat16)
        self.samples.setdefault(module, []).append(kept)


@contextmanager
def listening(
    inputs: Inputs, model: nn.Module, matched: Matched, *, cache: bool = False
) -> Iterator[None]:
    """Let ``inputs`` see what linears of all blocks read (single experts apart), and with ``cache`` keys and values."""
    handles = []
    for block in range(len(matched.layers)):
        prefix = matched.block_name(block)
        if cache:
            inputs.caches[block] = CachePeaks()
            attention = model.get_submodule(f"{prefix}.{kv_scales.ATTENTION}")
            handles.append(listen(attention, inputs.caches[block]))
        for shared in matched.layers[block].inputs:
            if shared.expert >= 0:  # the running model has no module for one
                continue
            key = f"{prefix}.{shared.key}"
            inputs.shared.update({f"{prefix}.{linear}": key for linear in shared.linears})

            def keep(_module: nn.Module, args: tuple[Any, ...], key: str = key) -> None:
                inputs.add(key, args[0])

            handles.append(model.get_submodule(key).register_forward_pre_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
