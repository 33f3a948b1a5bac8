"""Make one artifact per layout with the log-probabilities that our own decoding gives, and tabulate the engines.

python scripts/interop_artifacts.py make MODEL DIRECTORY
python scripts/interop_artifacts.py table DIRECTORY TABLE.md
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from interop_sections import renew

# name -> (scheme, format, extra options); `source` is the model itself, the noise floor of an engine.
ARTIFACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ct-int4-g128": ("int4:g128:sym", "compressed-tensors", ()),
    "ct-int4-g128-asym": ("int4:g128:asym", "compressed-tensors", ()),
    "ct-int4-row": ("int4:row:sym", "compressed-tensors", ()),
    "ct-int3-g128": ("int3:g128:sym", "compressed-tensors", ()),
    "ct-int2-g64": ("int2:g64:sym", "compressed-tensors", ()),
    "ct-int8-g128": ("int8:g128:sym", "compressed-tensors", ()),
    "ct-mixed-4-8": ("int4:g128:sym", "compressed-tensors", ("--rule", "down_proj=int8:g128:sym")),
    "ct-head-int8": ("int4:g128:sym", "compressed-tensors", ("--lm-head", "int8:g128:sym")),
    "gptq-int4-g128": ("int4:g128:sym", "gptq", ()),
    "gptq-int4-g32": ("int4:g32:sym", "gptq", ()),
    "gptq-int4-skipped": ("int4:g128:sym", "gptq", ("--ignore", "layers.0.mlp.down_proj")),
    "gptq-int4-asym": ("int4:g128:asym", "gptq", ()),
    "gptq-int8-g128": ("int8:g128:sym", "gptq", ()),
    "gptq-int3-g128": ("int3:g128:sym", "gptq", ()),
    "gptq-v2-int4-asym": ("int4:g128:asym", "gptq_v2", ()),
    "awq-int4-g128": ("int4:g128:asym", "awq", ()),
    "awq-int4-sym": ("int4:g64:sym", "awq", ()),
    "awq-int4-skipped": ("int4:g128:asym", "awq", ("--ignore", "layers.0.mlp.down_proj")),
    "ct-w8a8": ("W8A8", "compressed-tensors", ()),
    "ct-w8a8-static": ("W8A8_STATIC", "compressed-tensors", ()),
    "ct-fp8": ("fp8:row:sym", "compressed-tensors", ()),
    "ct-fp8-dynamic": ("FP8_DYNAMIC", "compressed-tensors", ()),
    "ct-fp8-static": ("FP8_STATIC", "compressed-tensors", ()),
    "ct-fp8-block": ("FP8_BLOCK", "compressed-tensors", ()),
    "ct-nvfp4": ("NVFP4", "compressed-tensors", ()),
    "ct-nvfp4-w4a4": ("NVFP4_W4A4", "compressed-tensors", ()),
    "ct-mxfp4": ("MXFP4", "compressed-tensors", ()),
    "ct-mxfp8": ("mxfp8", "compressed-tensors", ()),
    "fp8-block": ("FP8_BLOCK", "fp8", ()),
    "bnb-nf4": ("nf4:g64", "bnb", ()),
    "bnb-nf4-double": ("nf4:g64:sym:double", "bnb", ()),
    "bnb-fp4": ("fp4:g64", "bnb", ()),
    "bnb-int8": ("int8:row:sym", "bnb", ()),
    "mlx-int4-g64": ("int4:g64:min", "mlx", ()),
    "mlx-int3-g32-sym": ("int3:g32:sym", "mlx", ()),
    "mlx-mxfp4": ("mxfp4", "mlx", ()),
    "mlx-mxfp8": ("mxfp8", "mlx", ()),
}
PROMPT = 48  # tokens whose next-token log-probabilities are compared


def make(model: Path, directory: Path) -> None:
    """Quantize into every layout and save what our decoding says of one fixed prompt."""
    linked(model, directory / "source")
    for name, entry in ARTIFACTS.items():
        write(model, entry, directory / name)
    for name in ("source", *ARTIFACTS):
        expect(directory / name)


def linked(model: Path, place: Path) -> None:
    """Put a link to a model among its artifacts."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(model.resolve())


def write(model: Path, entry: tuple[str, str, tuple[str, ...]], out: Path) -> None:
    """Quantize a model by one entry of `ARTIFACTS`."""
    from quantforge.api import quantize
    from quantforge.planning.recipe_options import build_recipe
    from quantforge.settings import Settings

    scheme, form, extra = entry
    pairs = dict(zip(extra[::2], extra[1::2], strict=True))
    recipe = build_recipe(
        None, method="rtn", scales="absmax", scheme=scheme, format=form,
        lm_head=pairs.get("--lm-head"), ignore=[v for k, v in pairs.items() if k == "--ignore"],
        rules=[v for k, v in pairs.items() if k == "--rule"],
    )  # fmt: skip
    quantize(str(model), recipe, out, Settings(overwrite=True))


