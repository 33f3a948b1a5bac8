"""Files beside the weights of a result: manifest, card, provenance, signature.

In this folder:

    card          The model card of a directory: what hubs list it by, and what a person wants to know before loading it
    card_figures  Delimited parts of ``README.md`` that may change after the result is made: figures
    manifest      The manifest: what went in, what was done, what came out
    number_text   Figures as text: three significant digits, and sizes in decimal units
    provenance    Provenance in the two forms that supply-chain tools read, made from the manifest: unsigned
    publish       Publication of a result: the files beside its weights, and the step that makes it the output
    signing       Signing a result with a key of one's own, and checking it: the model signature of the OpenSSF (OMS)
"""
