"""The lattice types of ggml, IQ1 to IQ3: a code picks the magnitudes of 4 or 8 weights at once, signs beside it.

In this folder:

"""
