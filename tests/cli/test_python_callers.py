"""What a program that calls the verbs has set or hands over: bytes do not follow it, and it stays as it was."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quantforge
from quantforge.api.evaluate import MeasurementOptions
from quantforge.api.generate import AnswerOptions
from quantforge.errors import UsageError
from quantforge.planning.recipe_options import build_recipe
from quantforge.recipe import AdapterOptions
from quantforge.serving.serve_options import ServeOptions
from tests.conftest import Tiny
from tests.thorough import thorough_case


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("nvfp4", torch.bfloat16), ("nf4", torch.float64),
        thorough_case("mxfp4", torch.bfloat16), thorough_case("int4:g32", torch.float64),
    ],
)  # fmt: skip
def test_bytes_do_not_follow_the_callers_defaults(
    tiny: Tiny, tmp_path: Path, scheme: str, kind: torch.dtype
) -> None:
    def made(name: str) -> bytes:
        settings = quantforge.Settings(threads=2)
        options: Any = {"method": "rtn", "calibration": "none", "scheme": scheme}
        quantforge.quantize(tiny("llama"), out=tmp_path / name, settings=settings, **options)
        return (tmp_path / name / "model.safetensors").read_bytes()

    expected, threads = made("plain"), torch.get_num_threads()
    torch.set_default_dtype(kind)
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made("other") == expected
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == kind
        assert torch.get_num_threads() == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


OF_ANOTHER_TYPE: list[dict[str, Any]] = [
    {"seed": 1.5}, {"seed": True}, {"bits": numpy.int64(4)}, {"bits": True}, {"bits": "4"}, {"method": 5},
    {"method": ["rtn"]}, {"scheme": b"int4"}, {"lm_head": True}, {"rules": "a=int8"}, {"rules": [5]},
    {"rules": [("a", "int8")]}, {"ignore": "lm_head"}, {"ignore": [None]}, {"calibration": Path("x")},
    {"engine": 5}, {"samples": "4"}, {"chat_template": "yes"}, {"tensor_parallel": 2.0}, {"refine": 1.5},
    {"max_shard_bytes": True}, {"pre_tokenizer": 5}, {"type": 5},
]  # fmt: skip


def test_values_of_another_type_are_refused(tiny: Tiny) -> None:
    for options in OF_ANOTHER_TYPE:
        (name,) = options
        with pytest.raises(quantforge.QuantForgeError) as refused:
            quantforge.plan(tiny("llama"), **options)
        assert name.removesuffix("s") in refused.value.message, options
        assert refused.value.code == "usage", options


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: quantforge.Settings(thread=2), "'threads'"),  # type: ignore[call-arg]
        (lambda: quantforge.Recipe(metod="awq"), "'method'"),  # type: ignore[call-arg]
        (lambda: quantforge.plan("x", bits="4"), "give a whole number"),  # type: ignore[arg-type]
        (lambda: quantforge.plan("x", rules="a=int8"), "give a list"),  # type: ignore[arg-type]
        (lambda: quantforge.allocate("x", target=4.5), "4.5bpw"),  # type: ignore[arg-type]
    ],
)
def test_what_a_program_gets_wrong_is_answered(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make()
    assert hint in refused.value.hint


OPTIONS = (
    quantforge.AwqOptions, quantforge.CalibrationOptions, quantforge.GptqOptions, quantforge.Load, quantforge.Policy,
    quantforge.Recipe, quantforge.Rule, quantforge.Serving, quantforge.Settings, AdapterOptions,
)  # fmt: skip


def test_every_class_of_options_refuses_names_numbers_and_types_of_values() -> None:
    kinds: tuple[Any, ...] = OPTIONS
    for kind in kinds:
        known = [*kind.__annotations__]
        needed = dict.fromkeys(known, "a") if kind is quantforge.Rule else {}
        with pytest.raises(UsageError) as refused:
            kind(**{f"{known[0]}s": 1})
        assert refused.value.hint == f"did you mean '{known[0]}'?"
        with pytest.raises(UsageError, match="too many"):
            kind(*range(len(known) + 1))
        for name in known:
            for value in (object(), b"x"):
                with pytest.raises(quantforge.QuantForgeError):
                    use(kind(**needed | {name: value}))


def use(made: Any) -> None:
    """Hand options to a verb; those of recipes and loads were checked when they were made."""
    inside = {quantforge.Policy: "policy", quantforge.Serving: "serving"}.get(type(made))
    settings = quantforge.Settings(**{inside: made}) if inside else made
    if isinstance(settings, quantforge.Settings):
        with pytest.raises(UsageError, match="settings") as refused:
            quantforge.plan("./absent", settings=settings)
        raise refused.value


@pytest.mark.parametrize(
    "make",
    [
        lambda: quantforge.GptqOptions(refine=-3),
        lambda: quantforge.GptqOptions(damping=1.5),
        lambda: quantforge.AwqOptions(search_samples=0),
        lambda: quantforge.CalibrationOptions(samples=0),
        lambda: quantforge.CalibrationOptions(expert_tokens="none"),
        lambda: quantforge.Rule("down_proj"),  # type: ignore[call-arg]
        lambda: quantforge.Policy(allow={"substitution": "2"}),  # type: ignore[dict-item]
        lambda: quantforge.Load(cache="int3"),
    ],
)
def test_values_that_no_option_has_are_refused_where_they_are_said(
    make: Callable[[], object],
) -> None:
    with pytest.raises(quantforge.QuantForgeError) as refused:
        make()
    assert refused.value.hint


def test_settings_that_nobody_could_run_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"threads": 0}, {"threads": "2"}, {"activations": "gpu"}, {"device": "cuda:x"},
    ]  # fmt: skip
    for given in wrong:
        with pytest.raises(quantforge.QuantForgeError, match=next(iter(given))):
            quantforge.Settings(**given)


def test_verify_computes_with_so_many_threads_and_restores_the_number(tiny: Tiny) -> None:
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        quantforge.verify(
            tiny("llama"), threads=1, progress=lambda _: seen.add(torch.get_num_threads())
        )
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for threads in (0, 1 << 20):
        with pytest.raises(UsageError, match="threads"):
            quantforge.verify(tiny("llama"), threads=threads)


def test_verbs_name_a_device_that_is_not_there(tiny: Tiny) -> None:
    model = str(tiny("llama"))
    for device in ("cuda:99", "cuda:x", "gpu"):
        for verb in (quantforge.load, quantforge.verify):
            with pytest.raises(UsageError, match=f"device {device}:"):
                verb(model, device=device)


FUNCTIONS = [name for name in quantforge.__all__ if inspect.isfunction(getattr(quantforge, name))]


def test_an_option_that_there_is_not_is_refused_with_the_nearest() -> None:
    for name in FUNCTIONS:
        verb = getattr(quantforge, name)
        taken = [one.name for one in inspect.signature(verb).parameters.values()]
        last = [one for one in taken if one != "options"][-1]
        with pytest.raises(UsageError, match=f"no option '{last}s'") as refused:
            verb("./absent", **{f"{last}s": 4})
        assert refused.value.hint == f"did you mean '{last}'?", name


OTHERS: dict[str, Any] = {
    "measured": {"windows": 4},
    "over": {"bits": [4]},
    "target": "4bpw",
    "prompt": "a",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_other_types_are_refused_with_what_is_expected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb = getattr(quantforge, name)
    own = [
        one
        for one in inspect.signature(verb).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    for one in own:
        needed = {
            other.name: OTHERS.get(other.name, "absent")
            for other in own
            if other.default is other.empty and other is not one
        }
        for value in (3.5, object(), b"out", {3: 4}, [3]):
            if (one.name, type(value)) in {("over", dict), ("measured", dict)}:
                continue  # a mapping, whose contents are refused by themselves
            with pytest.raises(quantforge.QuantForgeError) as refused:
                verb(**{one.name: value, **needed})
            if not isinstance(value, list | dict):  # what a list holds may be named instead
                assert f"{one.name} = " in refused.value.message, (one.name, value)
                assert refused.value.hint.startswith("give "), (one.name, value)
    assert [*tmp_path.iterdir()] == []


def test_settings_of_other_types_are_refused_by_every_verb_that_takes_them() -> None:
    for given in ({"offline": "yes"}, {"sign": "key.pem"}, {"progress": 3}, {"policy": {}}):
        settings = quantforge.Settings(**given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"settings.{next(iter(given))} = "):
            quantforge.plan("./absent", settings=settings)


def test_options_of_other_types_are_refused_before_a_model_is_looked_for() -> None:
    for name, kind in (
        ("evaluate", MeasurementOptions),
        ("serve", ServeOptions),
        ("generate", AnswerOptions),
    ):
        for option in kind.__annotations__:
            for value in (object(), b"x"):
                given: dict[str, Any] = {"prompt": "a"} if name == "generate" else {}
                given |= (
                    {"generated": "builtin"}
                    if option in {"generated_tokens", "chat_template"}
                    else {}
                )
                with pytest.raises(UsageError, match=option):
                    getattr(quantforge, name)("./absent", **given, **{option: value})


def test_a_plan_is_shown_in_a_line(tiny: Tiny) -> None:
    made = quantforge.plan(tiny("llama"), method="rtn", bits=4, calibration="none")
    shown = repr(made)
    assert len(shown) < 400
    for text in (
        made.model,
        "method='rtn'",
        f"output_bytes={made.output_bytes}",
        f"of {len(made.tensors)} tensors",
    ):
        assert text in shown


def test_options_of_an_evaluation_are_refused_before_a_sweep_makes_anything(
    tiny: Tiny, tmp_path: Path
) -> None:
    model, out = str(tiny("llama")), tmp_path / "sweep"
    with pytest.raises(UsageError, match="no option 'window'") as refused:
        quantforge.evaluate(model, ["x"], window=4)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="windows = '4'"):
        quantforge.evaluate(model, ["x"], windows="4")  # type: ignore[arg-type]
    assert "'windows'" in refused.value.hint
    with pytest.raises(UsageError, match="no option 'window'"):
        quantforge.sweep(model, {"bits": [3]}, out, measured={"window": 4})  # type: ignore[typeddict-unknown-key]
    for over in ({"bits": 3}, {"method": "rtn"}, 3, ["bits"]):
        with pytest.raises(UsageError, match="over"):
            quantforge.sweep(model, over, out)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="measured"):
        quantforge.sweep(model, {"bits": [3]}, out, measured=["windows"])  # type: ignore[arg-type]
    assert not out.exists()


def test_one_name_is_a_list_of_one(tiny: Tiny) -> None:
    model = str(tiny("llama"))
    found = quantforge.evaluate(model, model, windows=1, length=8, speed=False)
    assert [row["path"] for row in found.rows] == [model, model]
    assert found.rows[1]["kl_mean"] == 0
    with pytest.raises(UsageError, match="models = 5"):
        quantforge.evaluate(model, 5)  # type: ignore[arg-type]


def test_choices_override_a_recipe_in_both_directions() -> None:
    recipe = quantforge.Recipe(calibration=quantforge.CalibrationOptions(chat_template=True))
    assert build_recipe(recipe).calibration.chat_template
    assert not build_recipe(recipe, chat_template=False).calibration.chat_template
    rule = quantforge.Rule("down_proj", "int8:g128:sym")
    assert build_recipe(None, rules=[rule, "up_proj=keep"]).rules[0] == rule
