"""The run: a plan carried out one part of the model at a time, journalled, so that it goes on after any kill.

In this folder:

    block_tensors       The tensors of a block as the plan has them, by their names inside of the block
    calibrated_block    One block of a calibrated run: observe what its linears read, transform, round, write
    calibrated_experts  The experts of one block of a calibrated run: one after the other observed, transformed
    calibration         Calibration rows for a model: drawn from a source, checked against the plan, with their events
    candidate_errors    Errors of candidate schemes: what each would cost at the output of the model, linear by linear
    claims              Claims: processes on one directory share the units of a run, by renames alone
    data_free           Worker on units that look at no data: what is kept is copied, the rest is rounded to nearest
    execute             The run: a plan executed one part of the model at a time
    expert_saliency     Saliency of experts: what a mixture would miss, by which `--prune-experts` chooses those that go
    guide               Weights of calibration tokens for guided statistics: a unit of a run before its blocks
    guided_rounding     Rounding under guided statistics
    importance          Importance of columns without rounding anything: observed once
    journal             The journal of a run: what is done, so that the same command goes on after any kill
    linear_errors       Linears and experts of one block, rounded under each candidate scheme for `candidate_errors`
    lockstep            Runs of one source in lock step: calibration rows pass each block once
    observers           Observers of a block: each says what it wants to see while the calibration rows pass, and when
    passing_rows        Calibration rows on their way through the blocks of a model, as a run asks for them
    progress            Progress of a verb: where it is, what it does now, and how much of it is done
    quantized_inputs    Quantized inputs in a run: the range that a matrix takes, the columns that are kept
    record              Record that a finished part of a run leaves in the journal: events, figures
    relayout            A planned conversion carried out: every tensor settled before the first byte is written
    resumption          Going on with an interrupted run: what it has to agree in, its journal, and what it had finished
    rounding            Rounding of the matrices that read one shared input, and their way into the files of the format
    row_wise            Rounding without statistics, a strip of rows at a time
    self_calibration    Calibration rows that the model writes itself: no text is needed
    shared_run          A run that several processes share: each does units that no other does
    source_tensors      Tensors of the source as a run reads them: by their plans, looked through for what is not finite
    transforming        Transforms of a method, one after the other, on a part of the model: a block
    tuning              Tuning of a run: units after its blocks
    unit_output         Output of a unit of work: stored tensors on their way into weight files and back
    units               Units of work: the list that a run works off
"""
