"""Kernels: multiply by packed weights. A leaf package that speaks plain tensors.

In this folder:

    attention  Attention of one new token per sequence over a paged cache
    fallback   The fallback kernel: every grid, any bits, group size, type and device, in plain torch
    grouped    Grouped products: rows, each multiplied by the matrices of its owners, as tokens are by their experts
    kv         Keys and values of a cache, as they are stored: 16 or 32 bits, int8, fp8, or int4
    kv_runs    Runs of a quantized cache: how many channels share a scale, and the bytes of a row
    layers     Norm, rotary and gate: one kernel each on a GPU, one program on a processor with vectors
    layout     The layout that the Triton kernels read: bit planes of 32-bit words, loaded 16 bytes along K at a time
    problem    Problems and kernels: the product that a kernel is asked for, and the functions that make a kernel
    select     Selection of the kernel for a problem: the first one that accepts it
    cpu/       Code for processors, made by LLVM when it is first needed: what torch has no fast operator for
    gpu/       Code for GPUs: Triton functions, one file per family
"""
