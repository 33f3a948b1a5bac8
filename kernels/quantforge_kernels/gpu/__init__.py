"""GPU kernels in Triton, one file per family, with the code that lays out weights and launches them.

In this folder:

    attention_kernel  Triton kernel for attention of one new token per sequence over a paged, possibly quantized cache
    launching         Launching of Triton kernels on the device of their tensors
    layer_kernels     Triton kernels for the layers between products: RMS norm, rotary embedding, gate
    packed_fields     Decoding of the fields of packed words and loading of group parameters
    plane_kernels     Triton kernels over bit planes (see `layout`): `matvec_kernel`
    plane_products    GPU kernels for packed weights: which products they accept, their layout
    w8a8_kernel       Triton kernel for products of two 8-bit operands on tensor cores (int8 x int8, fp8 x fp8)
    w8a8_products     GPU kernel ``triton-w8a8``: 8-bit weights times activations that are quantized on the fly
"""
