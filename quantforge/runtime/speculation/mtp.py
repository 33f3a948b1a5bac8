"""The model's own layer for further tokens (MTP), where its files hold one behind the last layer.

For a token at place i + 1 and the model's final state h of place i it computes, in a block like the model's own,

    x = [norm(embedding of the token); norm(h)] W_eh;  y = norm(block(x));  logits of place i + 2 = y W_out

(DeepSeek-V3, arXiv 2412.19437; GLM 4.5). Behind a guess its own y stands for h. The block is loaded as a model of one
layer: the same files under other names, so that formats, experts and packed weights are read as those of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.checkpoint.finite_values import scan_finite
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import readable
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.speculation.guesses import Computed
from quantforge.runtime.speculation.mtp_files import as_model
from quantforge_kernels.layers import add_norm, linear

if TYPE_CHECKING:
    from quantforge.runtime.arrivals import Arrivals
    from quantforge.runtime.cache import PagedCache
    from quantforge.runtime.ragged import Span


class MtpLayer:
    """Network of the layer, see `FeatureNetwork`.

    Args:
        loaded: the block as a model of one layer, with the norm and the output matrix of the head.
        joins: ``enorm`` and ``hnorm`` ``[hidden]``, ``eh_proj`` ``[hidden, 2 hidden]``.

    Attributes:
        blocks: of the model of which it sees what goes into them: none.
    """

    blocks: tuple[int, ...] = ()

    def __init__(self, loaded: Loaded, joins: Mapping[str, Tensor]) -> None:
        self._decoder = _Joining(loaded, joins)

    def cache(self, tokens: int) -> PagedCache:
        """Return a cache for one text."""
        return self._decoder.cache(1, tokens)

    def features(self, computed: Computed) -> Tensor:
        """Return the features of text ``[tokens, hidden]`` that the model has computed."""
        return computed.hidden

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Compute more tokens ``[tokens]`` with the features ``[tokens, hidden]`` before each; return y likewise."""
        self._decoder.before = features
        return self._decoder.hidden_of(ids, [span], cache)

    def logits(self, y: Tensor) -> Tensor:
        """Return logits ``[tokens, vocabulary]`` in float32."""
        return self._decoder.logits(y)


class _Joining(Decoder):
    """A decoder into which tokens come beside the states before them, ``before`` ``[tokens, hidden]``."""

    before: Tensor

    def __init__(self, loaded: Loaded, joins: Mapping[str, Tensor]) -> None:
        super().__init__(loaded.model)
        self._joins = joins

    def _entry(self, *given: Any) -> Arrivals:
        entry = super()._entry(*given)
        assert self._epsilon is not None
        pairs = (entry.x, "enorm"), (self.before, "hnorm")
        normed = [add_norm(x, None, self._joins[name], self._epsilon)[0] for x, name in pairs]
        return replace(entry, x=linear(torch.cat(normed, -1), self._joins["eh_proj"]))


def read_mtp(loaded: Loaded) -> MtpLayer:
    """Read the first layer for further tokens of the files that a model was loaded from.

    Raises:
        InputError: there is none, or a tensor of it is missing.
        RefusedError: the files hold such layers in another way than behind the last layer.
    """
    checkpoint = readable(open_model(loaded.path))
    source, joins = as_model(checkpoint, str(loaded.path))
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    found = load(loaded.path, str(embedding.device), loaded.dtype, source)
    read = {}
    for name, stored in joins.items():
        value = checkpoint.read(stored)
        scan_finite(stored, value, checkpoint.entries[stored].file)
        read[name] = value.to(embedding.device, embedding.dtype)
    return MtpLayer(found, read)
