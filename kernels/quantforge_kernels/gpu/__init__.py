"""Code for GPUs: Triton functions, one file per family, and what lays weights out for them and launches them.

In this folder:

    attention_kernel  Triton kernel: attention of one new token per sequence over a paged, possibly quantized cache
    eight_bits        Triton kernel: both factors in 8 bits, on the tensor cores (int8 x int8, fp8 x fp8)
    fields            Fields of packed words as numbers, and the parameters of groups
    grouped_packed    Grouped products with packed weights on a GPU, by `gpu.matvec` and `gpu.rows`
    launching         Launching a Triton kernel on the device of its tensors; all kernels are launched here
    layer_kernels     Triton kernels for what stands between the products of a decoder: norm, rotary, gate
    matvec            Triton kernel over bit planes (see `layout`) for one row
    packed            Products with packed weights on a GPU, by `gpu.matvec` and `gpu.rows`
    plane_launches    Launches of the kernels over bit planes (`gpu.matvec`, `gpu.rows`): their arguments
    rows              Triton kernels over bit planes (see `layout`) for more than one row: tensor cores, and decoding
    scaled            Products of 8-bit weights with activations that are quantized on the way, a scale per row
    ternary           Triton kernels over the digits of `base3`: one row, a few rows on tensor cores, and decoding
    ternary_products  Products with ternary weights on a GPU, by `gpu.ternary`: twenty digits of `base3` in a word
    tiles             Tile sizes of a launch: measured ones where `scripts/tune_kernels.py` left some
"""
