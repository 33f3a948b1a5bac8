"""Packed experts compute what decoded ones do, with less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantforge.api import quantize
from quantforge.architectures import Stack
from quantforge.errors import RefusedError
from quantforge.notation import parse_layer
from quantforge.recipe import Recipe, Rule
from quantforge.runtime import packed_experts as packed_experts_of
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import load
from quantforge.runtime.model_sizes import bytes_per_token, held_bytes
from quantforge.runtime.packed_experts import (
    PackedExperts,
    PackedStack,
    SeparateStack,
    create_stack,
    packed_experts,
)
from quantforge.settings import Settings
from quantforge_kernels.grouped import ExpertRouting
from tests.quantized import dequantize_reference, random_tensor
from tests.thorough import parametrize_each_value

IDS = torch.arange(3, 43).view(2, 20) % 300
MOST = 1e-5  # logits are about 1, and float32 sums may be made in another order
MIXTURES = ("mixtral", "qwen3-moe")
FORMS = {
    "compressed-tensors": ("int4:g32:sym", "int8:g32:asym", "fp8:row:sym"),
    "gptq": ("int3:g32:sym",),
}


@pytest.fixture(scope="module")
def quantized(tiny, tmp_path_factory):
    """Return a function from family, format, scheme and rules to the directory of a rounded model."""

    @cache
    def make(family: str, format_key: str, scheme: str, rules: tuple[Rule, ...] = ()) -> Path:
        out = tmp_path_factory.mktemp("quantized") / family
        recipe = Recipe(scheme=scheme, format=format_key, scales="absmax", rules=rules)
        quantize(str(tiny(family)), recipe, out, Settings())
        return out

    return make


def logits(path: Path, packed: bool, dtype: torch.dtype = torch.float32):
    with pytest.MonkeyPatch.context() as patch:
        if not packed:
            patch.setattr(packed_experts_of, "_try_packed", lambda *_: None)
        loaded = load(path, dtype=dtype)
    with torch.inference_mode():
        return loaded, loaded.model(IDS).logits.float()


@parametrize_each_value(
    ("family", [*MIXTURES, "llama4"]),
    ("format_key, scheme", [(f, s) for f, all_ in FORMS.items() for s in all_]),
)
def test_packed_experts_equal_decoded_experts(quantized, family, format_key, scheme):
    path = quantized(family, format_key, scheme)
    packed, ours = logits(path, True)
    decoded, expected = logits(path, False)
    assert (ours - expected).abs().max() <= MOST
    assert any(isinstance(module, PackedStack) for module in packed.model.modules())
    assert not any(isinstance(module, PackedExperts) for module in decoded.model.modules())
    assert packed.events == ()
    assert held_bytes(packed.model) < 0.75 * held_bytes(decoded.model)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_mixed_schemes_are_separate(quantized, family):
    rules = (Rule("*layers.0*experts.2.*", "int8:g32:sym"), Rule("*layers.2*experts.1.*", "keep"))
    path = quantized(family, "compressed-tensors", "int4:g32:sym", rules)
    loaded, ours = logits(path, True)
    assert (ours - logits(path, False)[1]).abs().max() <= MOST
    kinds = [type(m) for m in loaded.model.modules() if isinstance(m, PackedStack | SeparateStack)]
    assert kinds.count(SeparateStack) == 4
    assert kinds.count(PackedStack) == (2 if family == "mixtral" else 0)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("int8:row:sym+int8:token:dynamic", PackedStack),
        ("int4:g32:sym+int8:g32:dynamic", SeparateStack),
    ],
)
def test_expert_inputs_are_rounded_as_the_scheme_says(layer, kind):
    """As those of single linear layers; what no product rounds on the way is rounded before it."""
    scheme = parse_layer(layer)
    weights = [random_tensor(f"{scheme.weight}:f32", (24, 64), seed) for seed in range(3)]
    weights = [replace(weight, input=scheme.input) for weight in weights]
    stack = create_stack(lambda expert: [weights[expert]], 3, torch.float32, torch.device("cpu"))
    assert isinstance(stack, kind)
    x = torch.randn(9, 64)
    index = torch.arange(18).view(9, 2) % 3
    result = stack(x, ExpertRouting(index, 3)).view(9, 2, 24)
    singles = [PackedLinear(weight, None, torch.float32, torch.device("cpu")) for weight in weights]
    for row in range(9):
        for position in range(2):
            expected = singles[index[row, position]](x[row : row + 1])[0]
            assert (result[row, position] - expected).abs().max() < 1e-5
    plain = create_stack(
        lambda expert: [replace(weights[expert], input=None)], 3, torch.float32, torch.device("cpu")
    )
    assert (plain(x, ExpertRouting(index, 3)).view(9, 2, 24) - result).abs().max() > 1e-3


def test_decoding_experts_with_rounded_inputs_is_refused(quantized):
    path = quantized("mixtral", "compressed-tensors", "W8A8")
    with pytest.raises(RefusedError, match="its inputs are rounded"):
        logits(path, False)
    assert logits(path, True)[1].isfinite().all()


def test_bytes_per_token_count_only_routed_experts(quantized):
    """4 experts, of which a token is sent to 2; the embedding is looked up."""
    model = load(quantized("mixtral", "compressed-tensors", "int4:g32:sym")).model
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    total_bytes = sum(held_bytes(module) for module in experts)
    rest = held_bytes(model) - total_bytes - model.get_input_embeddings().weight.nbytes
    assert len(experts) == 3
    assert bytes_per_token(model) == rest + total_bytes // 2


def test_bytes_per_token_of_a_plain_mixture(tiny):
    model = load(tiny("mixtral")).model
    total_bytes = sum(v.nbytes for name, v in model.named_parameters() if ".experts." in name)
    rest = held_bytes(model) - total_bytes - model.get_input_embeddings().weight.nbytes
    assert bytes_per_token(model) == rest + total_bytes // 2


# Modules of transformers by what they do beside the products, and how their stacks lie.
KINDS = {
    "gpt_oss.GptOssExperts": {"transposed": True, "interleaved": True},
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": {"transposed": True},
    "aria.AriaExperts": {"transposed": True},
    "deepseek_v4.DeepseekV4Experts": {},
    "granitemoe.GraniteMoeExperts": {},
    "lfm2_moe.Lfm2MoeExperts": {},
    "muse_spark.MuseSparkExperts": {},
    "nemotron_h.NemotronHExperts": {},
}
COUNT, HIDDEN, INNER = 5, 64, 32
VALUES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), COUNT),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER),
    "hidden_act": "gelu", "mlp_hidden_act": "relu2", "swiglu_alpha": 1.7, "swiglu_limit": 0.6,
    "post_norm_eps": 1e-5, "moe_latent_size": None, "_experts_implementation": "eager",
}  # fmt: skip


def experts_module(kind: str):
    file, _, name = kind.partition(".")
    module = import_module(f"transformers.models.{file}.modeling_{file}")
    made = getattr(module, name)(SimpleNamespace(**VALUES))
    for value in made.parameters():
        value.data.copy_(torch.randn(value.shape))
    return made.requires_grad_(False)


@parametrize_each_value(
    ("kind", KINDS),
    ("dtype", [torch.float32, torch.bfloat16]),
)
def test_every_transformers_expert_module_is_packed(kind, dtype):
    """Clamps, biases, norms and both orders of rows are the module's own."""
    torch.manual_seed(0)
    module = experts_module(kind)
    leaf = "gate_up_proj" if module.has_gate else "up_proj"
    opening = ("gate.{}", "up.{}") if module.has_gate else ("up.{}",)
    transposed = KINDS[kind].get("transposed", False)
    stacks = [
        Stack(f"mlp.experts.{leaf}", opening, transposed, KINDS[kind].get("interleaved", False)),
        Stack("mlp.experts.down_proj", ("down.{}",), transposed),
    ]
    weights = {}
    for stack in stacks:
        value = getattr(module, stack.parameter.rpartition(".")[2])
        for position, linear in enumerate(stack.linears):
            for expert in range(COUNT):
                view = stack.matrix(value, position, expert)
                quantized_tensor = random_tensor(
                    "int4:g32:sym:bf16", tuple(view.shape), seed=len(weights)
                )
                weights[linear, expert] = quantized_tensor
                view.copy_(dequantize_reference(quantized_tensor))
    x = torch.randn(7, HIDDEN)
    index = torch.stack([torch.randperm(COUNT)[:2] for _ in x])
    scores = torch.rand(7, 2)
    expected = module(x, index, scores).float()
    packed = packed_experts(
        module.to(dtype), stacks, lambda *at: weights[at], dtype, torch.device("cpu")
    )
    assert packed is not None
    result = packed(x.to(dtype), index, scores.to(dtype)).float()
    most = 1e-5 if dtype == torch.float32 else 0.02
    assert (result - expected).norm() <= most * expected.norm()
    assert sum(value.numel() for value in packed.parameters()) < 2 * COUNT * (HIDDEN + INNER)


