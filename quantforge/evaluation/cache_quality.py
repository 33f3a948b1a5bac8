"""Quality of quantized KV caches: the same weights with fewer bits per key and value, compared with a 16-bit cache.

QuantForge's decoder computes both in float32, from keys and values rounded to bfloat16 as an engine would pass them to
its cache, so that the cache is the only difference. Two things are measured:

* The KL divergence by position: the error of a cache grows with the number of tokens attended to, and a mean over short
  windows would hide it.
* Retrieval of a planted key: whether attention still finds tokens stored in the cache long before. A prompt contains a
  cue followed by a key (random tokens of the text); some distance later it ends with the cue again. The log-probability
  of the key is then measured token by token; only the cache can supply it. As a control, the same prompt is run with
  another key planted, which shows what the model predicts without retrieval. For a model too small to look back that
  far, both log-probabilities are alike.

The number of requests that fit into memory is not measured but computed from the pages that the runtime allocates per
request (`quantforge.runtime.cache`).
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
from quantforge.evaluation.divergence import Estimate, check_finite, max_forward_tokens
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

POSITION_EDGES = tuple(2**n for n in range(6, 13))  # boundaries of position ranges
MAX_WINDOW_TOKENS = 2 * POSITION_EDGES[-1]
BASELINE_REQUESTS = 16  # their 16-bit caches define the memory that other caches are fitted into

CUE_TOKENS, KEY_TOKENS = 8, 16
LEAD_IN_TOKENS = 32  # tokens of text before the first cue
KEY_DISTANCES = tuple(2**n for n in range(5, 13))  # in tokens, from the key to the second cue
MAX_PROMPT_WINDOWS = 8  # windows to build prompts from, one per distance
CONTROL = ""  # stands for a cache kind: 16-bit cache with another key planted
_KEY_FIGURES = ("keys_found", "key_nats", "key_gain", "key_gain_se", "key_change", "key_change_se")


@dataclass(frozen=True, slots=True)
class KeyPrompts:
    """Prompts with a planted key at one distance.

    Attributes:
        distance: tokens between the planted key and the second cue.
        ids: prompts ``[prompts, tokens]``, each of which ends with its key.
        control_ids: the same prompts with another key planted.
    """

    distance: int
    ids: Tensor
    control_ids: Tensor


@dataclass(frozen=True, slots=True)
class CacheComparison:
    """Caches to compare, and the token ids to compare them on.

    Attributes:
        kinds: cache kinds, see `quantforge.cache_kinds`, without the 16-bit kind.
        windows: windows of the text, as long as the models' context and the text allow.
        keys: prompts with a planted key, by distance, for all distances that fit into a window.
    """

    kinds: tuple[str, ...]
    windows: Windows
    keys: tuple[KeyPrompts, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the protocol of the comparison as plain data."""
        count, length = self.windows.ids.shape
        return {
            "windows": count,
            "length": length,
            "tokens_sha256": self.windows.sha256,
            "requests": BASELINE_REQUESTS,
            "keys": sum(len(group.ids) for group in self.keys),
            "cue_tokens": CUE_TOKENS,
            "key_tokens": KEY_TOKENS,
        }


