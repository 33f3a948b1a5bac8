"""GPTQ: round the columns of a matrix in turn, so that later columns compensate for the errors of earlier ones.

In this folder:

    column_kernels  Loops of `column_loops` compiled by numba, each at its first call in a process
    column_loops    Innermost loops of GPTQ and of its refinement, over the columns of a chunk
    gptq            GPTQ: round the columns of a matrix in turn; later columns compensate for the errors of earlier ones
    hessian         Objective of GPTQ and of its refinement: ``E (H + diag(ridge)) E^T`` for each row of an error ``E``
    refine          Refinement: sweeps of coordinate descent over codes and parameters, under the whole Hessian
    rtn_fallback    Last step of GPTQ: replace each row for which `rtn` with the same recipe has the smaller error
    solution        Solution of GPTQ for a matrix: codes and parameters, with the error of each row
"""
