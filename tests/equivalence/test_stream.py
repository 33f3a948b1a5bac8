"""The streamed model is the model: same logits, same activations, same effect of a changed weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from quantforge.architectures.match import ModelLayout, match_tensors
from quantforge.errors import InputError
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.model.block import BlockRows, DecoderBlock, MicroBatch
from quantforge.model.hidden_states import InMemory
from quantforge.model.scale_folding import expand_heads, fold_scale, nearest_exact_scale
from quantforge.model.statistics import Statistic
from quantforge.model.stream import ModelStream
from tests.conftest import FAMILIES, MULTIMODAL_MIXTURES, TEXT_FAMILIES, VOCABULARY, Tiny
from tests.thorough import representative_families

ALL = frozenset(Statistic)
ROWS = torch.randint(0, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(1))
FEW = ROWS[:3]  # a micro-batch of two and one that is not full
NO_ROWS = BlockRows(
    (0, 0), lambda: iter(()), lambda start, states: None, lambda width: InMemory(0, 0, width)
)


@dataclass
class Changed:
    """A checkpoint of which some tensors are replaced."""

    base: Checkpoint
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.base.config

    def read(self, name: str) -> Tensor:
        return self.tensors.get(name, self.base.read(name))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self.read(name)[first:last]


def opened(path: Path) -> tuple[Checkpoint, ModelLayout]:
    checkpoint = open_checkpoint(path)
    return checkpoint, match_tensors(
        checkpoint.config, [e.to_stored_tensor() for e in checkpoint.entries.values()]
    )


def whole_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    checkpoint = open_checkpoint(path)
    auto = (
        AutoModelForImageTextToText if "text_config" in checkpoint.config else AutoModelForCausalLM
    )
    return auto.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)


def whole_logits(model: Any, micro_batch: int = 2, some: Tensor = ROWS) -> Tensor:
    return torch.cat([model(rows).logits for rows in some.split(micro_batch)])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", [*FAMILIES, *MULTIMODAL_MIXTURES])
def test_logits_equal_those_of_the_whole_model(tiny: Tiny, family: str) -> None:
    checkpoint, model_layout = opened(tiny(family))
    with ModelStream(checkpoint, model_layout, FEW, micro_batch=2) as stream:
        for part in stream:
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    expected = whole_logits(whole_model(tiny(family)), some=FEW)
    assert expected.std() > 0.1  # a model of zeros would be equal, too
    assert (streamed - expected).abs().max() == 0


@pytest.mark.parametrize("family", representative_families(TEXT_FAMILIES))
def test_statistics_are_those_of_hooks_on_the_whole_model(tiny: Tiny, family: str) -> None:
    checkpoint, model_layout = opened(tiny(family))
    model = whole_model(tiny(family))
    seen: dict[str, list[Tensor]] = {}
    keys = {
        f"{model_layout.block_name(index)}.{shared.key}"
        for index, kind in enumerate(model_layout.layers)
        for shared in kind.inputs
    }
    for name, module in model.named_modules():
        if name in keys:
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(
                    args[0].flatten(0, -2).double()
                )
            )
    whole_logits(model, some=FEW)
    with ModelStream(checkpoint, model_layout, FEW, micro_batch=2) as stream:
        for part in stream:
            observed = part.observe({shared.key: ALL for shared in part.inputs})
            assert list(observed) == [shared.key for shared in part.inputs]
            for key, statistics in observed.items():
                x = torch.cat(seen.pop(f"{part.name}.{key}"))
                assert statistics.tokens == len(x) == FEW.numel()
                torch.testing.assert_close(statistics.hessian, (x.T @ x / len(x)).float())
                torch.testing.assert_close(statistics.squares, x.square().mean(0).float())
            part.advance()
    assert not seen


def test_statistics_do_not_depend_on_threads(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("llama"))

    def hessians() -> list[Tensor]:
        found = []
        with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
            for part in stream:
                observed = part.observe({shared.key: ALL for shared in part.inputs})
                found += [
                    getattr(item, kind)
                    for item in observed.values()
                    for kind in ("hessian", "squares")
                ]
                part.advance()
            return [*found, *stream.final_hidden()]

    with threads(1):
        one = hessians()
    with threads(2):
        two = hessians()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# Rounding knows no family; a state and scores that are not divided carry more of it on.
@pytest.mark.parametrize("family", ["llama", "falcon-h1", "gemma4"])
def test_products_in_bfloat16_give_nearly_the_same_statistics(tiny: Tiny, family: str) -> None:
    checkpoint, model_layout = opened(tiny(family))
    recurrent = any("A_log" in tensor.name for tensor in model_layout.tensors)
    most = 0.06 if recurrent else 0.02  # a state carries what was lost to later tokens
    if family.startswith("gemma4"):
        # Scores are not divided by the root of a head, and more layers add to what is lost
        most *= 3
    found = {}
    for precision in ("float32", "bfloat16"):
        with ModelStream(
            checkpoint, model_layout, FEW, micro_batch=2, precision=precision
        ) as stream:
            for part in stream:
                observed = part.observe(
                    {s.key: ALL for s in part.inputs}, advance=part.index % 2 == 0
                )
                if not part.advanced:
                    part.advance()
            found[precision] = [*observed.values(), torch.cat([*stream.final_hidden()])]
    *exact, states = found["float32"]
    *close, others = found["bfloat16"]
    for one, other in zip(exact, close, strict=True):
        assert one.hessian.dtype == other.hessian.dtype == torch.float32
        difference = float((one.hessian - other.hessian).norm() / one.hessian.norm())
        assert 0 < difference < most
    assert 0 < float((states - others).norm() / states.norm()) < most


def test_hidden_states_on_disk_are_the_same_and_leave_nothing(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint, model_layout = opened(tiny("mistral"))
    results = []
    for directory in (None, tmp_path):
        with ModelStream(
            checkpoint, model_layout, ROWS, micro_batch=2, activations=directory
        ) as stream:
            for part in stream:
                part.advance()
            results.append(torch.cat(list(stream.final_hidden())))
    assert torch.equal(*results)
    assert not list(tmp_path.iterdir())


def test_one_block_has_weights_at_a_time(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("opt"))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        parts = []
        for part in stream:
            parts.append(part)
            real = [not any(p.is_meta for p in each.module.parameters()) for each in parts]
            assert real == [False] * part.index + [True]
            part.advance()
        assert len(parts) == model_layout.blocks
        assert all(p.is_meta for each in parts for p in each.module.parameters())


def test_a_block_that_was_not_advanced_is_a_bug(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("opt"))
    with (
        ModelStream(checkpoint, model_layout, ROWS) as stream,
        pytest.raises(RuntimeError, match="advanced"),
    ):
        for _ in stream:
            pass


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_a_changed_weight_changes_what_follows(tiny: Tiny, family: str) -> None:
    """What a method puts in is what the rest of the model sees, in the right orientation."""
    checkpoint, model_layout = opened(tiny(family))
    model = whole_model(tiny(family))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        for part in stream:
            for shared in part.inputs:
                for linear in shared.linears:
                    weight = part.weight(linear)
                    out_features, in_features = weight.shape
                    rounded = (weight * 4).round() / 4 + torch.arange(in_features) / 1e4
                    part.set_weight(linear, rounded)
                    target = model.get_submodule(f"{part.name}.{linear}").weight
                    assert target.shape == (
                        (in_features, out_features) if family == "gpt2" else weight.shape
                    )
                    target.copy_(rounded.T if family == "gpt2" else rounded)
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    assert torch.equal(streamed, whole_logits(model))


def test_captured_inputs_reproduce_the_sub_block(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("gemma3"))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        for part in stream:
            outputs: list[Tensor] = []
            module = part.module.get_submodule("self_attn")
            calls = part.capture_calls("self_attn", 3)
            handle = module.register_forward_hook(
                lambda _, args, output, seen=outputs: seen.append(output[0])
            )
            part.advance()
            handle.remove()
            assert len(calls) == 2  # whole micro-batches
            rows = torch.cat(outputs)  # they pass one by one
            for call, expected in zip(calls, rows.split(2), strict=False):
                assert torch.equal(module(*call.args, **call.kwargs)[0], expected)
    with pytest.raises(AttributeError):
        part.capture_calls("no_such_module", 1)


@pytest.mark.parametrize("together", [False, True], ids=["by rows", "as on a GPU"])
def test_an_activation_that_is_not_finite_is_an_error(
    tiny: Tiny, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if together:
        monkeypatch.setattr(MicroBatch, "split_into_rows", lambda batch: [batch])
    checkpoint, model_layout = opened(tiny("gpt2"))
    rows = ROWS.clamp(min=8)
    rows[3, 5] = 7
    name = "transformer.wte.weight"
    table = checkpoint.read(name).clone()
    table[7] = 3e38
    changed = Changed(checkpoint, {name: table})
    with (
        ModelStream(changed, model_layout, rows, micro_batch=2) as stream,
        pytest.raises(InputError, match=r"transformer.h.0.attn.c_attn: .* calibration row 3"),
    ):
        next(iter(stream)).observe({"attn.c_attn": ALL})


def test_a_weight_that_is_not_finite_is_an_error(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("llama"))
    name = "model.layers.1.mlp.up_proj.weight"
    weight = checkpoint.read(name).clone()
    weight[3, 4] = torch.nan
    with ModelStream(Changed(checkpoint, {name: weight}), model_layout, ROWS) as stream:
        parts = iter(stream)
        next(parts).advance()
        with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj.weight.*\[3, 4\]"):
            next(parts)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.full((1, 4), VOCABULARY), "vocabulary"),
        (torch.full((1, 4), -1), "vocabulary"),
        (torch.zeros(1, 129, dtype=torch.long), "128 positions"),
        (torch.zeros(0, 8, dtype=torch.long), "calibration rows of shape"),
        (torch.zeros(8, dtype=torch.long), "calibration rows of shape"),
    ],
)
def test_impossible_rows_are_refused(tiny: Tiny, rows: Tensor, message: str) -> None:
    checkpoint, model_layout = opened(tiny("gpt2"))
    with pytest.raises(InputError, match=message):
        ModelStream(checkpoint, model_layout, rows)


def test_a_short_last_micro_batch_and_few_tokens(tiny: Tiny) -> None:
    """Only the embedding rows of tokens that occur are read; the result is the same."""
    checkpoint, model_layout = opened(tiny("gemma2"))
    rows = ROWS % 3
    with ModelStream(checkpoint, model_layout, rows, micro_batch=4) as stream:
        for part in stream:
            part.advance()
        streamed = list(stream.logits())
    assert [len(batch) for batch in streamed] == [4, 1]
    model = whole_model(tiny("gemma2"))
    assert torch.equal(streamed[1], model(rows[4:]).logits)


class InFloat64(TorchFunctionMode):
    """Keep transformers' norms and softmax, which ask for float32, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float or (func is Tensor.to and args[1:] == (torch.float32,)):
            return args[0]
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def blocks_of(model: Any, model_layout: ModelLayout) -> list[DecoderBlock]:
    found = []
    for index in range(model_layout.blocks):
        prefix = model_layout.block_name(index)
        module = model.get_submodule(prefix)
        stored = {
            key: model_layout.by_name[f"{prefix}.{key}"].header for key in module.state_dict()
        }
        found.append(DecoderBlock(index, module, model_layout, stored, NO_ROWS))
    return found


