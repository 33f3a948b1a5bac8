"""Fixtures of the acceptance tests: models, and results that are made once in a session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.acceptance import models
from tests.acceptance.support import (
    Artifact,
    Copy,
    Make,
    Model,
    Running,
    Start,
    command,
    split_arguments,
)


@pytest.fixture(autouse=True, scope="session")
def _speeds_are_compared_however_busy_this_machine_is() -> None:
    """Replace the fixture of this name for all tests, which patches modules of the package."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a function from a name to the directory of a model: ``demo``, or one of `models.MODELS`.

    Nobody writes into it.
    """
    torch.set_num_threads(1)

    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp("models") / name
        if name == "demo":
            assert command("demo", directory).code == 0
            return directory
        return models.save(name, directory)

    return make


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Make:
    """Return a function that runs ``VERB MODEL OPTIONS`` once in a session; nobody writes into what it made."""

    @cache
    def once(verb: str, source: str | Path, *words: str) -> Artifact:
        output = tmp_path_factory.mktemp("made") / f"result{_suffix(words)}"
        source_path = model(source) if isinstance(source, str) else source
        ended = command(verb, source_path, words, "-o", output, "--json")
        assert ended.code == 0, ended.err
        return Artifact(output, ended.document)

    def made(verb: str, source: str | Path, *options: object) -> Artifact:
        return once(verb, source, *split_arguments(*options))

    return made


def _suffix(words: tuple[str, ...]) -> str:
    return ".gguf" if {"--type", "gguf"} & {*words} and "plain" not in words else ""


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """Return a function that copies a model or a result to a place where it may be damaged."""

    def copy(path: Path) -> Path:
        target = tmp_path / f"copy-{len([*tmp_path.iterdir()])}"
        if path.is_dir():
            return Path(shutil.copytree(path, target))
        target.mkdir()
        for file in path.parent.glob(f"{path.name}*"):
            shutil.copy(file, target)
        return target / path.name

    return copy


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts a command in a process of its own; what still runs is killed at the end."""
    started: list[Running] = []

    def run(*arguments: object, **options: Any) -> Running:
        started.append(Running(tmp_path_factory.mktemp("process"), *arguments, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def adapter(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LoRA of two kinds of linears of ``llama``, as PEFT saves it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32)
    modules = ["q_proj", "down_proj"]
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    directory = tmp_path_factory.mktemp("adapter") / "lora"
    wrapped.save_pretrained(directory)
    return directory
