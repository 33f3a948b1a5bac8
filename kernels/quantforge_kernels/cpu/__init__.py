"""Code for processors, made by LLVM when it is first needed: what torch has no fast operator for.

In this folder:

    attention_program  The paged cache on a processor with vectors: attention of one new token per sequence
    cache_entries      Entries of the paged cache on a processor with vectors: heads read as numbers
    compiler           Compilation of a program, from LLVM's intermediate code to a function that can be called
    dense              Products with weights that are not quantized, for a few rows on a processor with vectors
    emit               `Emitter`: short calls that write LLVM's intermediate code, for vectors, loops
    features           Instructions of this processor that programs may use
    grouped_integers   Grouped products of packed integers on a processor with vectors
    grouped_products   Program that multiplies rows by the packed integers of their owners: pairs of a row and a matrix
    integer_decoding   Program that decodes packed integers: weights in the type of activations
    integer_form       Form of packed integers that a program is made for, and the words (addresses
    integer_products   Program that multiplies packed integers by rounded activations
    integer_sums       Sums of products of codes and rounded activations, 32 bits in every lane
    integer_weights    Packed integers as a program reads them: words taken apart into codes of 16 or 8 bits
    lane_layout        The layout that programs of `cpu` read: tiles of rows side by side, one row per lane of a vector
    layer_launchers    Launchers of the programs for layers: norm, bias, gate, rotary, dense products
    layer_programs     Norm, rotary and gate on a processor with vectors: what `quantforge_kernels.layers` defines
    many_rows          Products of many rows on a processor, in a type that it has arithmetic for
    packed_integers    Products of packed integers on a processor with vectors: the kernel ``llvm-int``
    parallel_entry     The function by which a program is called: its whole range
    product_plans      Plan of the products of one problem: sizes of its layout, its programs
    program_cache      Compiled programs on disk: what one process compiled the next one loads
    recording          A list of programs to be run again: what a CUDA graph is to a GPU, for a processor
    torch_operators    torch's own CPU operators for packed weights, in bfloat16
"""
