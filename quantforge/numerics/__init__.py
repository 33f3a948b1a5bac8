"""Products, threads and memory: what keeps the bits and bounds the peak of a run.

In this folder:

    allocator          Give freed memory back to the system, so that the peak is what is alive and not what once was
    compiled           Loops that numba compiles: options, and eight float32 as one value
    function_mode      A mode of torch that is one method: what is done instead of every function that is called
    hadamard           Rotations by Hadamard matrices, applied to channels: ``x -> x diag(signs) H / sqrt(size)``
    products           Matrix products whose last bits do not depend on the number of threads
    shared_processors  Processors shared with other programs: how threads wait there
    threads            Threads of a run: whole parts side by side, items in order, work in the background
    values             Checks and sums of the values of a tensor
"""

COMPILED_FROM = (
    1 << 21
)  # weights rounded together from which loops are compiled, a second or more in every process
