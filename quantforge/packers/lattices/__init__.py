"""The lattice types of ggml, IQ1 to IQ3: a code picks the magnitudes of 4 or 8 weights at once, signs beside it.

A weight is ``step * v`` with ``step = d (2 scale + 1) unit``: ``d`` is the float16 of a block of 256, ``scale`` an
integer of 3 or 4 bits for 16 or 32 columns, and ``v`` a coordinate of the point with its sign
(`quantforge.grids.LATTICES`).

- *iq2_xxs*, *iq2_xs*, *iq2_s*: 256, 512 or 1024 points of 8 magnitudes 8, 25 or 43. The first two store 7 of 8 signs:
  an even number of them is negative.
- *iq3_xxs*, *iq3_s*: points of 4 magnitudes of eight; two of the first share 7 signs.
- *iq1_s*, *iq1_m*: 2048 points of 8 numbers -1, 0 and 1, all raised or lowered by an eighth: a whole group, or a point.

In this folder:

"""
