"""Code for GPUs: Triton functions, one file per family, and what lays weights out for them and launches them.

In this folder:

    attention_kernel    Triton kernel: attention of one new token per sequence over a paged, possibly quantized cache
    eight_bit_products  Products of 8-bit weights with activations that are quantized on the way, a scale per row
    eight_bits          Triton kernel: both factors in 8 bits, on the tensor cores (int8 x int8, fp8 x fp8)
    fields              Fields of packed words as numbers, and the parameters of groups
    launching           Launching Triton kernels, on the device of their tensors
    layer_kernels       Triton kernels for what stands between the products of a decoder: norm, rotary, gate
    plane_kernels       Triton kernels over bit planes (see `layout`): `matvec_kernel`
    plane_products      Products with packed weights on a GPU, by `gpu.plane_kernels`
"""
