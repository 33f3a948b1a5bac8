"""The run: a plan carried out one part of the model at a time, journalled, so that it goes on after any kill.

In this folder:

    calibration       Calibration rows for a model: drawn from a source, checked against the plan, with their events
    execute           The run: a plan executed one part of the model at a time
    importance        Importance of columns without rounding anything: observed once
    journal           The journal of a run: what is done, so that the same command goes on after any kill
    quantized_inputs  Quantized inputs in a run: what to observe of them, the range that a matrix takes
    record            Record that a finished part of a run leaves in the journal: events, figures
    relayout          A planned conversion carried out: every tensor settled before the first byte is written
    resumption        Going on with an interrupted run: what it has to agree in, its journal, and what it had finished
    row_wise          Rounding without statistics, a run of rows at a time
    self_calibration  Calibration rows that the model writes itself: no text is needed
"""
