"""A finished artifact, ours or anyone's, as if nobody could be trusted: files, structure, numbers, logits.

In this folder:

    alone       What codes tell by themselves, without a source
    artifact    An artifact understood from its headers: the format's layers
    compare     How a decoded matrix ``Q`` differs from the matrix ``T`` that it stands for
    declared    What a configuration says of each linear: quantized, left out, nothing certain, or both
    deviation   How far a decoded matrix ``Q`` is from its target ``T``
    difference  How two models differ, whatever formats they are in: what was done, tensors, values, files
    explain     Why a matrix is not what its name says: it is another one, or its rows are in another order
    findings    What is wrong with an artifact: a finding names a check, a place and the figures
    folded      Which factors were folded into a quantized weight
    forward     One forward pass of source and artifact: logits are finite, and near those of the source
    inputs      What the linears of the source read while it computes a text: a sample of it, and its range
    limits      How much more than plain rounding an artifact may cost: one row for each width of codes
    numbers     Every tensor of an artifact: readable, finite
    predicted   The source with noise: every quantized weight is off by as much as in the artifact
    ranges      Ranges that calibration measured: of static inputs, and of keys and values in the cache
    release     The files of a release against its manifest: missing, changed, added
    side_files  What lies beside the weights, against the source: configuration, tokenizer, chat templates, generation
    structure   What headers and the configuration say, against each other
    verify      Verify an artifact: files, structure, values, logits, in this order, as far as it can be read
    yardstick   What rounding costs at least: a matrix rounded to nearest on the grid of another
    beside/     What lies beside the weights, against the source and against itself
"""
