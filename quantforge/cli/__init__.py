"""The command line: options in, one call of the pipeline, a document or a table out."""