def plan_cache_comparison(
    models: Sequence[Checkpoint], text: str, kinds: Sequence[str], total_tokens: int
) -> CacheComparison:
    """Choose windows and prompts for a comparison of caches.

    Windows are as long as the smallest context of the models, or shorter if the text has fewer tokens.

    Args:
        models: the models whose caches are compared.
        text: the text.
        kinds: cache kinds to compare.
        total_tokens: approximate number of tokens in all windows.

    Raises:
        InputError: the text has no window of two tokens, or a cache kind cannot store the heads of a model.
        RefusedError: QuantForge's decoder does not support a model's family.
    """
    for model in models:
        family = architecture_of(model.config)
        if family is None or family.graph_if_complete is None:
            raise _unsupported_model_error(model.config.get("model_type"))
        for kind in kinds:  # raises for heads that the kind cannot store
            head_size = family.dimensions(text_config(model.config)).head
            CacheShape(1, 1, head_size, kind, torch.bfloat16)
    tokenizer = load_model_tokenizer(models[0])
    length = min(MAX_WINDOW_TOKENS, *(max_positions(model.config) for model in models))
    text_tokens = len(tokenizer.encode(text)) + (tokenizer.bos_id is not None)
    while length > max(2, text_tokens):
        length = max(2, length // 2)
    windows = cut_windows(tokenizer, text, max(1, total_tokens // length), length)
    return CacheComparison(
        tuple(kind for kind in kinds if kind != PLAIN), windows, plant_keys(windows)
    )


def plant_keys(windows: Windows) -> tuple[KeyPrompts, ...]:
    """Build prompts with planted keys for every distance that fits into the windows."""
    first_position = int(windows.bos is not None)
    text_token_ids = torch.tensor(sorted({*windows.ids[:, first_position:].flatten().tolist()}))
    generator = torch.Generator().manual_seed(0)

    def draw_tokens(count: int) -> Tensor:
        return text_token_ids[torch.randint(len(text_token_ids), (count,), generator=generator)]

    groups = []
    max_distance = (
        windows.ids.shape[1] - first_position - LEAD_IN_TOKENS - 2 * (CUE_TOKENS + KEY_TOKENS)
    )
    for distance in (d for d in KEY_DISTANCES if d <= max_distance):
        with_key: list[Tensor] = []
        with_other_key: list[Tensor] = []
        for window in windows.ids[:MAX_PROMPT_WINDOWS]:
            cue = draw_tokens(CUE_TOKENS)
            key = draw_tokens(KEY_TOKENS)
            other = draw_tokens(KEY_TOKENS)
            lead_in = window[: first_position + LEAD_IN_TOKENS]
            filler = window[first_position + LEAD_IN_TOKENS :][:distance]
            for prompts, planted_key in ((with_key, key), (with_other_key, other)):
                prompts.append(torch.cat((lead_in, cue, planted_key, filler, cue, key)))
        groups.append(KeyPrompts(distance, torch.stack(with_key), torch.stack(with_other_key)))
    return tuple(groups)


@torch.inference_mode()
def compare_caches(loaded: Loaded, comparison: CacheComparison) -> list[dict[str, Any]]:
    """Measure a model with each kind of cache; return one row per kind, the 16-bit cache first.

    Raises:
        RefusedError: QuantForge's decoder does not support the model.
        InputError: a cache kind cannot store the heads of the model, or a divergence is NaN or infinite.
    """
    model = loaded.model
    if not supports(model):
        raise _unsupported_model_error(model.config.model_type)
    measurement = _CacheMeasurement(loaded, comparison)
    with cache_decoded_weights(model):
        with phase("", 0.6):
            divergence = measurement.divergence()
        with phase("", 1.0):
            key_scores = measurement.key_scores()
    rows = []
    for kind in (PLAIN, *comparison.kinds):
        kl = divergence.get(kind)
        rows.append(
            {
                "kind": kind,
                **measurement.capacity(kind),
                **_mean_and_error("kl", None if kl is None else kl.double().mean(1)),
                "by_position": [] if kl is None else [*_by_position(kl)],
                **_key_figures(kind, key_scores, comparison),
            }
        )
    return rows


def _unsupported_model_error(model_type: object) -> RefusedError:
    """Create the error for a model that QuantForge's decoder, whose caches are compared, does not support."""
    return RefusedError(
        f"--cache: model_type {model_type!r} is not computed by the own decoder, whose caches are measured",
        "leave --cache out",
    )


class _CacheMeasurement:
    """A model in float32 that is run with several kinds of cache."""

    def __init__(self, loaded: Loaded, comparison: CacheComparison) -> None:
        self._decoder = Decoder(loaded.model, join=False)
        self._scales = loaded.kv_scales
        self._head = checked_head(loaded.model, comparison.windows.ids)
        self._comparison = comparison
        self._chunk = max_forward_tokens(self._decoder.device)

    def divergence(self) -> dict[str, Tensor]:
        """Return the KL divergence from the 16-bit cache for every kind, ``[windows, length - 1]``."""
        windows, kinds = self._comparison.windows, self._comparison.kinds
        divergences = {kind: torch.empty(windows.targets.shape) for kind in kinds}
        for number, (ids, targets) in enumerate(zip(windows.ids, windows.targets, strict=True)):
            baseline_states = self._final_states(ids, PLAIN)[:-1]
            for kind in kinds:
                states = self._final_states(ids, kind)[:-1]
                divergences[kind][number] = compare_predictions(
                    self._head, states, self._head, baseline_states, targets
                )[1]
            report_step("windows of caches", number + 1, len(windows.ids))
        return {
            kind: check_finite(kl, f"KL divergence of cache {kind}")
            for kind, kl in divergences.items()
        }

    def key_scores(self) -> dict[str, Tensor]:
        """Return the scores of planted keys by kind and for `CONTROL`, float64 ``[distances, prompts, 2]``.

        The two scores are the mean log-probability of the tokens of a key, and the fraction of them that are the most
        likely token.
        """
        scores_by_kind: dict[str, list[Tensor]] = {
            kind: [] for kind in (PLAIN, *self._comparison.kinds, CONTROL)
        }
        for number, group in enumerate(self._comparison.keys):
            for kind, scores in scores_by_kind.items():
                prompts = group.control_ids if kind == CONTROL else group.ids
                scores.append(torch.stack([self._score_key(ids, kind or PLAIN) for ids in prompts]))
            report_step("planted keys", number + 1, len(self._comparison.keys))
        return {kind: torch.stack(scores) for kind, scores in scores_by_kind.items() if scores}

    def capacity(self, kind: str) -> dict[str, Any]:
        """Return the bytes per token of a cache kind, and how many requests fit into the baseline memory.

        The baseline is the memory of `BASELINE_REQUESTS` requests of window length with a 16-bit cache. Values that a
        kind does not quantize are stored in 16 bits.
        """
        length = self._comparison.windows.ids.shape[1]
        baseline, layout = (
            CacheLayout(
                replace(self._decoder.cache_shape(cache_kind), dtype=torch.bfloat16),
                length,
                EngineOptions().chunk,
            )
            for cache_kind in (PLAIN, kind)
        )
        memory = BASELINE_REQUESTS * baseline.sequence_bytes(length)
        requests = memory // layout.sequence_bytes(length)
        return {"token_bytes": layout.shape.token_bytes, "requests": requests}

    def _score_key(self, ids: Tensor, kind: str) -> Tensor:
        """Return the mean log-probability of the key that ends a prompt, and the share of its tokens ranked first."""
        states = self._final_states(ids, kind)[-KEY_TOKENS - 1 : -1]
        key_ids = ids[-KEY_TOKENS:].to(self._decoder.device)
        sums = self._head.sum_logits(states, key_ids, find_best=True)
        return torch.stack((-sums.nll.mean(), (sums.best == key_ids).double().mean())).cpu()

    def _final_states(self, ids: Tensor, kind: str) -> Tensor:
        """Return the final hidden states ``[tokens, hidden]`` of one sequence computed with a kind of cache."""
        shape, device = self._decoder.cache_shape(kind), self._decoder.device
        cache = _Bfloat16InputCache(shape, 1, len(ids), device, scales=self._scales)
        cache.reserve(0, len(ids))
        states_by_chunk = []
        for chunk_ids in torch.split(ids.to(self._decoder.device), self._chunk):
            states_by_chunk.append(self._decoder.hidden(chunk_ids[None], cache)[0])
            cache.advance_all(len(chunk_ids))
        return torch.cat(states_by_chunk)


class _Bfloat16InputCache(PagedCache):
    """Paged cache that rounds keys and values to bfloat16 before storing them, whatever the compute dtype."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Round keys and values to bfloat16 and store them as `PagedCache.write` does."""
        keys, values = (tensor.to(torch.bfloat16).to(tensor.dtype) for tensor in (keys, values))
        super().write(layer, slots, keys, values)


def _by_position(kl: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the mean divergence per range of positions; a position is the number of tokens attended to."""
    length = kl.shape[1]
    edges = [edge for edge in POSITION_EDGES if edge < length]
    for first, end in zip([0, *edges], [*edges, length], strict=True):
        yield {
            "first": first + 1,
            "last": end,
            **_mean_and_error("kl", kl[:, first:end].double().mean(1)),
        }


def _key_figures(
    kind: str, scores: Mapping[str, Tensor], comparison: CacheComparison
) -> dict[str, Any]:
    """Return retrieval results for a cache kind, over all distances and by distance; None if no prompt fits."""
    if not scores:
        return {**dict.fromkeys(_KEY_FIGURES), "by_distance": []}

    def summarize(prompts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return hit rate, log-probability, gain and change as columns; the scores are by kind, ``[prompts, 2]``."""
        log_probabilities = {name: values[:, 0].contiguous() for name, values in prompts.items()}
        gain = _mean_and_error("key_gain", log_probabilities[kind] - log_probabilities[CONTROL])
        change = _mean_and_error(
            "key_change",
            None if kind == PLAIN else log_probabilities[kind] - log_probabilities[PLAIN],
        )
        averages = (
            prompts[kind][:, 1].contiguous().mean().item(),
            log_probabilities[kind].mean().item(),
        )
        return dict(zip(_KEY_FIGURES, (*averages, *gain.values(), *change.values()), strict=True))

    by_distance = [
        {
            "distance": group.distance,
            **summarize({name: values[index] for name, values in scores.items()}),
        }
        for index, group in enumerate(comparison.keys)
    ]
    all_scores = {name: values.flatten(0, 1) for name, values in scores.items()}
    return {**summarize(all_scores), "by_distance": by_distance}


def _mean_and_error(name: str, values: Tensor | None) -> dict[str, float | None]:
    """Return the mean over windows or prompts and its standard error; None for missing values."""
    if values is None:
        return {f"{name}_mean": None, f"{name}_se": None}
    estimate = Estimate.of(values)
    return {
        f"{name}_mean": estimate.mean,
        f"{name}_se": None if math.isnan(estimate.error) else estimate.error,
    }
