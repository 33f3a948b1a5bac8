"""Checkpoints on disk: the only package that reads bytes of a model or writes them.

In this folder:

    checksums          Checksums of a file's chunks, against which everything read later is verified
    computed_tensors   A view of a checkpoint in which some tensors are computed when they are read
    disk               The system calls that write to a disk, and the error that each failure becomes
    finite_values      Reject tensors with NaN or infinite values, naming their positions
    hub                Find a model: a directory, or ``org/name[@revision]`` in the cache of huggingface_hub
    lock               One writer per output: a lock in a hidden directory beside the output
    opener             The `Opener` of this package (see `quantforge_files`), whose errors are `InputError`
    output_names       File names of a result that is a single file or numbered files, and of its side files
    previous_output    The result of an earlier run, of which an overwrite may remove or replace only its own files
    reader             Read a model directory of Hugging Face: configuration, tensors and side files
    safetensors        Safetensors files, read more strictly than the reference library does
    stage              All or nothing: a result is staged beside its output and appears by one rename
    unstacked_experts  A view of a checkpoint in which stacked experts are separate tensors
    without_experts    Remove experts of MoE layers, or the heads for multi-token prediction, from a checkpoint
    writer             Plan weight files down to the byte, and write them tensor by tensor
"""
