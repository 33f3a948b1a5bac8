"""Checkpoints on disk: the only place where bytes are read from a model or written to one.

In this folder:

    checksums          Checksums of a file: whatever is read of it later is compared with what was digested
    computed_tensors   A checkpoint some of whose tensors are computed when they are read
    disk               The system calls that put bytes on a disk, in one place, with one meaning for every failure
    finite_values      Values that are no finite numbers: found as tensors are read, and named with their places
    hub                Location of a model: a directory, or ``org/name[@revision]`` in the cache of huggingface_hub
    lock               One writer per output: a directory beside it that belongs to one run at a time
    opener             The opener of this package (see `quantforge_files`), whose refusals are `InputError`
    output_names       Names of the files of a result that is a file, or numbered files: of the parts
    previous_output    The result of an earlier run
    reader             A model directory as Hugging Face publishes it: configuration, tensors and the files around them
    safetensors        Safetensors files, read more strictly than the reference library does
    stage              All or nothing: a result is staged beside its place and appears there by one rename
    unstacked_experts  Experts one by one: a checkpoint whose files hold all experts of a layer in one tensor
    without_experts    A checkpoint without some of its parts: experts of its mixtures
    writer             Weight files: which tensor lies where in them, a pure function of what they hold
"""
