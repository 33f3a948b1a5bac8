"""Sources in low precision: models that are published in 4 or 8 bits, read as the weights that their codes stand for.

There is no better copy of such a model, so that quantizing it is no second quantization of something: planning, the
run and the writer see a view with plain names, shapes and types, and each tensor is decoded when it is read, some rows
at a time. Nothing of it lies on the disk, and nothing is lost on the way: what is decoded is float32.

In this folder:

    adapter         An adapter as PEFT saves it: low-rank changes of linears and embeddings
    head_directory  Directories of draft heads: small networks that guess further tokens from what a model has computed
    low_precision   The view of a source in low precision that runs read, and the words for its precision
    merged          A model with an adapter merged into it: ``W + scaling * B A``, computed when it is read
    modelopt        Checkpoints of NVIDIA's Model Optimizer (``quant_method: modelopt``): NVFP4, fp8 and MXFP8
    mxfp4_stacks    Experts in MXFP4 as gpt-oss is published (``quant_method: mxfp4``)
"""
