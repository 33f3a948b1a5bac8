"""Multi-token prediction (MTP): draft with a layer that models store after the decoder layers.

For the token at position i + 1 and the model's final hidden state h of position i it computes

    x = [norm(embedding of the token); norm(h)] W_eh;  y = norm(block(x));  logits of position i + 2 = y W_out

with a block like those of the model (DeepSeek-V3, arXiv 2412.19437; GLM 4.5). After a drafted token, y takes the place
of h. The block is loaded as a model of one layer: its tensors are renamed, so that formats, experts and packed weights
are read like those of other layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.architectures import architecture_of
from quantforge.architectures.draft_heads import NEXTN_LAYERS, layer_count, without_draft_heads
from quantforge.errors import InputError, RefusedError
from quantforge.files.finite_values import check_finite
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.speculation.drafter import PassOutputs
from quantforge_kernels.layers import add_rms_norm, linear

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint
    from quantforge.runtime.cache import PagedCache
    from quantforge.runtime.ragged_attention import Span

HINT = "take --draft ngram, int2 or a model"
_INPUT_TENSORS = ("enorm", "hnorm", "eh_proj")
_HEAD_TENSORS = {  # stored with the layer; otherwise those of the model are used
    "model.norm.weight": "shared_head.norm.weight",
    "lm_head.weight": "shared_head.head.weight",
    "model.embed_tokens.weight": "embed_tokens.weight",
}


class MtpLayer:
    """The MTP draft layer: a one-block decoder that reads each token together with the hidden state before it.

    Args:
        loaded: the block, loaded as a model of one layer with the layer's final norm and output matrix.
        inputs: tensors of the input projection: ``enorm`` and ``hnorm`` ``[hidden]``, ``eh_proj``
            ``[hidden, 2 hidden]``.

    Attributes:
        taps: blocks of the model whose inputs it reads: none.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, loaded: Loaded, inputs: Mapping[str, Tensor]) -> None:
        self._decoder = Decoder(loaded.model)
        self._epsilon: float = loaded.model.config.rms_norm_eps
        self._inputs = inputs
        self.cache, self.logits = self._decoder.cache, self._decoder.logits

    def features(self, computed: PassOutputs) -> Tensor:
        """Return the features ``[tokens, hidden]`` of text tokens: the model's final hidden states."""
        return computed.hidden

    def compute(self, ids: Tensor, features: Tensor, span: Span, cache: PagedCache) -> Tensor:
        """Run the layer on tokens ``[tokens]`` and the features ``[tokens, hidden]`` before each; return y."""
        pairs = (self._decoder.embed(ids), "enorm"), (features, "hnorm")
        normed = [add_rms_norm(x, None, self._inputs[name], self._epsilon)[0] for x, name in pairs]
        x = linear(torch.cat(normed, -1), self._inputs["eh_proj"])
        return self._decoder.hidden_of_spans(ids, [span], cache, x=x)


def read_mtp(loaded: Loaded) -> MtpLayer:
    """Load the first MTP layer from the files of a loaded model; raises as `mtp_block_as_model` does."""
    checkpoint = decode_if_unsupported(open_model(loaded.path))
    source, input_names = mtp_block_as_model(checkpoint, str(loaded.path))
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    layer = load(source, str(embedding.device), loaded.dtype)
    inputs = {}
    for name, stored in input_names.items():
        value = checkpoint.read(stored)
        check_finite(stored, value, checkpoint.entries[stored].file)
        inputs[name] = value.to(embedding.device, embedding.dtype)
    return MtpLayer(layer, inputs)


def mtp_block_as_model(source: Checkpoint, path: str) -> tuple[Checkpoint, dict[str, str]]:
    """Return a checkpoint view of the MTP block as a model of one layer, and the names of its input tensors.

    Raises:
        InputError: the model has no MTP layer, or one of its tensors is missing.
        RefusedError: the MTP layer is not stored in the layout of DeepSeek or GLM.
    """
    layers, family = layer_count(source.config), architecture_of(source.config)
    prefix = f"model.layers.{layers}."
    stored = {name.removeprefix(prefix): name for name in source.entries if name.startswith(prefix)}
    if not source.config.get(NEXTN_LAYERS) or not stored:
        raise InputError(f"{path}: no layer for further tokens in its files", HINT)
    input_names = {name: f"{name}.weight" for name in _INPUT_TENSORS}
    missing_names = [
        name
        for name in (*input_names.values(), _HEAD_TENSORS["model.norm.weight"])
        if name not in stored
    ]
    if missing_names or family is None or family.embedding != "model.embed_tokens":
        raise RefusedError(
            f"{path}: its layers for further tokens are not those of DeepSeek or GLM: no {missing_names[:1]}",
            HINT,
        )
    names = {
        new_name: stored.get(stored_name, new_name)
        for new_name, stored_name in _HEAD_TENSORS.items()
    }
    names |= {
        f"model.layers.0.{name}": stored_name
        for name, stored_name in stored.items()
        if not name.startswith(
            (*(f"{input_name}." for input_name in _INPUT_TENSORS), "shared_head.", "embed_tokens.")
        )
    }
    entries = {
        new_name: replace(source.entries[stored_name], name=new_name)
        for new_name, stored_name in sorted(names.items())
        if stored_name in source.entries
    }
    config = {**without_draft_heads(source.config), "num_hidden_layers": 1}
    if (
        "first_k_dense_replace" in config
    ):  # the MTP block is a mixture of experts, like the last layers
        config["first_k_dense_replace"] = 0
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(key), list):
            config[key] = config[key][-1:]
    model = replace(source, config=config, entries=entries)
    return model, {name: stored[leaf] for name, leaf in input_names.items()}
