"""Run a forward pass over a few hundred tokens in up to four models at once, block by block.

* The source: the inputs of its layers weight the errors of the artifact's weights, and its logits are the reference. *
The artifact: its own decoded weights with its own configuration. * The same weights with the *source's* configuration:
if their logits differ from the artifact's, the two configurations differ in meaning, which is an error. * The source
rounded to nearest in the artifact's schemes: if the artifact diverges more from the source than this, there is a
warning.

Only weights are rounded: inputs and the KV cache stay in float32. One block of each model is in memory at a time. The
text is included in the package and tokenized with the source's tokenizer; without a source, or if its tokenizer cannot
be read, token ids are spread over the vocabulary, so that no untrusted tokenizer has to run. No window is longer than
the source's sliding attention window, which a GGUF file may not record.

The inputs of the source's layers also show whether ranges measured during calibration are plausible: those of static
input quantization and of an fp8 KV cache. The weights alone cannot show this. Calibration used other text, and
observers may cut off tails, so a range is only unusual if it is far from the observed one and causes a large rounding
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.match import ModelLayout
from quantforge.errors import InputError, NotRunnableError, RefusedError
from quantforge.evaluation.divergence import Estimate
from quantforge.evaluation.text_windows import cut_windows
from quantforge.files.reader import Checkpoint
from quantforge.formats import kv_scales
from quantforge.formats.configuration import quantization_config
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.read_checks import require_positive
from quantforge.model.block import DecoderBlock
from quantforge.model.model_class import model_class
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.stream import ModelStream
from quantforge.model.weight_loading import TensorSource
from quantforge.packers.fp8 import max_value
from quantforge.packers.input_rounding import fake_quantize_input, max_input
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.cache_scales import CachePeaks, attached_cache, read_cache_scales
from quantforge.runtime.text_processing import load_model_tokenizer
from quantforge.verification.findings import Report
from quantforge.verification.opening import Artifact, SourceModel
from quantforge_calibration.sources import builtin

NUM_WINDOWS, WINDOW_LENGTH = 8, 64
# Characters of text: far more than the tokens need
TEXT_CHARACTERS = 64 * NUM_WINDOWS * WINDOW_LENGTH
SAMPLE_TOKENS = 256  # sampled tokens whose inputs weight the errors
MAX_LOGIT_DIFFERENCE = 1e-3  # relative difference of logits with equal weights
# A divergence is unusual if it exceeds this multiple of that of rounding to nearest by this many standard errors over
# windows, and by this many nats per token; less comes from another order of additions.
MAX_DIVERGENCE_RATIO = 1.6
STANDARD_ERRORS = 3.0
MIN_DIVERGENCE = 1e-4
# Usual ratios of a range to the observed one: for inputs (other text may have several times larger values), and for the
# cache, where e4m3 tolerates a too large range but not a too small one.
USUAL_INPUT_RANGES, USUAL_CACHE_RANGES = (0.1, 4.0), (0.45, 512.0)
# Ranges that are tried, of the range that was seen
CANDIDATE_RANGES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.5)
MAX_ERROR_RATIO = 3.0  # error of an unusual range, relative to the best candidate
MAX_SCALE_RATIO = 1.1  # ratio of the scales of two linears with the same input

# Keys of a configuration that have no influence on what a model computes in float32.
_NON_NUMERIC_KEYS = {
    "quantization_config", "quantization", "gguf_types", "dtype", "torch_dtype", "transformers_version",
    "_name_or_path",
}  # fmt: skip
# Descriptions of additional models, for notes on those that cannot run.
_MODEL_DESCRIPTIONS = {
    "decoded": "the artifact's weights under the source's configuration",
    "rounded": "the source's weights, rounded plainly",
}

# Canonical name to float32 values, linears as [out, in]
WeightLoader = Callable[[str], Tensor | None]


@dataclass(slots=True)
class LayerInputs:
    """Observed inputs of the source's layers.

    Attributes:
        statistics: statistics by canonical name of the first linear that reads an input.
        input_names: that name for every linear.
        cache_peaks: largest magnitudes of keys and values, by block.
    """

    statistics: dict[str, Statistics] = field(default_factory=dict)
    input_names: dict[str, str] = field(default_factory=dict)
    cache_peaks: dict[int, CachePeaks] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop the inputs of layers; the peaks of caches stay."""
        self.statistics.clear()
        self.input_names.clear()

    def normalized(self, module: str) -> Tensor | None:
        """Return inputs ``[tokens, in]`` of a linear, each with a root mean square of 1; None if none were observed."""
        x = self.raw(module)
        if x is None:
            return None
        return x / x.square().mean(1, keepdim=True).sqrt_().clamp_(min=1e-30)

    def raw(self, module: str) -> Tensor | None:
        """Return the inputs of a linear without normalization."""
        statistics = self._statistics_of(module)
        return statistics.sample if statistics else None

    def peaks(self, module: str) -> Tensor | None:
        """Return the largest magnitude ``[in]`` of each input channel of a linear."""
        statistics = self._statistics_of(module)
        return statistics.peaks if statistics else None

    def _statistics_of(self, module: str) -> Statistics | None:
        return self.statistics.get(self.input_names.get(module, module))


