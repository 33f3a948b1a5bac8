"""Files written next to the weights of a result: manifest, model card, provenance and signature.

In this folder:

    card          The model card (``README.md``) of a result: metadata for the hub, and what to know before loading
    card_figures  Parts of ``README.md`` that may change after the result is made: measured figures and loading code
    manifest      The manifest of a result: its sources, what was done, and its files
    number_text   Format figures as text: three significant digits, and sizes in decimal units
    provenance    Provenance files for supply-chain tools, made from the manifest: unsigned, without time or place
    publish       Publish a result: write the files that accompany its weights, and make it the output in one step
    signing       Sign a result with the user's own key and verify signatures, in the OpenSSF Model Signing (OMS) format
"""
