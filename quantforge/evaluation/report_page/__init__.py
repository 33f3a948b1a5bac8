"""The report of an evaluation as one page that needs nothing else: no network, no other file.

In this folder:

    charts  x
    page    x
"""
