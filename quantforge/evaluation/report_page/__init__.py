"""The report of an evaluation as one page that needs nothing else: no network, no other file.

In this folder:

    charts  The charts of a report: specifications of Vega-Lite
    page    The page of an evaluation, put together from its sections; a section without figures is left out
"""
