"""Source models that need decoding or merging: low-precision releases, adapters, draft heads.

There is no better copy of such a model, so that quantizing it is no second quantization of something: planning, the
run and the writer see a view with plain names, shapes and types, and each tensor is decoded when it is read, some rows
at a time. Nothing of it lies on the disk, and nothing is lost on the way: what is decoded is float32.

In this folder:

    adapter         LoRA adapters as PEFT saves them: low-rank updates of linears and embeddings, and replaced tensors
    head_directory  Directories of draft heads (Medusa, EAGLE-3), small networks that draft tokens for a base model
    low_precision   Decode models that were released in low precision, so that runs read plain weights
    merged          A model with a LoRA adapter merged on read: ``W + scaling * B A``
    modelopt        Checkpoints of NVIDIA's Model Optimizer (``quant_method: modelopt``): NVFP4, fp8 and MXFP8
    mxfp4_stacks    MXFP4 experts as in gpt-oss (``quant_method: mxfp4``): 4-bit elements with power-of-two block scales
"""
