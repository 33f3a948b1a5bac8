"""Code for processors, made by LLVM when it is first needed: what torch has no fast operator for.

In this folder:

    dense            Products with weights that are not quantized, for a few rows on a processor with vectors
    emit             Small words for writing LLVM's intermediate code: vectors with one lane per row, loops
    entries          Entries of the paged cache on a processor with vectors: heads read as numbers, and new ones stored
    fused            Norm, rotary and gate on a processor with vectors: what `quantforge_kernels.layers` defines
    kept             Compiled programs on disk: what one process compiled the next one loads
    lane_layout      The layout that programs of `cpu` read: tiles of rows side by side, one row per lane of a vector
    many_rows        Products of many rows on a processor, in a type that it has arithmetic for
    native           Compilation of the text of a program to functions that run on as many threads as torch uses
    paged            The paged cache on a processor with vectors: attention of one new token per sequence
    program          Programs of a processor: integers of a few bits times activations of 16 bits
    recording        A list of programs to be run again: what a CUDA graph is to a GPU, for a processor
    torch_operators  torch's own CPU operators for packed weights, in bfloat16
    vector           Packed integers on a processor with vectors (AVX2, AVX-512): all bits, ternary too
    vector_layers    Layers that are no product with packed weights, on a processor with vectors
"""
