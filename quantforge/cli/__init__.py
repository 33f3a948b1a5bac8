"""The command line: options in, one call of a verb, a document or a table out."""
