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

from quantforge.architectures import architecture_of
from quantforge.architectures.heads import BEHIND, layers_of, without_heads
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError, RefusedError
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import readable
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.speculation.guesses import Computed
from quantforge_kernels.layers import add_norm, linear

if TYPE_CHECKING:
    from quantforge.runtime.arrivals import Arrivals
    from quantforge.runtime.cache import PagedCache
    from quantforge.runtime.ragged import Span

_JOINED = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
HINT = "take --draft ngram, int2 or a model"


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
    source, joins = _as_model(checkpoint, str(loaded.path))
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    found = load(loaded.path, str(embedding.device), loaded.dtype, source)
    read = {
        name: checkpoint.read(stored).to(embedding.device, embedding.dtype)
        for name, stored in joins.items()
    }
    return MtpLayer(found, read)


def _as_model(source: Checkpoint, path: str) -> tuple[Checkpoint, dict[str, str]]:
    """Return the block as a model of one layer, and the names of the tensors that join it to the model."""
    layers, count = layers_of(source.config), source.config.get(BEHIND)
    family = architecture_of(source.config)
    at = f"model.layers.{layers}."
    mine = {name.removeprefix(at): name for name in source.entries if name.startswith(at)}
    if not count or not mine:
        raise InputError(f"{path}: no layer for further tokens in its files", HINT)
    joins = {name: f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    missing = [name for name in (*joins.values(), "shared_head.norm.weight") if name not in mine]
    if missing or family is None or family.embedding != "model.embed_tokens":
        raise RefusedError(
            f"{path}: its layers for further tokens are not those of DeepSeek or GLM: no {missing[:1]}",
            HINT,
        )
    beside = {
        "model.norm.weight": "shared_head.norm.weight",
        "lm_head.weight": "shared_head.head.weight",
        "model.embed_tokens.weight": "embed_tokens.weight",
    }
    names = {new: mine[name] for new, name in beside.items() if name in mine}
    names |= {new: new for new in beside if new not in names and new in source.entries}
    own = {name: stored for name, stored in mine.items() if not name.startswith(_JOINED)}
    names |= {f"model.layers.0.{name}": stored for name, stored in own.items()}
    entries = {new: replace(source.entries[old], name=new) for new, old in sorted(names.items())}
    config = {**without_heads(source.config), "num_hidden_layers": 1, **_sparse(source.config)}
    return replace(source, config=config, entries=entries), {
        key: mine[name] for key, name in joins.items()
    }


def _sparse(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that make the one layer a mixture, as the last ones are."""
    found: dict[str, Any] = (
        {"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {}
    )
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            found[key] = config[key][-1:]
    return found
