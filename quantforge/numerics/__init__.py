"""Products, threads and memory: what keeps the bits and bounds the peak of a run."""
