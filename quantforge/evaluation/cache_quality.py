"""Quality of caches: the same weights with keys and values stored in fewer bits, against a cache of 16 bits.

Both are computed by the own decoder in float32 from keys and values that are rounded to bfloat16, as an engine would
hand them to its cache, so that nothing but the cache differs. The divergence is told by position: what a cache loses
adds up over what attention reads, and a mean over short windows would not show it.

How many requests fit is arithmetic on the pages that the runtime takes for a request (`quantforge.runtime.cache`), no
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.cache_kinds import PLAIN
from quantforge.evaluation.cache_trial import MOST_TOKENS, REQUESTS, CacheTrial, none_of_ours
from quantforge.evaluation.divergence import compared_rows
from quantforge.evaluation.head import Head, summed
from quantforge.evaluation.perplexity import Estimate, finite, forward_tokens
from quantforge.evaluation.planted_key import KEY
from quantforge.execution.progress import tell
from quantforge.runtime.cache import PagedCache
from quantforge.runtime.cache_layout import CacheLayout, CacheShape
from quantforge.runtime.computed import supports
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.linear import decoded_once
from quantforge.runtime.load import Loaded
from quantforge.runtime.serving.engine_options import EngineOptions

FIRST_EDGE = 64  # tokens of the first range of positions; the others end at powers of two
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
        raise none_of_ours(model.config.model_type)
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
                **_of_keys(kind, scores),
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class KeyScores:
    """Keys of one distance: log-probability of a token, float64 ``[prompts]``, and share of tokens found."""

    distance: int
    nats: Tensor
    found: Tensor


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

    def keys(self) -> dict[str, list[KeyScores]]:
        """Return the scores of planted keys by kind, one of every distance.

        "" is the cache of 16 bits where another key was planted.
        """
        found: dict[str, list[KeyScores]] = {kind: [] for kind in (PLAIN, *self._trial.kinds, "")}
        for number, planted in enumerate(self._trial.keys):
            for name, told in found.items():
                prompts = planted.ids if name else planted.others
                scores = [self._key(ids, name or PLAIN) for ids in prompts]
                nats, hits = (torch.stack(part) for part in zip(*scores, strict=True))
                told.append(KeyScores(planted.distance, nats, hits))
            tell("planted keys", number + 1, len(self._trial.keys))
        return found

    def room(self, kind: str) -> dict[str, Any]:
        """Return the bytes of a token, and how many requests as long as a window fit; entries are of 16 bits."""
        length = self._trial.windows.ids.shape[1]
        plain, own = (
            CacheLayout(self._shape(name), length, EngineOptions().chunk) for name in (PLAIN, kind)
        )
        memory = REQUESTS * plain.sequence_bytes(length)
        requests = memory // own.sequence_bytes(length)
        return {"token_bytes": own.shape.token_bytes, "requests": requests}

    def _key(self, ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return the mean log-probability of a key's tokens, and the share of those that are the most likely."""
        rows, key = self._hidden(ids, kind)[-KEY - 1 : -1], ids[-KEY:].to(self._decoder.device)
        sums = summed(self._head, rows, key, places=True)
        assert sums.best is not None
        return -sums.nll.mean().cpu(), (sums.best == key).double().mean().cpu()

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

    def _shape(self, kind: str) -> CacheShape:
        shape = self._decoder.cache_shape(kind)
        return replace(shape, dtype=torch.bfloat16)


class _Handed(PagedCache):
    """A cache that is handed numbers of 16 bits, whatever type computes."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store, as `PagedCache.write`."""
        keys, values = (part.to(torch.bfloat16).to(part.dtype) for part in (keys, values))
        super().write(layer, slots, keys, values)


def _by_position(kl: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the divergence of ranges of positions; a position is the number of tokens that are attended to."""
    last = kl.shape[1]
    edges = [edge for edge in _powers() if edge < last]
    for first, end in zip([0, *edges], [*edges, last], strict=True):
        yield {
            "first": first + 1,
            "last": end,
            **_estimated("kl", kl[:, first:end].double().mean(1)),
        }


def _powers() -> Iterator[int]:
    edge = FIRST_EDGE
    while edge < MOST_TOKENS:
        yield edge
        edge *= 2


def _of_keys(kind: str, scores: Mapping[str, Sequence[KeyScores]]) -> dict[str, Any]:
    """Return the figures of planted keys: what was found, and how likely they are."""
    figures = _key_figures(kind, scores, slice(None)) if scores[PLAIN] else dict.fromkeys(_OF_KEYS)
    ranges = range(len(scores[PLAIN]))
    return {
        **figures,
        "by_distance": [
            {
                "distance": scores[PLAIN][at].distance,
                **_key_figures(kind, scores, slice(at, at + 1)),
            }
            for at in ranges
        ],
    }


def _key_figures(
    kind: str, scores: Mapping[str, Sequence[KeyScores]], part: slice
) -> dict[str, Any]:
    """Return the figures over some distances."""

    def nats(name: str) -> Tensor:
        return torch.cat([one.nats for one in scores[name][part]])

    gain = _estimated("key_gain", nats(kind) - nats(""))
    change = _estimated("key_change", None if kind == PLAIN else nats(kind) - nats(PLAIN))
    found = torch.cat([one.found for one in scores[kind][part]])
    values = found.mean().item(), nats(kind).mean().item(), *gain.values(), *change.values()
    return dict(zip(_OF_KEYS, values, strict=True))


def _estimated(name: str, values: Tensor | None) -> dict[str, float | None]:
    """Return a mean over windows, or prompts, and its standard error; None where there is none."""
    if values is None:
        return {f"{name}_mean": None, f"{name}_se": None}
    found = Estimate.of(values)
    return {
        f"{name}_mean": found.mean,
        f"{name}_se": None if math.isnan(found.error) else found.error,
    }
