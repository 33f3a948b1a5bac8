"""Kernels that multiply by packed weights and attend to quantized caches; they take plain tensors only.

In this folder:

    attention      Attention of one new token per sequence over a paged key/value cache
    bit_planes     Weight layout of the Triton kernels: bit planes of 32-bit words, loaded 16 bytes along K at a time
    fallback       The reference kernel in plain torch: every grid, bit width, group size, type and device
    grouped        Grouped products for mixtures of experts: each row is multiplied by the matrices of its experts
    kv             Storage of cached keys and values: unquantized, int8, fp8 or int4
    kv_row_layout  Sizes of a cached row of keys or values: channels that share a scale, and bytes
    layers         RMS norm, rotary embedding, gates and dense products: fused kernels where possible, else plain torch
    matmul_spec    Specification of a matrix product with quantized weights, and the interface of kernels
    score_options  Options of attention logits, shared by all programs that compute attention: scale
    select         Selection of the kernel for a product: the first one that accepts it, after a trial run
    cpu/           CPU kernels that LLVM compiles at run time, for operations that torch has no fast operator for
    gpu/           GPU kernels in Triton, one file per family, with the code that lays out weights and launches them
"""
