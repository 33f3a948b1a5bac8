"""GPTQ: round the columns of a matrix in turn, so that later columns compensate for the errors of earlier ones.

In this folder:

    column_kernels  The loops of `column_loops`, compiled by numba, each at its first call in a process
    column_loops    The innermost loops of GPTQ and of its refinement, over the columns of a chunk
    gptq            GPTQ: round the columns of a matrix in turn; later columns compensate for the errors of earlier ones
    hessian         The objective of GPTQ and of its refinement
    refine          Refinement: sweeps of coordinate descent over codes and parameters, under the whole Hessian
    rtn_fallback    The last step of GPTQ: use what `rtn` writes with the same recipe
"""
