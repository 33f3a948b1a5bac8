"""The lattice types of ggml, IQ1 to IQ3: a code picks the magnitudes of 4 or 8 weights at once, signs beside it.

A weight is ``step * v`` with ``step = d (2 scale + 1) unit``: ``d`` is the float16 of a block of 256, ``scale`` an
integer of 3 or 4 bits for 16 or 32 columns, and ``v`` a coordinate of the point with its sign
(`quantforge.grids.LATTICES`).

- *iq2_xxs*, *iq2_xs*, *iq2_s*: 256, 512 or 1024 points of 8 magnitudes 8, 25 or 43. The first two store 7 of 8 signs:
  an even number of them is negative.
- *iq3_xxs*, *iq3_s*: points of 4 magnitudes of eight; two of the first share 7 signs.
- *iq1_s*, *iq1_m*: 2048 points of 8 numbers -1, 0 and 1, all raised or lowered by an eighth: a whole group, or a point.

In this folder:

    blocks             Codes and parameters of the lattice types as the bytes of their blocks of 256, and back
    cut_loops          The cuts of a sorted group into -1, 0 and 1 that ggml finds for IQ1_S and IQ1_M, to the last bit
    diagonal_loops     Nearest vectors of lattices under weighted squares, and the scales that minimise these
    eights             Eight float32 as one value in loops that numba compiles
    half_loops         The nearest point under weighted squares, by `halves`; loops that numba compiles
    halves             Tables of the halves of points, by which the nearest one is found without measuring all of them
    lattice_packer     The lattice types for rounders: ``fit``, ``encode``, ``decode``, ``nearest``
    lattice_points     Points of the lattices: the tables that codes of IQ1 to IQ3 look up
    lattice_reference  Rows of lattice types quantized as ggml's own quantizers do, to the last bit
    lattice_refit      Parameters of lattice types fitted again with the codes held: the level of a group
    lattice_search     Scales that minimise ``sum w (x - q)^2`` of every block jointly with its codes
    lattice_types      Types of lattices: what their codes stand for, one record for each
    near_loops         The nearest of a few points, to the last bit as ggml finds it: 8 side by side
    nearest_points     Nearest points of a lattice, with signs, for vectors of many rows
    neighbours         For each vector of digits that is no point of a lattice, the points nearest to it
    reference_loops    ggml's searches for the lattice types of 2 and 3 bits, restated in loops that numba compiles
    sign_loops         Steps of `reference_loops` before points are chosen: signs and magnitudes
    ternary_loops      ggml's searches for IQ1_S and IQ1_M, restated in loops that numba compiles
    try_loops          Which of many scales ggml takes for a group, for the lattice types of 2 and 3 bits
    vector_loops       Loops of `nearest_points`, compiled by numba
    weight_loops       ggml's weights of the errors of lattice types, to the last bit; a loop that numba compiles
"""