def expect(artifact: Path) -> None:
    """Save beside an artifact what our decoding says of one fixed prompt."""
    import numpy as np
    import torch

    from quantforge.runtime.load import load

    ids = torch.arange(PROMPT)[None] * 37 % 1000 + 5
    loaded = load(artifact)
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    values = {"ids": ids[0].numpy(), "logprobs": chosen.numpy(), "logits": logits.numpy()}
    if artifact.name.startswith("mlx-"):
        values["digests"] = np.array(json.dumps(_digests(artifact)))
    np.savez(artifact.with_name(f"{artifact.name}.npz"), **values)


def _digests(artifact: Path) -> dict[str, str]:
    """SHA-256 of each decoded weight ``[out, in]`` in float32 by module, signs of zeros dropped."""
    from quantforge.formats.decoded import decode_checkpoint
    from quantforge.formats.open_model import open_model

    checkpoint = decode_checkpoint(open_model(artifact))
    return {
        name.removesuffix(".weight"): sha256(
            (checkpoint.read(name) + 0.0).numpy().tobytes()
        ).hexdigest()
        for name in checkpoint.layouts
    }


def table(work: Path, out: Path) -> None:
    """Write the results of all engines that were run as one Markdown table.

    An engine may print to stdout; its results are the last line.
    """
    engines = {
        path.stem: json.loads(path.read_text().splitlines()[-1])
        for path in sorted(work.glob("*.json"))
    }
    lines = [
        "# What was seen to load",
        "",
        f"Made by `scripts/interop` with quantforge {version('quantforge')} on a CPU without a GPU.",
        "",
        "## What we write, in the engines",
        "",
        *NOTES,
        "",
        "| artifact | " + " | ".join(engines) + " |",
        "|---|" + "---|" * len(engines),
    ]
    for name in ("source", *ARTIFACTS):
        cells = [_cell(engine["artifacts"].get(name)) for engine in engines.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        *(f"- {name}: {versions_of(engine['versions'])}" for name, engine in engines.items()),
    ]
    lines += _peers(json.loads((work / "peers.found").read_text()))
    renew(out, "\n".join(lines))
    sys.stdout.write("\n".join(lines) + "\n")


NOTES = (
    "The bundled model in every layout. Cells: largest difference to our own decoding, and in brackets the mean. For"
    " transformers, gptqmodel and mlx: of logits, and the mean KL divergence from ours in nats per token; for vLLM: of"
    " the log-probabilities of 47 prompt tokens, computed in bfloat16. `source` is the unquantized model: the engine's"
    " own noise. MLX decodes every weight to our float32 numbers bit for bit (checked before its logits).",
    "",
    "transformers computes in float32 where it can; asymmetric, nvfp4, mxfp4, mxfp8, `fp8` and bitsandbytes artifacts"
    " in bfloat16. Where inputs are quantized, the engine's own rounding moves single inputs to a neighbouring level,"
    " which is what is seen of nvfp4-w4a4 (weights equal; of the inputs of its first layer 0.2 % take another level);"
    " the range of an int8 token is its largest value over 127 here, over 127.5 in compressed-tensors; `fp8` is decoded"
    " without rounding of inputs by transformers on a CPU. In bfloat16, vLLM's type here, our own log-probabilities are"
    " as far from those in float32 as vLLM's where inputs are quantized (means: ct-w8a8 0.047, ct-w8a8-static 0.099,"
    " ct-fp8-dynamic 0.096, ct-fp8-block 0.068, bnb-int8 0.031, source 0.019; by hand)."
    " gptqmodel's torch kernels compute AWQ in float16. vLLM reads"
    " bitsandbytes through vllm-bnb-plugin 0.0.3. Its plugin for GGUF (vllm-gguf-plugin 0.0.5, tried by hand) reads our"
    " file and stops at its kernels, which need CUDA. What vLLM refuses here it refuses by design (GPTQ that is not"
    " symmetric 4 or 8 bits, MLX) or for want of a CPU kernel. SGLang and TensorRT-LLM were not run.",
)


def _peers(found: dict[str, dict[str, Any]]) -> list[str]:
    """The section about what other tools write."""
    lines = [
        "",
        "## What other tools write, read here",
        "",
        "Tiny models (`tests/peers.py`) quantized by each tool. Weights: compared bit for bit with what the tool itself"
        " decodes, in the type that it decodes to. Verify: without and with the source model, no manifest. The same"
        " checks, an evaluation and exports run in the tests on the artifacts in `tests/fixtures/peers`.",
        "",
        "| artifact | made by | weights | verify |",
        "|---|---|---|---|",
    ]
    for name, row in found.items():
        verdict = "; ".join(row["findings"]) or "healthy"
        made = str(row["made"]).replace("|", "/")
        lines.append(f"| {name} | {made[:110]} | {row['weights']} | {verdict[:160]} |")
    versions = {json.dumps(row["versions"]): row["versions"] for row in found.values()}
    return [*lines, "", *(f"- {versions_of(each)}" for each in versions.values())]


def versions_of(found: dict[str, str]) -> str:
    """Return the versions of an engine as one line."""
    return ", ".join(f"{name} {number}" for name, number in found.items() if number != "absent")


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return f"refused: {str(result['error'])[:130]}"
    mean = f" ({result['mean']:.1e})" if "mean" in result else ""
    return f"{result['difference']:.1e}{mean}"


if __name__ == "__main__":
    {"make": make, "table": table}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