def random_scale(block: DecoderBlock, shared: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = block.dimensions.kv if shared.heads else block.weight(shared.key).shape[1]
    scale = torch.exp(torch.randn(width, generator=generator, dtype=torch.float64))
    return expand_heads(block.dimensions, scale) if shared.heads else scale


@pytest.mark.parametrize("family", representative_families(TEXT_FAMILIES))
def test_folding_every_declared_pair_preserves_the_function(tiny: Tiny, family: str) -> None:
    _, model_layout = opened(tiny(family))
    model = whole_model(tiny(family), torch.float64)
    with InFloat64():
        expected = whole_logits(model, len(FEW), FEW)
        assert expected.dtype == torch.float64
        for block in blocks_of(model, model_layout):
            for number, shared in enumerate(block.inputs):
                scale = random_scale(block, shared, 10 * block.index + number)
                if shared.scale_fold is None:
                    with pytest.raises(ValueError, match="nothing absorbs"):
                        fold_scale(block, shared, scale)
                    continue
                before = {name: block.parameter(name).clone() for name in block.module.state_dict()}
                changed = fold_scale(block, shared, scale)
                differ = [
                    name
                    for name, old in before.items()
                    if not torch.equal(old, block.parameter(name))
                ]
                assert sorted(changed) == sorted(differ)
                actual = whole_logits(model, len(FEW), FEW)
                assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max(), shared.key


def test_every_family_folds_what_it_can(tiny: Tiny) -> None:
    """Nothing absorbs behind an activation that is not linear, nor before the stream or a norm without weights."""
    without: dict[str, set[str]] = defaultdict(set)
    for family in TEXT_FAMILIES:
        for kind in opened(tiny(family))[1].layers:
            without[family] |= {shared.key for shared in kind.inputs if shared.scale_fold is None}
    no_norm = {"self_attn.q_proj", "mlp.gate_proj"}
    assert {family: keys for family, keys in without.items() if keys} == {
        "gpt2": {"mlp.c_proj"},
        "gemma4": {"self_attn.o_proj", "per_layer_input_gate", "per_layer_projection"},
        "gemma4-equal": {"self_attn.o_proj"},  # values are normalised
        "openai-gpt": {"attn.c_attn", "mlp.c_fc", "mlp.c_proj"},
        "starcoder2": {"mlp.c_proj"},
        "gpt-neox": {"mlp.dense_4h_to_h"},
        "phi": {"mlp.fc2"},
        "apertus": {"mlp.down_proj"},
        "nemotron": {"mlp.down_proj"},
        "arcee": {"mlp.down_proj"},
        "qwen3.5": {"linear_attn.out_proj"},
        "falcon-h1-plain": {"mamba.out_proj"},
        "nemotron-h": {"mixer.down_proj"},
        **dict.fromkeys(("olmo", "olmo2", "olmo3", "exaone4"), no_norm),
    }


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_representable_factor_leaves_the_norm_in_its_stored_type(tiny: Tiny, family: str) -> None:
    _, model_layout = opened(tiny(family))
    model = whole_model(tiny(family), torch.float64)
    block = blocks_of(model, model_layout)[0]
    shared = block.inputs[0]
    wanted = random_scale(block, shared, 3)
    with InFloat64():
        expected = whole_logits(model)
        factor = nearest_exact_scale(block, shared, wanted)
        torch.testing.assert_close(factor, wanted, rtol=0.05, atol=0)
        assert not torch.equal(factor, wanted)
        norm, *_ = fold_scale(block, shared, factor)
        folded = block.parameter(norm)
        torch.testing.assert_close(block.as_stored(norm, folded), folded, rtol=1e-12, atol=1e-15)
        assert (whole_logits(model) - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_factors_that_would_break_the_model_are_refused(tiny: Tiny) -> None:
    _, model_layout = opened(tiny("llama"))
    block = blocks_of(whole_model(tiny("llama")), model_layout)[0]
    reads_heads = block.inputs[1]
    assert reads_heads.heads
    for scale in (
        torch.rand(64) + 0.5,
        torch.ones(63),
        torch.zeros(64),
        torch.full((64,), torch.inf),
    ):
        with pytest.raises(ValueError, match="factor"):
            fold_scale(block, reads_heads, scale)


def test_observing_and_advancing_in_one_pass_is_the_same(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("llama"))

    def run(*, together: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        hessians, captured = [], []
        with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
            for part in stream:
                wanted = {shared.key: ALL for shared in part.inputs}
                found = part.observe(wanted, advance=together, keep_rows=2 if together else 0)
                hessians += [found[key].hessian for key in sorted(found)]
                captured += [call.args[0] for call in part.capture_calls("mlp", 2)]
                if not together:
                    part.advance()
            return hessians, captured, torch.cat(list(stream.final_hidden()))

    for apart, together in zip(run(together=False), run(together=True), strict=True):
        assert all(
            torch.equal(first, second) for first, second in zip(apart, together, strict=True)
        )
