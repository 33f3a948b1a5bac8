"""Quality of caches: the same weights with keys and values stored in fewer bits, against a cache of 16 bits.

Both are computed by the own decoder in float32 from keys and values that are rounded to bfloat16, as an engine would
hand them to its cache, so that nothing but the cache differs. The divergence is told by position: what a cache loses
adds up over what attention reads, and a mean over short windows would not show it.

How many requests fit is arithmetic on the pages that the runtime takes for a request (`quantforge.runtime.cache`), no
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.cache_kinds import PLAIN
from quantforge.evaluation.cache_trial import EDGES, REQUESTS, CacheTrial, not_ours
from quantforge.evaluation.divergence import compared_rows
from quantforge.evaluation.head import Head, summed
from quantforge.evaluation.perplexity import Estimate, finite, forward_tokens
from quantforge.evaluation.planted_key import KEY
from quantforge.execution.progress import tell
from quantforge.runtime.cache import CacheLayout, PagedCache
from quantforge.runtime.decoder import Decoder, supports
from quantforge.runtime.linear import decoded_once
from quantforge.runtime.load import Loaded
from quantforge.runtime.serving.engine import EngineOptions

OTHER = ""  # the cache of 16 bits where another key was planted
_OF_KEYS = ("keys_found", "key_nats", "key_gain", "key_gain_se", "key_change", "key_change_se")


@torch.inference_mode()
def tried(loaded: Loaded, trial: CacheTrial) -> list[dict[str, Any]]:
    """Return the figures of a model with each kind of cache, that of 16 bits first.

    Raises:
        RefusedError: the own decoder, whose caches these are, does not compute the model.
        InputError: heads that a kind cannot hold, or a divergence is NaN or infinite.
    """
    model = loaded.model
    if not supports(model):
        raise not_ours(model.config.model_type)
    trials = _Trials(loaded, trial)
    with decoded_once(model):
        divergence = trials.divergence()
        scores = trials.keys()
    rows = []
    for kind in (PLAIN, *trial.kinds):
        kl = divergence.get(kind)
        rows.append(
            {
                "kind": kind,
                **trials.room(kind),
                **_estimated("kl", None if kl is None else kl.double().mean(1)),
                "by_position": [] if kl is None else [*_by_position(kl)],
                **_of_keys(kind, scores, trial),
            }
        )
    return rows


class _Trials:
    """A model in float32, computed with caches of several kinds."""

    def __init__(self, loaded: Loaded, trial: CacheTrial) -> None:
        self._decoder = Decoder(loaded.model, join=False)
        self._scales = loaded.kv_scales
        self._head = Head(loaded.model)
        self._trial = trial
        self._chunk = forward_tokens(self._decoder.device)

    def divergence(self) -> dict[str, Tensor]:
        """Return the KL divergence of every kind, ``[windows, length - 1]``."""
        windows, kinds = self._trial.windows, self._trial.kinds
        found = {kind: torch.empty(windows.targets.shape) for kind in kinds}
        for number, (ids, targets) in enumerate(zip(windows.ids, windows.targets, strict=True)):
            whole = self._hidden(ids, PLAIN)[:-1]
            for kind in kinds:
                rows = self._hidden(ids, kind)[:-1]
                kl = compared_rows((self._head, rows), (self._head, whole), targets)[1]
                found[kind][number] = kl
            tell("windows of caches", number + 1, len(windows.ids))
        return {kind: finite(kl, f"KL divergence of cache {kind}") for kind, kl in found.items()}

    def keys(self) -> dict[str, Tensor]:
        """Return the scores of planted keys by kind and `OTHER`, float64 ``[distances, prompts, 2]``.

        They are the mean log-probability of a key's tokens, and the share of those that are the most likely.
        """
        found: dict[str, list[Tensor]] = {kind: [] for kind in (PLAIN, *self._trial.kinds, OTHER)}
        for number, planted in enumerate(self._trial.keys):
            for kind, scores in found.items():
                prompts = planted.others if kind == OTHER else planted.ids
                scores.append(torch.stack([self._key(ids, kind or PLAIN) for ids in prompts]))
            tell("planted keys", number + 1, len(self._trial.keys))
        return {kind: torch.stack(scores) for kind, scores in found.items() if scores}

    def room(self, kind: str) -> dict[str, Any]:
        """Return the bytes of a token, and how many requests as long as a window fit; entries are of 16 bits."""
        length = self._trial.windows.ids.shape[1]
        plain, own = (
            CacheLayout(
                replace(self._decoder.cache_shape(name), dtype=torch.bfloat16),
                length,
                EngineOptions().chunk,
            )
            for name in (PLAIN, kind)
        )
        memory = REQUESTS * plain.sequence_bytes(length)
        requests = memory // own.sequence_bytes(length)
        return {"token_bytes": own.shape.token_bytes, "requests": requests}

    def _key(self, ids: Tensor, kind: str) -> Tensor:
        rows, key = self._hidden(ids, kind)[-KEY - 1 : -1], ids[-KEY:].to(self._decoder.device)
        sums = summed(self._head, rows, key, places=True)
        assert sums.best is not None
        return torch.stack((-sums.nll.mean(), (sums.best == key).double().mean())).cpu()

    def _hidden(self, ids: Tensor, kind: str) -> Tensor:
        """Return the final hidden states ``[tokens, hidden]`` of one sequence."""
        shape, device = self._decoder.cache_shape(kind), self._decoder.device
        cache = _Handed(shape, 1, len(ids), device, scales=self._scales)
        cache.reserve(0, len(ids))
        found = []
        for part in torch.split(ids.to(self._decoder.device), self._chunk):
            found.append(self._decoder.hidden(part[None], cache)[0])
            cache.count(len(part))
        return torch.cat(found)


class _Handed(PagedCache):
    """A cache that is handed numbers of 16 bits, whatever type computes."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store, as `PagedCache.write`."""
        keys, values = (part.to(torch.bfloat16).to(part.dtype) for part in (keys, values))
        super().write(layer, slots, keys, values)


