"""Files beside the weights of a result: manifest, card, provenance, signature.

In this folder:

    card            The model card of a directory: what hubs list it by
    card_figures    Delimited parts of ``README.md`` that may change after the result is made: figures
    front_matter    Front matter of a card: the fields by which the hub lists a model, written by the hub's own library
    manifest        The manifest: what went in, what was done, what came out
    present_names   Names that the files of a result have now, where somebody has renamed the file with its manifest
    provenance      Provenance in the two forms that supply-chain tools read, made from the manifest: unsigned
    publish         Publication of a result: the files beside its weights, and the step that makes it the output
    significant     Figures as text: three significant digits, and sizes in decimal units
    signing         Signing a result with a key of one's own, and checking it: the model signature of the OpenSSF (OMS)
    source_changes  Changes of a whole model on the way to a result, as manifests and views of a source tell them
    source_files    Sizes and digests of the files of a source: what a manifest states of it
"""
