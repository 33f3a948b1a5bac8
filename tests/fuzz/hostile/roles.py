"""List the files that somebody else may have made, and the commands that read each of them.

A *role* is a kind of such a file. Its commands have ``{out}`` for a place to write to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CALIBRATED = ("--method", "gptq", "--samples", "4", "--length", "16", "--refine", "0")
SCORED = ("--no-speed", "--windows", "1", "--length", "16", "--text", "text.txt")
KEY, PUBLIC = "key.pem", "public.pem"


@dataclass(frozen=True, slots=True)
class Role:
    """A file of the tree and the commands that read it."""

    path: str
    commands: tuple[tuple[str, ...], ...]


def _commands(*texts: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(text.split()) for text in texts)


_MODEL = _commands(
    "plan model --bits 4",
    "inspect model",
    "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o {out}",
    f"quantize model --bits 4 --rule re:.*=int4:g32 --calibration text.txt {' '.join(CALIBRATED)} -o {{out}}",
    "export model --format gguf --type Q8_0 -o {out}.gguf",
    f"eval model {' '.join(SCORED)}",
    "diff model ct",
    "verify ct --source model --no-forward",
)
_ARTIFACT = _commands(
    "inspect ct",
    "verify ct --no-forward",
    "verify ct --source model",
    "diff ct ct-same",
    "reproduce ct --source model",
    "export ct --format gguf -o {out}.gguf",
    "export ct --format gptq --allow-inexact -o {out}",
    f"eval model ct {' '.join(SCORED)}",
    "plan ct --bits 4",
)
_GGUF = _commands(
    "inspect m.gguf",
    "verify m.gguf --no-forward",
    "verify m.gguf --source model",
    "diff m.gguf model",
    "export m.gguf --format mlx --allow-inexact -o {out}",
    "export m.gguf --format plain -o {out}",
    f"eval model m.gguf {' '.join(SCORED)}",
    "quantize m.gguf --bits 4 --scales absmax -o {out}",
)
_TEXT = (
    "quantize model --rule re:.*=int4:g32 {options} --calibration {file} -o {{out}}",
    "eval model --no-speed --windows 1 --length 16 --text {file}",
)
_SOURCE = (
    "plan {model} --bits 4",
    "inspect {model}",
    "quantize {model} --bits 4 --scales absmax --rule re:.*=int4:g32 -o {{out}}",
    "quantize {model} --format plain -o {{out}}",
    "export {model} --format gguf --type Q8_0 -o {{out}}.gguf",
    "generate {model} hello --max-tokens 3",
)
_EXPERTS = (
    *_SOURCE,
    f"quantize {{model}} --rule re:.*=int4:g32 --calibration text.txt {' '.join(CALIBRATED)} -o {{{{out}}}}",
    "quantize {model} --format plain --prune-experts 25% --calibration text.txt --samples 4 --length 16 -o {{out}}",
)
_MERGED = _commands(
    "plan model --adapter lora --bits 4",
    "quantize model --adapter lora --format plain -o {out}",
    "quantize model --adapter lora --bits 4 --scales absmax --rule re:.*=int4:g32 -o {out}",
    f"eval model ct --adapter lora {' '.join(SCORED)}",
    "verify ct --source model --no-forward",
)
_ASKED = f"eval model ct {' '.join(SCORED)} --generated-tokens 4 --generated"
_GENERATED = _commands(
    "generate model hello --max-tokens 4",
    "generate model hello --compare ct --max-tokens 4 --system quiet",
    "generate m.gguf hello --max-tokens 4",
    f"{_ASKED} prompts.txt --chat-template",
    "quantize model --bits 4 --rule re:.*=int4:g32 --calibration text.jsonl:messages --chat-template"
    f" {' '.join(CALIBRATED)} -o {{out}}",
)


def _of(model: str, *texts: str) -> tuple[tuple[str, ...], ...]:
    return _commands(*(text.format(model=model) for text in texts))


def _text(file: str) -> tuple[tuple[str, ...], ...]:
    return _commands(*(text.format(options=" ".join(CALIBRATED), file=file) for text in _TEXT))


ROLES: Mapping[str, Role] = {
    **{
        f"model {name}": Role(f"model/{name}", _MODEL)
        for name in (
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "chat_template.jinja", "LICENSE", "README.md", "special_tokens_map.json",
        )
    },
    "index": Role("sharded/model.safetensors.index.json", _commands(
        "plan sharded --bits 4", "inspect sharded", "quantize sharded --bits 4 --scales absmax -o {out}",
        "export sharded --format gguf --type Q8_0 -o {out}.gguf", "diff sharded model")),
    **{
        f"artifact {name}": Role(f"ct/{name}", _ARTIFACT)
        for name in ("config.json", "quantforge.manifest.json", "model.safetensors", "README.md", "tokenizer.json")
    },
    "gguf": Role("m.gguf", _GGUF),
    "gguf manifest": Role("m.gguf.quantforge.json", _GGUF),
    "imatrix": Role("imatrix.gguf", _commands(
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.gguf -o {out}.gguf",
        "plan model --format gguf --type Q4_K_M")),
    "recipe": Role("recipe.toml", _commands(
        "plan model --recipe recipe.toml", "quantize model --recipe recipe.toml --calibration text.txt -o {out}")),
    "text": Role("text.txt", _text("text.txt")),
    "jsonl": Role("text.jsonl", (*_text("text.jsonl"), *_text("text.jsonl:other"))),
    "parquet": Role("text.parquet", (*_text("text.parquet"), *_text("text.parquet:other"))),
    **{f"low precision {model} {name}": Role(f"{model}/{name}", _of(model, *_SOURCE))
       for model in ("fp8", "nvfp4") for name in ("config.json", "model.safetensors")},
    **{f"experts {model} {name}": Role(f"{model}/{name}", _of(model, *_EXPERTS))
       for model, name in (("mxfp4", "config.json"), ("mxfp4", "model.safetensors"), ("moe", "config.json"),
                           ("moe", "model.safetensors"))},
    **{f"undeclared {name}": Role(f"undeclared/{name}", _of("undeclared", *_SOURCE, "inspect {model} --derive"))
       for name in ("config.json", "model.safetensors")},
    **{f"adapter {name}": Role(f"lora/{name}", _MERGED)
       for name in ("adapter_config.json", "adapter_model.safetensors")},
    **{f"spoken {name}": Role(f"model/{name}", _GENERATED)
       for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "generation_config.json")},
    "prompts": Role("prompts.txt", _commands(f"{_ASKED} prompts.txt", f"{_ASKED} prompts.txt --chat-template")),
    "prompts in records": Role("prompts.jsonl", _commands(f"{_ASKED} prompts.jsonl", f"{_ASKED} prompts.jsonl:text")),
    "signature": Role("signed/model.sig", _commands(
        f"verify signed --key {PUBLIC} --no-forward", "verify signed --no-forward", "inspect signed")),
    "public key": Role(PUBLIC, _commands(f"verify signed --key {PUBLIC} --no-forward")),
    "older imatrix": Role("imatrix.dat", _commands(
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.dat -o {out}.gguf")),
    "folder of texts": Role("texts/a.txt", (*_text("texts"), *_text("texts:a"))),
    "key": Role(KEY, _commands(
        f"quantize model --bits 4 --scales absmax --sign {KEY} -o {{out}}", f"verify ct --key {KEY} --no-forward")),
    "interrupted run": Role(".*resumed*", _commands(  # a pattern: all that such a run leaves
        "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o resumed",
        "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o resumed --overwrite",
        "quantize model --bits 8 --scales absmax -o resumed")),
}  # fmt: skip