def _by_position(kl: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the divergence of ranges of positions; a position is the number of tokens that are attended to."""
    last = kl.shape[1]
    edges = [edge for edge in EDGES if edge < last]
    for first, end in zip([0, *edges], [*edges, last], strict=True):
        yield {
            "first": first + 1,
            "last": end,
            **_estimated("kl", kl[:, first:end].double().mean(1)),
        }


def _of_keys(kind: str, scores: Mapping[str, Tensor], trial: CacheTrial) -> dict[str, Any]:
    """Return the figures of planted keys, over all distances and by distance; None where no prompt had room."""
    if not scores:
        return {**dict.fromkeys(_OF_KEYS), "by_distance": []}
    by_distance = [
        {
            "distance": planted.distance,
            **_key_figures(kind, {name: part[at] for name, part in scores.items()}),
        }
        for at, planted in enumerate(trial.keys)
    ]
    every = {name: part.flatten(0, 1) for name, part in scores.items()}
    return {**_key_figures(kind, every), "by_distance": by_distance}


def _key_figures(kind: str, scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the figures over some prompts: what was found, and how likely it is; scores ``[prompts, 2]``."""
    nats = {name: part[:, 0].contiguous() for name, part in scores.items()}
    gain = _estimated("key_gain", nats[kind] - nats[OTHER])
    change = _estimated("key_change", None if kind == PLAIN else nats[kind] - nats[PLAIN])
    found = scores[kind][:, 1].contiguous().mean().item(), nats[kind].mean().item()
    return dict(zip(_OF_KEYS, (*found, *gain.values(), *change.values()), strict=True))


def _estimated(name: str, values: Tensor | None) -> dict[str, float | None]:
    """Return a mean over windows, or prompts, and its standard error; None where there is none."""
    if values is None:
        return {f"{name}_mean": None, f"{name}_se": None}
    found = Estimate.of(values)
    return {
        f"{name}_mean": found.mean,
        f"{name}_se": None if math.isnan(found.error) else found.error,
    }
