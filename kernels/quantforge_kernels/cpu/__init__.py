"""CPU kernels that LLVM compiles at run time, for operations that torch has no fast operator for.

In this folder:

    cache_programs    CPU programs for the paged cache: attention of one new token per sequence
    compiler          Compilation of a program: from LLVM's intermediate code to a callable function
    dense             CPU program for products of a few rows with unquantized weights
    instruction_sets  The best instruction set that CPU programs may use
    integer_programs  CPU programs for packed integers: plain products, grouped products, and decoding
    lane_layout       Layout of packed integers for the CPU programs: one weight row per vector lane
    layer_launchers   Launchers of the CPU programs for norm, bias, gate, rotary, dense products
    layer_programs    CPU programs for norm, bias, rotary and gate, each of which makes one pass over the data
    llvm_emitter      Writing LLVM code from Python: `Emitter` writes instructions
    many_rows         Products of many rows on a CPU, computed in a type for which the CPU has instructions
    packed_integers   CPU kernels ``llvm-int`` and ``llvm-int8``: products with packed integer weights of 1 to 8 bits
    program_cache     On-disk cache of compiled programs, shared by processes
    recording         Recording of the programs of a decoding step, to replay them
"""
