"""Multi-token prediction (MTP): the model's own layer for further tokens, stored after its last layer.

For a token at place i + 1 and the model's final state h of place i it computes, in a block like the model's own,

    x = [norm(embedding of the token); norm(h)] W_eh;  y = norm(block(x));  logits of place i + 2 = y W_out

(DeepSeek-V3, arXiv 2412.19437; GLM 4.5). After a drafted token its own y stands for h. The block is loaded as a model
of one layer: the same files under other names, so that formats, experts and packed weights are read as those of all
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.architectures import architecture_of
from quantforge.architectures.draft_heads import NEXTN_LAYERS, layers_of, without_heads
from quantforge.errors import InputError, RefusedError
from quantforge.files.finite_values import scan_finite
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.speculation.drafter import Computed
from quantforge_kernels.layers import add_rms_norm, linear

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint
    from quantforge.runtime.cache import PagedCache
    from quantforge.runtime.ragged_attention import Span

HINT = "take --draft ngram, int2 or a model"
_JOINS = ("enorm", "hnorm", "eh_proj")
_OWN = {  # of the head; else the model's
    "model.norm.weight": "shared_head.norm.weight",
    "lm_head.weight": "shared_head.head.weight",
    "model.embed_tokens.weight": "embed_tokens.weight",
}


class MtpLayer:
    """The layer: a decoder of one block that reads each token together with the state before it.

    Args:
        loaded: the block as a model of one layer, with the norm and the output matrix of the head.
        joins: ``enorm`` and ``hnorm`` ``[hidden]``, ``eh_proj`` ``[hidden, 2 hidden]``.

    Attributes:
        taps: blocks of the model whose inputs it reads: none.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, loaded: Loaded, joins: Mapping[str, Tensor]) -> None:
        self._decoder = Decoder(loaded.model)
        self._epsilon: float = loaded.model.config.rms_norm_eps
        self._joins = joins
        self.cache, self.logits = self._decoder.cache, self._decoder.logits

    def features(self, computed: Computed) -> Tensor:
        """Return the features of text ``[tokens, hidden]`` that the model computed."""
        return computed.hidden

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Compute more tokens ``[tokens]`` with the features ``[tokens, hidden]`` before each; return y likewise."""
        pairs = (self._decoder.embed(ids), "enorm"), (features, "hnorm")
        normed = [add_rms_norm(x, None, self._joins[name], self._epsilon)[0] for x, name in pairs]
        x = linear(torch.cat(normed, -1), self._joins["eh_proj"])
        return self._decoder.hidden_of(ids, [span], cache, x=x)


def read_mtp(loaded: Loaded) -> MtpLayer:
    """Read the first layer for further tokens in the files that a model was loaded from; errors as `as_model`."""
    checkpoint = decode_if_unsupported(open_model(loaded.path))
    source, joins = as_model(checkpoint, str(loaded.path))
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    layer = load(source, str(embedding.device), loaded.dtype)
    read = {}
    for name, stored in joins.items():
        value = checkpoint.read(stored)
        scan_finite(stored, value, checkpoint.entries[stored].file)
        read[name] = value.to(embedding.device, embedding.dtype)
    return MtpLayer(layer, read)


def as_model(source: Checkpoint, path: str) -> tuple[Checkpoint, dict[str, str]]:
    """Return the block as a model of one layer, and the names of the tensors that join it to the model.

    Raises:
        InputError: there is none, or a tensor of it is missing.
        RefusedError: the files hold such layers in another way than after the last layer.
    """
    layers, family = layers_of(source.config), architecture_of(source.config)
    at = f"model.layers.{layers}."
    stored = {name.removeprefix(at): name for name in source.entries if name.startswith(at)}
    if not source.config.get(NEXTN_LAYERS) or not stored:
        raise InputError(f"{path}: no layer for further tokens in its files", HINT)
    joins = {name: f"{name}.weight" for name in _JOINS}
    missing = [name for name in (*joins.values(), _OWN["model.norm.weight"]) if name not in stored]
    if missing or family is None or family.embedding != "model.embed_tokens":
        raise RefusedError(
            f"{path}: its layers for further tokens are not those of DeepSeek or GLM: no {missing[:1]}",
            HINT,
        )
    names = {new: stored.get(own, new) for new, own in _OWN.items()}
    names |= {
        f"model.layers.0.{name}": old
        for name, old in stored.items()
        if not name.startswith((*(f"{join}." for join in _JOINS), "shared_head.", "embed_tokens."))
    }
    entries = {
        new: replace(source.entries[old], name=new)
        for new, old in sorted(names.items())
        if old in source.entries
    }
    config = {**without_heads(source.config), "num_hidden_layers": 1}
    if "first_k_dense_replace" in config:  # a mixture, as the last layers are
        config["first_k_dense_replace"] = 0
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            config[key] = config[key][-1:]
    model = replace(source, config=config, entries=entries)
    return model, {name: stored[leaf] for name, leaf in joins.items()}
