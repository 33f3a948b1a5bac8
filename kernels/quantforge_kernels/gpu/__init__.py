"""Code that runs on a GPU: Triton functions, one file per family. Launchers are one folder up."""
