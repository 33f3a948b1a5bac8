"""Code for processors, made by LLVM when it is first needed: what torch has no fast operator for.

In this folder:

    cache_programs    Programs for the paged cache: attention of one new token per sequence
    compiler          Compilation of a program, from LLVM's intermediate code to a function that can be called
    dense             Products with weights that are not quantized, for a few rows on a processor with vectors
    emit              How a program is written: `Emitter` makes LLVM's intermediate code
    features          Instructions of this processor that programs may use
    integer_programs  Programs for packed integers: multiply by them, multiply rows by the matrices of their owners
    lane_layout       Packed integers as the programs of `cpu` read them: their layout, its forms
    layer_launchers   Launchers of the programs for layers: norm, bias, gate, rotary, dense products
    layer_programs    Norm, rotary and gate on a processor with vectors: what `quantforge_kernels.layers` defines
    many_rows         Products of many rows on a processor, in a type that it has arithmetic for
    packed_integers   Products of packed integers on a processor with vectors: the kernel ``llvm-int``, of 1 to 8 bits
    program_cache     Compiled programs on disk: what one process compiled the next one loads
    recording         A list of programs to be run again: what a CUDA graph is to a GPU, for a processor
"""
