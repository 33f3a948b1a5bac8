"""Quality of caches: the same weights with keys and values stored in fewer bits, against a cache of 16 bits.

Both are computed by the own decoder in float32 from keys and values that are rounded to bfloat16, as an engine would
hand them to its cache, so that nothing but the cache differs. Two things are measured:

* The KL divergence, by position: what a cache loses adds up over what attention reads, and a mean over short windows
  would not show it.
* Retrieval of a planted key: whether attention still finds what was put into the cache long before. A prompt is text in
  which a cue and a key stand, random tokens of the text, some distance before its end, where the cue stands once more.
  What is measured is how likely the key is there, token by token, as if the model were to go on: only the cache can
  tell it. The same prompt with another key in the first place says what a model would predict without looking; a model
  too small to look back so far shows as one, since both figures are then alike.

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

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.configuration import max_positions
from quantforge.cache_kinds import PLAIN
from quantforge.errors import RefusedError
from quantforge.evaluation.divergence import Estimate, finite, forward_tokens
from quantforge.evaluation.output_head import checked_head, compare_predictions
from quantforge.evaluation.text_windows import Windows, cut_windows
from quantforge.files.reader import Checkpoint
from quantforge.progress import phase, report_step
from quantforge.runtime.batching.engine import EngineOptions
from quantforge.runtime.cache import CacheLayout, CacheShape, PagedCache
from quantforge.runtime.decoder import Decoder, supports
from quantforge.runtime.linear import cache_decoded_weights
from quantforge.runtime.load import Loaded
from quantforge.runtime.text_processing import load_model_tokenizer

EDGES = tuple(2**n for n in range(6, 13))  # of ranges of positions
MOST_TOKENS = 2 * EDGES[-1]  # of a window
REQUESTS = 16  # with a cache of 16 bits: the memory that others are counted in

CUE, KEY = 8, 16  # tokens
BEFORE = 32  # tokens of text before the first cue
DISTANCES = tuple(2**n for n in range(5, 13))  # in tokens, from the key to the second cue
MOST_WINDOWS = 8  # from which prompts are made, one of every distance
OTHER_KEY = ""  # in the place of a kind: the cache of 16 bits where another key was planted
_OF_KEYS = ("keys_found", "key_nats", "key_gain", "key_gain_se", "key_change", "key_change_se")


@dataclass(frozen=True, slots=True)
class PlantedKeys:
    """Prompts of one distance, ``[prompts, tokens]``, that end in their keys, and the same with other keys planted."""

    distance: int
    ids: Tensor
    others: Tensor


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """Caches to try, and on what.

    Attributes:
        kinds: names, see `quantforge.cache_kinds`; that of 16 bits is not among them.
        windows: of the text, as long as positions and text allow.
        keys: prompts with a planted key, by distance, as far as windows have room.
    """

    kinds: tuple[str, ...]
    windows: Windows
    keys: tuple[PlantedKeys, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as plain data."""
        count, length = self.windows.ids.shape
        return {
            "windows": count,
            "length": length,
            "tokens_sha256": self.windows.sha256,
            "requests": REQUESTS,
            "keys": sum(len(one.ids) for one in self.keys),
            "cue_tokens": CUE,
            "key_tokens": KEY,
        }


