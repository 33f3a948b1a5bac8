"""Names of families, formats, methods and grids stand in their own file and their table; where else, is listed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module

import pytest

from quantforge.architectures.families import FILES
from quantforge.formats import FORMATS
from quantforge.grids import GRIDS
from quantforge.quantizers import METHODS
from scripts.structure import LEAVES, folder, modules, parsed

# Where all names of a kind may stand, and what ends in a dot: everything below.
TABLES = {
    "family": ("quantforge.architectures.families",),
    "format": ("quantforge.formats",),
    "method": ("quantforge.quantizers",),
    # Number families read and write grids, and files hold some of them; the words for schemes are names of grids.
    "grid": (
        "quantforge.grids",
        "quantforge.packers.",
        "quantforge.formats.",
        "quantforge.notation",
    ),
}
# Folder (of formats: module): the names that it uses, and why. This list may only become shorter.
EXCEPTIONS: dict[str, tuple[str, str]] = {
    "architectures": ("llama", "llama.cpp's name of mistral and mixtral"),
    "formats.auto_round": ("awq gptq gptq_v2", "its files are theirs, under names of its own"),
    "formats.declared_quantization": ("awq compressed-tensors gptq",
                                      "files that first tools wrote name no method; each spells exceptions in its way"),
    "formats.engine_rules": ("mlx", "an engine"),
    "formats.engine_verdicts": ("kimi_linear llama4 llama4_text", "what loaders do not do for a family"),
    "formats.gguf.source": ("llama mixtral", "one name in llama.cpp, with and without experts"),
    "formats.gguf.tokenizer": ("llama", "llama.cpp's name of a tokenizer"),
    "formats.gguf.tokenizer_differences": ("gpt2 llama", "llama.cpp's names of tokenizers"),
    "formats.gguf.tokenizer_files": ("gpt2 llama", "llama.cpp's names of tokenizers"),
    "formats.gguf.vocabulary": ("gpt2 llama qwen2", "llama.cpp's names of tokenizers and a pre-tokenizer"),
    "engines": ("awq fp8 int4 int8 mlx q4_0 q8_0",
                "the default format and the types of KV cache of each engine; mlx is an engine"),
    "formats.gguf": ("mlx", "an engine"),
    "files": ("int8", "a type of torch"),
    "recipe": ("fp8", "a kind of KV cache"),
    "runtime": ("fp8 fp8_e4m3 int4 int8",
                "kinds of KV cache; numbers that kernels take"),
    "api": ("fp8", "a kind of KV cache"),
    "verification": ("awq bnb compressed-tensors fp8_e4m3 gptq gptq_v2 llama llama4 mlx qwen2 sparsegpt",
                     "keys of a quantization that loaders need, or that the tensors deny; tokenizers of one family;"
                     " what SparseGPT leaves as it was"),
    "formats.sources.adapter": ("magnitude", "the vector of DoRA, as PEFT calls it"),
}  # fmt: skip


def family_files() -> dict[str, str]:
    """The module that declares each family."""
    files = [f"quantforge.architectures.families.{file}" for file in FILES]
    return {name: file for file in files for name in import_module(file).FAMILIES}


def homes() -> dict[str, tuple[str, ...]]:
    """The modules in which each name may stand, by name: some are names of two things."""
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for kind, own in (
        ("family", family_files()),
        ("format", FORMATS),
        ("method", {key: method.module for key, method in METHODS.items()}),
        ("grid", {key: grid.packer for key, grid in GRIDS.items()}),
        ("grid", {grid.short_name: grid.packer for grid in GRIDS.values() if grid.short_name}),
    ):
        for name, module in own.items():
            found[name] += (*TABLES[kind], module)
    found["bitsandbytes"] = (FORMATS["bnb"],)
    return found


def texts(name: str) -> Iterator[str]:
    """The constants of a module that are text."""
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def elsewhere() -> dict[str, set[str]]:
    """Names that stand neither in their own file nor in their table, by folder (of formats: by module)."""
    known, found = homes(), defaultdict(set)
    for module in modules():
        if folder(module) in LEAVES:  # they know plain tensors, texts and files
            continue
        place = folder(module) if folder(module) != "formats" else module.partition(".")[2]
        for text in set(texts(module)) & known.keys():
            at_home = any(
                module.startswith(home) if home.endswith(".") else module == home
                for home in known[text]
            )
            if not at_home:
                found[place].add(text)
    return found


def test_names_stand_in_one_file_and_one_table() -> None:
    assert elsewhere() == {place: set(names.split()) for place, (names, _) in EXCEPTIONS.items()}


def test_a_name_elsewhere_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = elsewhere(), parsed
    planted = ast.parse('TABLE = {"awq": 1}')
    monkeypatch.setitem(
        globals(),
        "parsed",
        lambda name: planted if name == "quantforge.artifacts.card" else real(name),
    )
    assert elsewhere() == before | {"artifacts": {"awq"}}
