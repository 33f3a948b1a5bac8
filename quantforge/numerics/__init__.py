"""Reproducible matrix products, threads and memory: keep results bitwise equal and bound peak memory.

In this folder:

    allocator          Configure glibc's allocator to return freed memory to the system
    compiled           Support for loops compiled by numba: options, and a vector type of eight float32 values
    function_mode      A torch function mode with a single method that is called in place of every torch function
    hadamard           Rotate channels by Hadamard matrices: ``x -> x diag(signs) H / sqrt(size)``
    products           Matrix products whose last bits do not depend on the number of threads
    shared_processors  Processors shared with other programs: how threads wait there
    threads            Threads of a run: parallel parts, ordered items, and background tasks
    values             Checks and sums of the values of a tensor
"""

# Weights rounded together from which loops are compiled, a second or more in every process
COMPILED_FROM = 1 << 21
