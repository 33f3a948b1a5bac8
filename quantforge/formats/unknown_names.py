"""Words that other tools have for formats, engines and types, with what they mean here.

A key holds words in small letters without signs, as `quantforge.errors.nearest` looks them up. The words are those of
auto-round, llm-compressor, GPTQModel, llama.cpp's tools, mlx-lm, bitsandbytes and of files on the hub (2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping

_NOT_WRITTEN = "it is not written here; `quantforge formats` lists what is"
_SCHEME = "widths are an option of their own: --bits 4, or --scheme W4A16"
_RAISED = " (with --embedding q8_0, and --head q8_0 where the model has a head of its own, as such files have)"
FORMAT_WORDS: Mapping[str, str] = {
    "ggml ggmf ggjt ggufv2 ggufv3 llamacpp ollama lmstudio kquant kquants q4km q4ks q5km q6k q80": "--format gguf",
    "ggufq4km ggufq4ks ggufq40 ggufq5km ggufq6k ggufq80 ggufq2ks":
        "the type is an option of its own: --type Q4_K_M",
    "autogptq gptqmodel gptqmarlin marlin exllama exllamav2 gptqv1": "--format gptq",
    "autoawq awqmarlin gemm gemv llmawq": "--format awq",
    "bitsandbytes nf4 bnbnf4 bnb4bit bnb8bit qlora llmint8": "--format bnb",
    "llmcompressor ct compressed vllm sparseml packquantized packed intquantized nmvllm": "--format compressed-tensors",
    "mlxlm apple mlxcommunity": "--format mlx",
    "finegrainedfp8 deepseek fp8block blockfp8": "--format fp8",
    "fp8dynamic fp8static w8a8fp8": "--scheme FP8_DYNAMIC",
    "safetensors hf huggingface transformers dequantize dequantized fp16 bf16 float16 bfloat16 none fake":
        "--format plain holds a model that is not quantized; all formats but gguf are safetensors files",
    "autoround": "its files are those of GPTQ: --format gptq",
    "exl2 exl3 hqq aqlm quip quipsharp onnx openvino torchao quanto eetq tensorrt trt coreml executorch tflite":
        _NOT_WRITTEN,
    "int2 int3 int4 int8 w4a16 w8a16 w8a8 4bit 8bit": _SCHEME,
    "nvfp4 nvfp4a16": "--scheme nvfp4",
    "mxfp4 mxfp8": "it is a scheme, not a format: --scheme mxfp8",
}  # fmt: skip
ENGINE_WORDS: Mapping[str, str] = {
    "hf huggingface pytorch torch accelerate optimum": "--for transformers",
    "trt trtllm tensorrt nim triton tritoninferenceserver": "--for tensorrt-llm",
    "mlxlm apple": "--for mlx",
    "lmstudio koboldcpp kobold gpt4all jan oobabooga ggml gguf llamafile llamaserver": "--for llama.cpp",
    "tgi textgenerationinference hftgi": "it is archived, and reads --format gptq",
    "aphrodite vllmomni": "--for vllm",
    "turbomind": "--for lmdeploy",
    "exllama exllamav2 exllamav3 tabbyapi onnxruntime openvino":
        "it is not known here; `quantforge formats` lists what each format is loaded by",
}  # fmt: skip
TYPE_WORDS: Mapping[str, str] = {
    "q4kl q4kxl udq4kxl": f"--type Q4_K_M{_RAISED}",
    "q3kxl udq3kxl": f"--type Q3_K_L{_RAISED}",
    "q2kl q2kxl udq2kxl": f"--type Q2_K{_RAISED}",
    "q5kl q5kxl udq5kxl": f"--type Q5_K_M{_RAISED}",
    "q6kl q6kxl udq6kxl": f"--type Q6_K{_RAISED}",
    "q8kxl udq8kxl q8k": "--type Q8_0",
    "q4 q4k q4kmedium 4bit int4": "--type Q4_K_M, the type of --bits 4",
    "q3 q3k 3bit int3": "--type Q3_K_M, the type of --bits 3",
    "q5 q5k 5bit int5": "--type Q5_K_M, the type of --bits 5",
    "q2 2bit int2": "--type Q2_K, the type of --bits 2",
    "6bit int6": "--type Q6_K, the type of --bits 6",
    "8bit int8": "--type Q8_0, the type of --bits 8",
    "q4044 q4048 q4088": "--type Q4_0: llama.cpp reorders it where it loads",
    "fp16 float16 half": "--type F16",
    "bfloat16": "--type BF16",
    "fp32 float32 float": "--type F32",
    "tq10 tq20": "for models that are ternary themselves; the smallest here is --type IQ1_S",
    "w4a16 w8a16 w8a8 nf4": "this is a scheme: --scheme in place of --type",
    "gguf ggml": "--format gguf",
    "auto copy": "leave --type out: --bits chooses it",
}  # fmt: skip
