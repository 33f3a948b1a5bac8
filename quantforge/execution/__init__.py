"""Run a plan: process the model one block at a time and journal progress, so that an interrupted run can be resumed.

The path of one weight matrix in a calibrated run, from the source file to the output file:

1. `execute.execute` loops over the blocks: `calibrated_block.observe` runs the calibration rows through a block and
   accumulates statistics of the inputs of its linears (for ``gptq``, the Hessian of each shared input).
2. `BlockRounder.round_block` applies the transforms of the method (AWQ), then passes the matrices that read one shared
   input to `rounding.MatrixRounder.round`, which calls the rounder: `quantizers.gptq.round_matrices`.
3. The rounder fits scales (`packers`), rounds column after column (`gptq.round_columns`, `column_loops.round_chunk`),
   refines codes and scales (`refine`), and falls back to plain rounding where that is better (`rtn_fallback`).
4. `MatrixRounder` packs the codes as the format requires (`formats.storage`, then ``pack`` of the format) and writes
   them through `unit_output` into the preallocated files.
5. If the plan includes tuning, `run_tuning.TuningStep.tune_block_and_pass` tunes scales, norms and codes of the block
   and overwrites them.

In this folder:

    block_tensors       Planned tensors of a block: those that are quantized, sparsified or left unquantized
    block_transforms    Transforms of a block in a calibrated run: apply those of the method to its weights
    calibrated_block    One block of a calibrated run: observe the inputs of its linears, transform, round and write it
    calibrated_experts  Experts of a block of a calibrated run: observe, transform
    calibration         Calibration data of a run: draw rows from a source, check them against the plan
    candidate_errors    Estimate the output error of candidate schemes for each linear, in nats per token
    claims              Claims: processes that share a run claim its units by renaming directories
    data_free           Data-free units: copy unquantized tensors and round the rest without statistics
    execute             Carry out a plan block by block, writing directly to the preallocated files of a stage
    expert_saliency     Saliency of experts, by which ``--prune-experts`` chooses the experts to remove
    guide               Guided rounding: weight calibration tokens by output gradients
    importance          Importance of input columns (imatrix): observe it on calibration rows
    journal             Journal of a run: records the finished units
    observation         Observation of a block or the head: which statistics of its inputs a run needs
    rounding            Read, round and write the matrices that share an input
    run_conversion      Carry out a planned conversion: check all values, round the embedding if planned
    run_inputs          Inputs of a run: everything that determines the bytes of one result
    run_tuning          Tuning step of a run: optimize scales, norms and codes of rounded blocks on calibration rows
    shared_run          Shared runs: several processes each work on different units
    unit_output         Output of a unit of work: writes stored tensors to the weight files, reads them back
    unit_recorder       Record the units of a run: each is timed, journaled and reported
    units               Units of work: the parts of a run that are finished and journaled one at a time
"""
