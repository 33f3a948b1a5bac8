"""The report of an evaluation as one page that needs nothing else: no network, no other file.

In this folder:

    assemble     The page, put together from its sections; a section without figures is left out
    axes         Axes of charts: marks at round values, of which at least three can be read, whatever the range
    charts       The charts of a report, as specifications of Vega-Lite
    drawing      Drawing of charts: a specification of Vega-Lite becomes SVG
    front_chart  Size against divergence, with the Pareto front: names stand beside the plot, in the order of the points
    sections     Sections of the page beside its charts: tables, answers side by side
"""
