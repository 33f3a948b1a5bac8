"""Artifacts of GPTQModel: GPTQ in both checkpoint formats, scattered groups, AWQ; decoded by its own torch kernels."""

import os
from functools import partial

# Its loader asks for two, and gets one on a machine of two cores.
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD, AWQConfig
from record import CALIBRATION, digest, linears, run

SKIPPED = {r"-:.*\.o_proj$": {}}
# Name: options of a QuantizeConfig.
RECIPES = {
    "gptqmodel-v1": {"bits": 4, "group_size": 32, "desc_act": False, "format": FORMAT.GPTQ},
    "gptqmodel-v2-asym": {
        "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "format": FORMAT.GPTQ_V2,
    },
    "gptqmodel-v1-asym": {
        "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "format": FORMAT.GPTQ,
    },
    "gptqmodel-desc-act": {"bits": 4, "group_size": 32, "desc_act": True, "format": FORMAT.GPTQ},
    "gptqmodel-3bit-skipped": {
        "bits": 3, "group_size": 32, "desc_act": False, "dynamic": SKIPPED, "format": FORMAT.GPTQ,
    },
    "gptqmodel-8bit-row": {
        "bits": 8, "group_size": -1, "desc_act": False, "act_group_aware": False, "format": FORMAT.GPTQ,
    },
    "gptqmodel-awq": {
        "bits": 4, "group_size": 32, "sym": False, "method": METHOD.AWQ, "format": FORMAT.GEMM,
    },
}  # fmt: skip


def make(options, sources, out):
    """Quantize, save, load with the torch kernels, multiply the identity."""
    torch.manual_seed(0)
    awq = options.get("method") == METHOD.AWQ
    source = "square" if awq else "narrow"  # its search for clips takes rows by 64
    config = (AWQConfig if awq else QuantizeConfig)(**options, device="cpu", offload_to_disk=False)
    model = GPTQModel.load(str(sources / source), config, backend=BACKEND.AUTO)
    rows = [
        {"input_ids": torch.tensor(row), "attention_mask": torch.ones(len(row))}
        for row in CALIBRATION
    ]
    model.quantize(rows, batch_size=1, backend=BACKEND.AUTO)
    model.save(str(out))
    backend = BACKEND.TORCH_AWQ if awq else BACKEND.TORCH
    loaded = GPTQModel.load(str(out), backend=backend, device="cpu", dtype=torch.float16)
    decoded = {}
    for name, module in linears(loaded.model).items():
        if hasattr(module, "qweight"):
            with torch.inference_mode():
                weight = module(torch.eye(module.in_features, dtype=torch.float16)).T
            decoded[name.removeprefix("model.model.")] = digest(weight.float().contiguous().numpy())
    shown = {key: str(value) for key, value in options.items()}
    return {"source": source, "made": f"quantize, {shown}", "dtype": "float16", "decoded": decoded}


run(
    {name: partial(make, recipe) for name, recipe in RECIPES.items()},
    ("gptqmodel", "transformers", "torch"),
)