class PatchedCheckpoint:
    """A checkpoint in which some tensors are replaced, for reading by a `ModelStream`."""

    def __init__(
        self, checkpoint: Checkpoint, model_layout: ModelLayout, values: WeightLoader
    ) -> None:
        """Replace the tensors for which ``values`` returns a weight instead of None."""
        self.config: Mapping[str, Any] = checkpoint.config
        self._checkpoint, self._values = checkpoint, values
        self._tensors = {tensor.header.name: tensor for tensor in model_layout.tensors}

    def read(self, name: str) -> Tensor:
        """Return a tensor by its stored name."""
        value = self._patched_value(name)
        return self._checkpoint.read(name) if value is None else value

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last`` (exclusive) of a tensor."""
        value = self._patched_value(name)
        return self._checkpoint.read_rows(name, first, last) if value is None else value[first:last]

    def _patched_value(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        value = None if tensor is None else self._values(tensor.name)
        if tensor is None or value is None or value.dim() != 2:
            return value
        return value.T.contiguous() if tensor.transposed else value


class ForwardPass:
    """The forward pass of an artifact, and of its source if there is one."""

    def __init__(
        self,
        report: Report,
        artifact: Artifact,
        source: SourceModel | None,
        stored: WeightLoader,
        rtn_weights: WeightLoader,
        device: str,
        *,
        run: bool = True,
    ) -> None:
        """Prepare the models; one that cannot run is left out, with the reason in the report.

        Args:
            report: gets findings, and the reason if the check is skipped.
            artifact: the artifact whose logits are checked.
            source: the model that it is compared with.
            stored: returns a weight of the artifact.
            rtn_weights: returns a weight of the source, rounded to nearest; None for one that is not quantized.
            device: where the models run.
            run: whether to run anything at all.
        """
        self.inputs = LayerInputs()
        self._report, self._artifact, self._source = report, artifact, source
        self._streams: dict[str, ModelStream] = {}
        self._device, self._load_weight, self._at_head = device, stored, False
        self._source_not_runnable = False
        if not run:
            return
        decoded = (
            decode_checkpoint(artifact.checkpoint) if artifact.layouts else artifact.checkpoint
        )
        weights = PatchedCheckpoint(decoded, artifact.model_layout, stored)
        if source is None:
            self._ids = spread_token_ids(artifact.model_layout)
            self._open_stream("artifact", weights, artifact.model_layout)
            return
        artifact_blocks, source_blocks = (
            len(artifact.model_layout.layers),
            len(source.model_layout.layers),
        )
        if artifact_blocks != source_blocks:
            report.skip(
                f"the source has {source_blocks} blocks, the artifact {artifact_blocks}", "logits"
            )
            return
        self._ids = choose_token_ids(source)
        self._open_stream("source", source.checkpoint, source.model_layout)
        if "source" not in self._streams:
            return
        self._open_stream("artifact", weights, artifact.model_layout)
        if not _configs_equal(artifact, source):
            weights = PatchedCheckpoint(
                source.checkpoint, source.model_layout, self._artifact_weight
            )
            self._open_stream("decoded", weights, source.model_layout)
        if artifact.layouts:
            weights = PatchedCheckpoint(source.checkpoint, source.model_layout, rtn_weights)
            self._open_stream("rounded", weights, source.model_layout)

    def embed_tokens(self) -> None:
        """Embed the tokens."""
        for name in [*self._streams]:
            self._run_or_drop(name, ModelStream.embed)

    def run_source_block(self, index: int) -> None:
        """Run a block of the source and record the inputs of its layers, replacing those of the previous block."""
        self.inputs.clear()
        self._run_or_drop("source", lambda stream: self._observe_block(stream, index))

    def run_other_blocks(self, index: int) -> None:
        """Run the same block of the other models."""
        for name in [*self._streams]:
            if name != "source":
                self._run_or_drop(name, lambda stream: _advance_block(stream, index))

    def finish_source(self) -> None:
        """Compute the source's last hidden states and record them as the input of its head."""
        self.inputs.clear()
        self._run_or_drop("source", self._record_head_input)

    def check_logits(self) -> None:
        """Compute the logits of all models and report what is wrong with them."""
        self._at_head = True
        logits, name = self._take_logits("artifact"), self._report.path.name
        if logits is None:
            return
        if not bool(torch.isfinite(logits).all()):
            self._report.add("logits", name, "the logits of the model are not finite")
            return
        if (
            source_config_logits := self._take_logits("decoded")
        ) is not None and source_config_logits.shape == logits.shape:
            self._check_configuration(logits, source_config_logits)
        del source_config_logits
        if (reference := self._take_logits("source")) is None:
            return
        if logits.shape != reference.shape:
            text = f"logits for {logits.shape[-1]} tokens, the source has {reference.shape[-1]}"
            self._report.add("logits", name, text)
            return
        divergence = window_divergence(reference, logits)
        self._report.figures = {
            "tokens": self._ids.numel(),
            "kl_mean": Estimate.of(divergence).mean,
            "kl_se": Estimate.of(divergence).error,
            "top1_agreement": float((logits.argmax(-1) == reference.argmax(-1)).double().mean()),
        }
        del logits
        if (rounded_logits := self._take_logits("rounded")) is not None:
            self._check_divergence(divergence, window_divergence(reference, rounded_logits))

    def _artifact_weight(self, name: str) -> Tensor | None:
        """Return a weight of the artifact for a model with the source's configuration.

        If only the source ties embedding and head, the artifact's head is returned for the embedding when logits are
        computed.
        """
        model_layout, family = self._artifact.model_layout, self._artifact.model_layout.architecture
        if (
            self._at_head
            and family
            and not model_layout.tied
            and name == f"{family.embedding}.weight"
        ):
            name = f"{family.head}.weight"
        return self._load_weight(name)

    def close(self) -> None:
        """Release the memory of all models."""
        for stream in self._streams.values():
            stream.close()

    def _check_configuration(self, logits: Tensor, source_config_logits: Tensor) -> None:
        deviation = float(
            (source_config_logits - source_config_logits.mean(-1, keepdim=True))
            .square()
            .mean()
            .sqrt()
        )
        difference = float((logits - source_config_logits).square().mean().sqrt())
        if difference > MAX_LOGIT_DIFFERENCE * deviation:
            self._report.add(
                "logits",
                self._report.path.name,
                "under the source's configuration the same weights give other logits (they differ by"
                f" {difference:.2g}, the standard deviation of logits is {deviation:.2g}):"
                " the configuration of the artifact is not the source's",
            )

    def _check_divergence(self, divergence: Tensor, rounded_divergence: Tensor) -> None:
        artifact_estimate, rounded_estimate = (
            Estimate.of(divergence),
            Estimate.of(rounded_divergence),
        )
        excess = Estimate.of(divergence - MAX_DIVERGENCE_RATIO * rounded_divergence)
        self._report.figures["kl_rtn"] = rounded_estimate.mean
        if (
            artifact_estimate.mean > MAX_DIVERGENCE_RATIO * rounded_estimate.mean + MIN_DIVERGENCE
            and excess.mean > STANDARD_ERRORS * excess.error
        ):
            self._report.warn(
                "logits",
                self._report.path.name,
                f"{artifact_estimate.mean:.3g} nats per token from the source;"
                " rounding its weights plainly to the same types loses"
                f" {rounded_estimate.mean:.3g}",
            )

    def _open_stream(self, name: str, weights: TensorSource, model_layout: ModelLayout) -> None:
        if model_layout.architecture is None:
            self._record_failure(name, RefusedError("the blocks of this family are not declared"))
            return
        try:
            _check_cache_class(weights.config)
            self._streams[name] = ModelStream(
                weights, model_layout, self._ids, micro_batch=2, device=self._device
            )
        except (InputError, RefusedError) as error:
            self._record_failure(name, error)

    def _run_or_drop(self, name: str, run: Callable[[ModelStream], Any]) -> Any:
        """Run one step of a model; drop the model if it cannot run."""
        if name not in self._streams:
            return None
        try:
            return run(self._streams[name])
        except (InputError, RefusedError) as error:
            self._streams.pop(name).close()
            self._record_failure(name, error)
            return None

    def _record_failure(self, name: str, error: InputError | RefusedError) -> None:
        """Report why a model cannot run; skip the check if its source cannot run either."""
        not_runnable = isinstance(error, NotRunnableError)
        if name == "source":
            self._source_not_runnable = not_runnable
        elif name == "artifact" and not_runnable and self._at_head:
            self._take_logits("source")  # not yet computed: to see whether it fails, too
        is_skipped = isinstance(error, RefusedError) or (not_runnable and self._source_not_runnable)
        if name == "artifact" and not is_skipped:
            # Without a source, a wrong configuration and a model that needs more than tokens look alike.
            warns = not_runnable and self._source is None
            record = self._report.warn if warns else self._report.add
            record("logits", error.tensor or self._report.path.name, error.message)
        elif name in {"artifact", "source"}:
            self._report.skip(error.message, "logits")
        else:
            self._report.notes.append(f"not run: {_MODEL_DESCRIPTIONS[name]}: {error.message}")

    def _observe_block(self, stream: ModelStream, index: int) -> None:
        block = stream.block(index)
        for shared in block.inputs:
            key = f"{block.name}.{shared.key}"
            self.inputs.input_names.update(
                {f"{block.name}.{linear}": key for linear in shared.linears}
            )
        statistics_kinds = frozenset({Statistic.SAMPLE, Statistic.PEAKS})
        requested = {shared.key: statistics_kinds for shared in block.inputs if shared.expert < 0}
        declared = quantization_config(self._artifact.checkpoint.config)
        cache = None
        if declared.get("kv_cache_scheme") is not None:
            cache = self.inputs.cache_peaks.setdefault(index, CachePeaks())
        with attached_cache(block.module, cache):
            observed = block.observe(requested, advance=True, run_to_end=True)
        for key, statistics in observed.items():
            self.inputs.statistics[f"{block.name}.{key}"] = self._sample_tokens(statistics)
        if not block.advanced:
            block.advance()
        block.release()

    def _sample_tokens(self, statistics: Statistics) -> Statistics:
        """Return statistics of `SAMPLE_TOKENS` evenly spread tokens, none of them the first of a window."""
        if statistics.sample is None:
            return statistics
        tokens = torch.arange(len(statistics.sample))
        later_tokens = tokens[tokens % self._ids.shape[1] != 0]
        sampled_tokens = later_tokens[
            torch.linspace(0, len(later_tokens) - 1, min(SAMPLE_TOKENS, len(later_tokens)))
            .round()
            .long()
        ]
        return Statistics(
            statistics.tokens,
            peaks=statistics.peaks,
            sample=statistics.sample[sampled_tokens].float(),
        )

    def _record_head_input(self, stream: ModelStream) -> None:
        family = self._source.model_layout.architecture if self._source else None
        assert family is not None  # else the source is not run
        states = torch.cat([item.cpu() for item in stream.final_hidden()]).flatten(0, -2)
        input_statistics = Statistics(len(states), peaks=states.abs().amax(0), sample=states)
        self.inputs.statistics[family.head] = self._sample_tokens(input_statistics)

    def _take_logits(self, name: str) -> Tensor | None:
        logits = self._run_or_drop(
            name, lambda stream: torch.cat([batch.float().cpu() for batch in stream.logits()])
        )
        if name in self._streams:
            self._streams.pop(name).close()
        return logits if isinstance(logits, Tensor) else None


