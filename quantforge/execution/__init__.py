"""The run: a plan carried out one part of the model at a time, journalled, so that it goes on after any kill.

The life of a matrix in a calibrated run, from the source to the file; every step names its function:

1. `execute.execute` takes one block after another: `calibrated_block.observe` passes the calibration rows through it
   and sums what its linears read (for ``gptq``, the Hessian of each shared input).
2. `BlockRounder.round_block` applies the method's transforms (AWQ), then hands the matrices of one shared input to
   `rounding.MatrixRounding.round`, and that to the rounder: `quantizers.gptq.round_shared`.
3. The rounder fits scales (`packers`), rounds column after column (`gptq.round_columns`, `column_loops.round_chunk`),
   refines codes and scales (`refine`), and takes plain rounding wherever that is better (`rtn_fallback`).
4. `MatrixRounding` packs the codes in the terms of the format (`formats.storage`, then ``pack`` of the format) and
   writes them through `unit_output` into the preallocated files.
5. If the plan tunes, `run_tuning.Tuning.learn_block` learns scales, norms and codes of the block, and overwrites them.

In this folder:

    calibrated_block    One block of a calibrated run: observe what its linears read, transform, round, write
    calibrated_experts  Experts of a block of a calibrated run: each is observed, transformed, rounded and written
    calibration         Calibration rows for a model: drawn from a source, checked against the plan, with their events
    candidate_errors    Errors of candidate schemes: what each would cost at the output of the model, linear by linear
    claims              Claims: processes on one directory share the units of a run, by renames alone
    data_free           Units that look at no data: what is kept is copied, the rest is rounded to nearest
    execute             The run: a plan carried out one block of the model at a time
    expert_saliency     Saliency of experts: what a mixture would miss, by which `--prune-experts` chooses those that go
    guide               Guided statistics: weights of calibration tokens from a backward pass
    importance          Importance of columns without rounding anything: observed once
    journal             The journal of a run: what is done, so that the same command goes on after any kill
    progress            Progress of a verb: where it is, what it does now, and how much of it is done
    relayout            Carry out a planned conversion: check every value, round the embedding where that is planned
    rounding            Rounding of the matrices that read one shared input: read from the source, rounded
    run_tuning          Tuning of a run: learn scales, norms and codes of rounded blocks on calibration rows
    shared_run          A run that several processes share: each does units that no other does
    unit_output         Output of a unit of work: stored tensors on their way into weight files and back
    units               Units of work: the list that a run works off
"""