def trial_of(
    models: Sequence[Checkpoint], text: str, kinds: Sequence[str], tokens: int
) -> CacheTrial:
    """Return what caches are tried on: windows as long as the models' positions, of about ``tokens`` tokens in all.

    A text that has fewer tokens than such a window gives shorter ones.

    Raises:
        InputError: the text has no window of two tokens, or a model has heads that a kind cannot hold.
        RefusedError: the own decoder, whose caches these are, does not compute a model's family.
    """
    for model in models:
        family = architecture_of(model.config)
        if family is None or family.complete_graph is None:
            raise _no_such_caches(model.config.get("model_type"))
        for kind in kinds:  # which refuses heads that it cannot hold
            head = family.dimensions(text_config(model.config)).head
            CacheShape(1, 1, head, kind, torch.bfloat16)
    tokenizer = load_model_tokenizer(models[0])
    length = min(MOST_TOKENS, *(max_positions(model.config) for model in models))
    there = len(tokenizer.encode(text)) + (tokenizer.bos_id is not None)
    while length > max(2, there):
        length = max(2, length // 2)
    windows = cut_windows(tokenizer, text, max(1, tokens // length), length)
    return CacheTrial(tuple(kind for kind in kinds if kind != PLAIN), windows, plant_keys(windows))


def plant_keys(windows: Windows) -> tuple[PlantedKeys, ...]:
    """Return prompts of every distance that the windows have room for, none where they are too short."""
    first = int(windows.bos is not None)
    known = torch.tensor(sorted({*windows.ids[:, first:].flatten().tolist()}))
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        return known[torch.randint(len(known), (count,), generator=generator)]

    found = []
    room = windows.ids.shape[1] - first - BEFORE - 2 * (CUE + KEY)
    for distance in (d for d in DISTANCES if d <= room):
        prompts: list[Tensor] = []
        others: list[Tensor] = []
        for window in windows.ids[:MOST_WINDOWS]:
            cue, key, other = random(CUE), random(KEY), random(KEY)
            before, between = window[: first + BEFORE], window[first + BEFORE :][:distance]
            for made, planted in ((prompts, key), (others, other)):
                made.append(torch.cat((before, cue, planted, between, cue, key)))
        found.append(PlantedKeys(distance, torch.stack(prompts), torch.stack(others)))
    return tuple(found)


@torch.inference_mode()
def try_caches(loaded: Loaded, trial: CacheTrial) -> list[dict[str, Any]]:
    """Return the figures of a model with each kind of cache, that of 16 bits first.

    Raises:
        RefusedError: the own decoder, whose caches these are, does not compute the model.
        InputError: heads that a kind cannot hold, or a divergence is NaN or infinite.
    """
    model = loaded.model
    if not supports(model):
        raise _no_such_caches(model.config.model_type)
    decoding = _WithCaches(loaded, trial)
    with cache_decoded_weights(model):
        with phase("", 0.6):
            divergence = decoding.divergence()
        with phase("", 1.0):
            scores = decoding.scores_of_keys()
    rows = []
    for kind in (PLAIN, *trial.kinds):
        kl = divergence.get(kind)
        rows.append(
            {
                "kind": kind,
                **decoding.room(kind),
                **_estimated("kl", None if kl is None else kl.double().mean(1)),
                "by_position": [] if kl is None else [*_by_position(kl)],
                **_figures_of_keys(kind, scores, trial),
            }
        )
    return rows


def _no_such_caches(model_type: object) -> RefusedError:
    return RefusedError(
        f"--cache: model_type {model_type!r} is not computed by the own decoder, whose caches are measured",
        "leave --cache out",
    )


class _WithCaches:
    """A model in float32, computed with caches of several kinds."""

    def __init__(self, loaded: Loaded, trial: CacheTrial) -> None:
        self._decoder = Decoder(loaded.model, join=False)
        self._scales = loaded.kv_scales
        self._head = checked_head(loaded.model, trial.windows.ids)
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
                found[kind][number] = compare_predictions(
                    self._head, rows, self._head, whole, targets
                )[1]
            report_step("windows of caches", number + 1, len(windows.ids))
        return {kind: finite(kl, f"KL divergence of cache {kind}") for kind, kl in found.items()}

    def scores_of_keys(self) -> dict[str, Tensor]:
        """Return the scores of planted keys by kind and `OTHER_KEY`, float64 ``[distances, prompts, 2]``.

        They are the mean log-probability of a key's tokens, and the share of those that are the most likely.
        """
        found: dict[str, list[Tensor]] = {
            kind: [] for kind in (PLAIN, *self._trial.kinds, OTHER_KEY)
        }
        for number, planted in enumerate(self._trial.keys):
            for kind, scores in found.items():
                prompts = planted.others if kind == OTHER_KEY else planted.ids
                scores.append(torch.stack([self._key(ids, kind or PLAIN) for ids in prompts]))
            report_step("planted keys", number + 1, len(self._trial.keys))
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
        sums = self._head.sums(rows, key, find_best=True)
        return torch.stack((-sums.nll.mean(), (sums.best == key).double().mean())).cpu()

    def _hidden(self, ids: Tensor, kind: str) -> Tensor:
        """Return the final hidden states ``[tokens, hidden]`` of one sequence."""
        shape, device = self._decoder.cache_shape(kind), self._decoder.device
        cache = _CacheOf16BitInputs(shape, 1, len(ids), device, scales=self._scales)
        cache.reserve(0, len(ids))
        found = []
        for part in torch.split(ids.to(self._decoder.device), self._chunk):
            found.append(self._decoder.hidden(part[None], cache)[0])
            cache.advance_all(len(part))
        return torch.cat(found)


class _CacheOf16BitInputs(PagedCache):
    """Cache whose keys and values are rounded to bfloat16 before they are stored, whatever type computes."""

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


def _figures_of_keys(kind: str, scores: Mapping[str, Tensor], trial: CacheTrial) -> dict[str, Any]:
    """Return the figures of planted keys, over all distances and by distance; None where no prompt had room."""
    if not scores:
        return {**dict.fromkeys(_OF_KEYS), "by_distance": []}

    def over(prompts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what was found, and how likely it is; scores by kind ``[prompts, 2]``."""
        nats = {name: part[:, 0].contiguous() for name, part in prompts.items()}
        gain = _estimated("key_gain", nats[kind] - nats[OTHER_KEY])
        change = _estimated("key_change", None if kind == PLAIN else nats[kind] - nats[PLAIN])
        found = prompts[kind][:, 1].contiguous().mean().item(), nats[kind].mean().item()
        return dict(zip(_OF_KEYS, (*found, *gain.values(), *change.values()), strict=True))

    by_distance = [
        {"distance": planted.distance, **over({name: part[at] for name, part in scores.items()})}
        for at, planted in enumerate(trial.keys)
    ]
    every = {name: part.flatten(0, 1) for name, part in scores.items()}
    return {**over(every), "by_distance": by_distance}


def _estimated(name: str, values: Tensor | None) -> dict[str, float | None]:
    """Return a mean over windows, or prompts, and its standard error; None where there is none."""
    if values is None:
        return {f"{name}_mean": None, f"{name}_se": None}
    found = Estimate.of(values)
    return {
        f"{name}_mean": found.mean,
        f"{name}_se": None if math.isnan(found.error) else found.error,
    }