def test_unsupported_expert_module_is_left_unpacked():
    module = experts_module("granitemoe.GraniteMoeExperts")
    stacks = [Stack("gate_up_proj", ("gate.{}", "up.{}")), Stack("down_proj", ("down.{}",))]
    arguments = (
        stacks,
        lambda *_at: pytest.fail("nothing is read"),
        torch.float32,
        torch.device("cpu"),
    )
    module.scale = torch.nn.Parameter(torch.ones(3))
    assert packed_experts(module, *arguments) is None
    del module.scale, module.has_gate
    assert packed_experts(module, *arguments) is None


class Spread(torch.nn.Module):
    """Experts that take one tensor, as llama4's do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 3, torch.nn.GELU()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 8, 12))
        self.down_proj = torch.nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.view(len(self.gate_up_proj), -1, 8)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, -1)
        return torch.bmm(self.between(gate, up), self.down_proj).view(-1, 8)

    def between(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act_fn(gate) * up


@pytest.mark.parametrize("other", [None, lambda gate, up: gate.clamp(max=1) * up])
def test_dense_expert_modules_are_packed_if_gated(other):
    """Tokens may be sent to several experts here, and to none."""
    module = Spread().requires_grad_(False)
    if other:
        module.between = other
    stacks = {
        "gate_up_proj": Stack("e.gate_up_proj", ("e.{}.gate", "e.{}.up"), transposed=True),
        "down_proj": Stack("e.down_proj", ("e.{}.down",), transposed=True),
    }
    sent = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]])[:, :, None]
    spread = (torch.randn(1, 4, 8) * sent).flatten(0, 1)
    expected = module(spread)
    places = {name: (s, p) for s in stacks.values() for p, name in enumerate(s.linears)}
    parameters = dict(module.named_parameters())

    def weight(linear: str, expert: int) -> torch.Tensor:
        stack, position = places[linear]
        return stack.matrix(parameters[stack.parameter.removeprefix("e.")], position, expert)

    packed = packed_experts(module, [*stacks.values()], weight, torch.float32, torch.device("cpu"))
    assert (packed is None) == bool(other)
    if packed is not None:
        assert (packed(spread) - expected).abs().max() <= MOST
    assert torch.equal(module(spread), expected)  # what was tried is gone


def test_unsupported_experts_are_decoded_with_an_event(quantized, monkeypatch):
    path = quantized("mixtral", "compressed-tensors", "int4:g32:sym")
    expected = logits(path, True)[1]
    monkeypatch.setattr(packed_experts_of, "is_supported", lambda _module: False)
    loaded, result = logits(path, True)
    assert (result - expected).abs().max() <= MOST
    (event,) = loaded.events
    assert event.kind == "kernel-fallback"
    assert event.detail.startswith("72% of all weights are experts")
