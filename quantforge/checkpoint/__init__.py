"""Checkpoints on disk: the only place where bytes are read from a model or written to one.

In this folder:

    disk             The system calls that put bytes on a disk, in one place, with one meaning for every failure
    fewer_experts    A checkpoint without some experts of its mixtures: an ordinary smaller one
    fewer_heads      A checkpoint without the heads that predict further tokens: an ordinary one
    files            The opener of this package (see `quantforge_files`), whose refusals are `InputError`
    finite_values    Values that are no finite numbers: found as tensors are read, and named with their places
    foreign_json     JSON of others, see `quantforge_files.strict_json`; what is wrong with it is an `InputError`
    hub              Location of a model: a directory, or ``org/name[@revision]`` in the cache of huggingface_hub
    index            Index of the safetensors files that make up a model, and of the tensors in each of them
    lock             One writer per output: a directory beside it that belongs to one run at a time
    prepared         A checkpoint some of whose tensors are computed when they are read
    previous_output  The result of an earlier run
    publish_file     A result that is a file, or numbered files, instead of a directory
    reader           A model directory as Hugging Face publishes it: configuration, tensors and the files around them
    recipe_fields    Fields of recipes: the values and ranges that they take, and a check of dataclasses that hold them
    recipe_toml      TOML of recipes: read within limits into dataclasses that know every key, written with every key
    safetensors      Safetensors files, read more strictly than the reference library does
    seal             A file as it was when it was digested: whatever is read of it later is compared with that
    shards           Shards of a result: which tensor lies where in which safetensors file
    stage            All or nothing: a result is staged beside its place and appears there by one rename
    unstacked        Experts one by one: a checkpoint whose files hold all experts of a layer in one tensor
    writer           Weight files, written tensor by tensor at places that a plan has given them
"""