def _check_cache_class(config: Mapping[str, Any]) -> None:
    """Raise InputError if transformers cannot create a cache for a configuration."""
    from transformers import DynamicCache

    try:
        DynamicCache(config=model_class(config)[0])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"transformers cannot make a cache for it: {error}", subject="config.json"
        ) from error


def window_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Return the mean KL divergence of ``logits`` from ``reference`` in each window, nats per token, ``[windows]``."""
    divergences = []
    for reference_window, window in zip(reference, logits, strict=True):
        p, q = reference_window.log_softmax(-1), window.log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1, dtype=torch.float64).mean().clamp(min=0))
    return torch.stack(divergences)


def choose_token_ids(source: SourceModel) -> Tensor:
    """Return token ids ``[windows, length]`` of the text, or spread ones if the tokenizer gives none that fit."""
    model_layout = source.model_layout
    ids = spread_token_ids(model_layout)
    count, length = ids.shape
    try:
        text = "\n".join(builtin("evaluation"))[:TEXT_CHARACTERS]
        text_ids = cut_windows(load_model_tokenizer(source.checkpoint), text, count, length).ids
    except InputError:
        return ids
    return (
        text_ids
        if len(text_ids) > 1 and int(text_ids.max()) < _vocabulary_size(model_layout)
        else ids
    )


def spread_token_ids(model_layout: ModelLayout) -> Tensor:
    """Return token ids ``[windows, length]`` spread evenly over the vocabulary, in a mixed order."""
    length = WINDOW_LENGTH
    window = model_layout.config.get("sliding_window")
    if isinstance(window, int) and 2 <= window < length:
        length = window
    count = NUM_WINDOWS * WINDOW_LENGTH // length
    positions = torch.arange(count * length) * 2654435761 % 4294967296
    return (positions * _vocabulary_size(model_layout) // 4294967296).view(count, length)


def _vocabulary_size(model_layout: ModelLayout) -> int:
    return (
        model_layout.dimensions.vocab
        if model_layout.dimensions
        else int(model_layout.config.get("vocab_size", 1))
    )


def _advance_block(stream: ModelStream, index: int) -> None:
    block: DecoderBlock = stream.block(index)
    block.advance()
    block.release()


def _configs_equal(artifact: Artifact, source: SourceModel) -> bool:
    config, source_config = (
        {
            key: value
            for key, value in model.checkpoint.config.items()
            if key not in _NON_NUMERIC_KEYS
        }
        for model in (artifact, source)
    )
    return config == source_config


def check_input_scale(
    report: Report,
    module: str,
    tensor: QuantizedTensor,
    inputs: LayerInputs,
    column_scales: Tensor | None,
    scales: dict[str, float],
) -> None:
    """Check the scale of a statically quantized input.

    Args:
        report: gets the findings.
        module: canonical name of the linear.
        tensor: its weight, with the scale of its input.
        inputs: observed inputs of the source's linears.
        column_scales: scales that were moved from the input into the columns of the weight.
        scales: input scales seen so far, by name of the shared input; updated.
    """
    scale, activation = tensor.parameters["input_scale"], tensor.input
    assert activation is not None
    key = inputs.input_names.get(module, module)
    shared_scale = scales.setdefault(key, float(scale))
    if max(shared_scale, float(scale)) > MAX_SCALE_RATIO * min(shared_scale, float(scale)):
        text = (
            f"input scale {float(scale):.4g}; {key} reads the same input and has {shared_scale:.4g}"
        )
        report.warn("scale", module, text)
    observed_inputs, peaks = inputs.raw(module), inputs.peaks(module)
    if observed_inputs is None or peaks is None:
        return
    if column_scales is not None:
        observed_inputs, peaks = observed_inputs / column_scales, peaks / column_scales
    observed_peak = float(peaks.max())
    if observed_peak and not float(scale) > 0:
        report.add(
            "scale", module, f"input scale {float(scale):.4g}; the source shows {observed_peak:.3g}"
        )
        return
    covered_range = float(scale) * max_input(activation.grid)
    if (
        not observed_peak
        or USUAL_INPUT_RANGES[0] * observed_peak
        <= covered_range
        <= USUAL_INPUT_RANGES[1] * observed_peak
    ):
        return

    def error(value: Tensor) -> float:
        return float(
            (fake_quantize_input(observed_inputs, activation, value) - observed_inputs)
            .square()
            .sum()
        )

    smallest_error = min(
        error(scale * (observed_peak / covered_range) * candidate) for candidate in CANDIDATE_RANGES
    )
    if error(scale) > MAX_ERROR_RATIO * smallest_error:
        covered = f"input scale {float(scale):.4g} covers values up to {covered_range:.3g}"
        text = f"{covered}; the source shows {observed_peak:.3g}"
        report.warn("scale", module, text)


def check_cache_scales(
    report: Report, checkpoint: Checkpoint, caches: Mapping[int, CachePeaks]
) -> None:
    """Check the scales of an fp8 KV cache: positive, and near the ranges that the source shows.

    `kv_scales.find_scales` checks that all are present.

    Args:
        report: gets the findings.
        checkpoint: the artifact.
        caches: observed peaks of the source's keys and values, by block.
    """
    headers = checkpoint.stored_tensors()
    stored_scales = kv_scales.find_scales(checkpoint.config, headers)
    for name in sorted(stored_scales.tensor_names):
        try:
            require_positive(name, checkpoint.read(name))
        except InputError as error:
            report.add("scale", name, error.message)
            return
    scales = read_cache_scales(checkpoint, stored_scales, torch.device("cpu"))
    for block, cache_peaks in caches.items():
        for index, text in (
            unusual_cache_scales(scales[block], cache_peaks) if block in scales else ()
        ):
            report.warn("scale", stored_scales.names[block][index], text)


def unusual_cache_scales(
    scales: tuple[Tensor, Tensor], cache_peaks: CachePeaks
) -> Iterator[tuple[int, str]]:
    """Yield 0 for keys or 1 for values, with a message, for scales that do not fit the observed peaks.

    Scales have one element or ``[kv_heads]``.
    """
    for index, (peaks, scale) in enumerate(
        zip((cache_peaks.keys, cache_peaks.values), scales, strict=True)
    ):
        if peaks is None:
            continue
        covered = scale.float().cpu().flatten() * max_value("fp8_e4m3")
        observed_peaks = peaks.cpu() if len(covered) > 1 else peaks.max().view(1).cpu()
        unusual = (observed_peaks > 0) & (
            (covered < USUAL_CACHE_RANGES[0] * observed_peaks)
            | (covered > USUAL_CACHE_RANGES[1] * observed_peaks)
        )
        if bool(unusual.any()):
            head = int(unusual.nonzero()[0])
            head_text = f"head {head}: " if len(covered) > 1 else ""
            text = f"covers values up to {float(covered[head]):.3g}; the source shows {float(observed_peaks[head]):.3g}"
            yield index, head_text + text
