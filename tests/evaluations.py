"""What tests of evaluation share: a text, a small protocol, and its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from quantforge.evaluation.compare_models import Evaluation, compare_models
from quantforge.evaluation.measurement_options import EvaluationOptions
from quantforge.evaluation.text_windows import Windows, cut_windows
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.runtime.text_processing import load_model_tokenizer
from quantforge.settings import Settings
from quantforge_calibration.tokenizer import TextTokenizer

TEXT = "the weights of the model are rounded to the nearest point of the grid; 1 + 1 = 2. " * 12


TRIAL = {"windows": 4, "length": 1024, "tokens_sha256": "0" * 64, "requests": 16, "keys": 8, "cue_tokens": 8,
         "key_tokens": 16}  # fmt: skip


def cache_rows() -> list[dict]:
    """Figures of a model with two caches, as `quantforge.evaluation.cache_quality.compare_caches` returns them."""
    sizes = {"16bit": (2048, 16), "int8": (1056, 31), "k=int8,v=int4": (848, 38)}
    return [_cache_row(number, kind, *sizes[kind]) for number, kind in enumerate(sizes)]


def _cache_row(number: int, kind: str, nbytes: int, requests: int) -> dict:
    kl, edges = 0.0000495 * 40**number, [1, 65, 129, 257, 513, 1024]
    change = {"key_change": -0.01 * number, "key_change_se": 0.002}
    change = change if number else dict.fromkeys(change)
    keys = {"keys_found": 0.25, "key_nats": -7.0, "key_gain": 2.5, "key_gain_se": 0.4, **change}
    whole = {"kl_mean": kl, "kl_se": kl / 30} if number else {"kl_mean": None, "kl_se": None}
    positions = [
        {"first": first, "last": end - 1, "kl_mean": kl * end / 512, "kl_se": kl / 20}
        for first, end in pairwise(edges)
    ]
    distances = [{"distance": 32 << n, **keys, "key_gain": 2.5 / (1 + n)} for n in range(5)]
    return {
        "kind": kind, "token_bytes": nbytes, "requests": requests, **whole,
        "by_position": positions if number else [], **keys, "by_distance": distances,
    }  # fmt: skip


def options(**changes) -> EvaluationOptions:
    return replace(EvaluationOptions(TEXT, "a test", 4, 24, speed=False), **changes)


def evaluate_models(
    reference: Path,
    models: Sequence[Path],
    chosen: EvaluationOptions,
    settings: Settings | None = None,
) -> Evaluation:
    opened = [decode_if_unsupported(open_model(path)) for path in (reference, *models)]
    return compare_models(opened, chosen, settings)


def load_tokenizer(path: Path) -> TextTokenizer:
    return load_model_tokenizer(open_model(path))


def evaluation_windows(path: Path, **changes) -> Windows:
    chosen = options(**changes)
    return cut_windows(load_tokenizer(path), chosen.text, chosen.windows, chosen.length)
