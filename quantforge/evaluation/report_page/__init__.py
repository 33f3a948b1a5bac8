"""HTML report of an evaluation: one self-contained page that loads nothing from the network or other files.

In this folder:

    charts  Charts of the HTML report: Vega-Lite specifications
    page    The HTML report of an evaluation, rendered from its sections; sections without data are omitted
"""
