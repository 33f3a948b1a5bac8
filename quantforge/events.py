"""Events: every way in which a result is worse than requested.

A raised damping, a row that fell back to plain rounding, a pair that could not be folded, a substituted scheme: each is
recorded where it happens, listed at the end, counted in the manifest, and refused under ``--strict`` unless ``--allow
EVENT=N`` permits it. Degradations are reported in no other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from quantforge.arguments import strict_fields
from quantforge.errors import RefusedError, UsageError, nearest_hint

KINDS: Mapping[str, str] = {
    "damping-raised": "the Hessian could not be factorised with the damping asked for",
    "rtn-fallback": "a whole matrix was rounded plainly because its Hessian could not be used",
    "substitution": "a tensor cannot hold the scheme asked for and was given another",
    "low-coverage": "less than 95 % of the weights inside blocks are quantized, and no rule asked for that",
    "router-quantized": "a matrix that decides which experts compute is quantized",
    "scale-fold-skipped": "a declared pair could not absorb a scale",
    "few-calibration-rows": "fewer calibration rows than were asked for: the builtin text has no more",
    "no-random-rows": "no rows of random tokens: the tokenizer has none but special tokens",
    "few-calibration-tokens": "fewer than 8 calibration tokens per input column",
    "expert-few-tokens": "experts to which the router sent few calibration tokens, or none",
    "duplicate-calibration-rows": "calibration rows repeat each other",
    "no-gradient": "no gradient reaches rows of a matrix, so that calibration tokens count alike for them",
    "expert-not-tuned": "experts to which the router sent no token while scales were learned: theirs stay",
    "importance-incomplete": "a file of importance lacks matrices, which are rounded as if all columns were alike",
    "dead-channels": "input columns that never were non-zero in calibration",
    "requantized": "the input was already quantized and was quantized again",
    "inexact": "an export changed values within the allowed error",
    "embedding-quantized": "an export rounded the embedding, which is the head too, as the tool of the format does",
    "kv-scales-dropped": "an export to a format without a place for the scales of the KV cache",
    "sliding-window-dropped": "an export to a format without a place for the sliding window of the source",
    "tokens-dropped": "tokens past the embedding, which the vocabulary of a GGUF file cannot hold",
    "tokenizer-differs": "llama.cpp's tokenizer does something other than the model's",
    "tower-differs": "llama.cpp hands on what a tower makes of a picture otherwise than the model",
    "tower-dropped": "a tower of the model that is in none of the files that llama.cpp reads",
    "unknown-model-type": "transformers does not know the type of the model, but the class that it names",
    "rope-approximated": "llama.cpp computes the frequencies of rotary positions a little differently",
    "kernel-fallback": "a layer is not multiplied by the kernel that is meant for it",
    "outliers-quantized": "more columns pass the threshold than the scheme keeps in 16 bits",
    "group-outlier": "a weight is so large that the others of its group are rounded away",
    "scale-clamped": "a scale left the range of its stored type and was clamped",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One degradation of the result.

    Attributes:
        kind: a key of `KINDS`.
        where: the tensor, layer or file that it concerns.
        detail: figures and other details as text.
    """

    kind: str
    where: str
    detail: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown event kind {self.kind!r}")

    def to_json(self) -> dict[str, str]:
        """Return the event as plain data for JSON."""
        return asdict(self)


@strict_fields
@dataclass(frozen=True, slots=True)
class Policy:
    """Limits on how many events of each kind a run accepts.

    Attributes:
        strict: whether kinds without a limit are refused.
        allow: maximum number of events by kind.
    """

    strict: bool = False
    allow: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.allow, Mapping) or not all(
            type(count) is int for count in self.allow.values()
        ):
            message = f"allow = {self.allow!a:.60}: how many events of which kind"
            raise UsageError(message, 'e.g. {"substitution": 1}')
        for kind in self.allow:
            if kind not in KINDS:
                raise UsageError(f"--allow {kind}: no such event", nearest_hint(kind, KINDS))

    def check(self, events: Iterable[Event]) -> None:
        """Raise `RefusedError` if a kind of event occurs more often than allowed.

        An explicit limit (``--allow EVENT=N``) applies with and without ``strict``.
        """
        events = list(events)
        counts = Counter(event.kind for event in events)
        for kind, count in sorted(counts.items()):
            limit = self.allow.get(kind, 0 if self.strict else count)
            if count > limit:
                first = next(event for event in events if event.kind == kind)
                raise RefusedError(
                    f"{count} event(s) '{kind}', {limit} allowed; first: {first.where}: {first.detail}",
                    f"accept them with --allow {kind}={count}, or drop --strict",
                )
