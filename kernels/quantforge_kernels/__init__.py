"""Kernels: multiply by packed weights. A leaf package that speaks plain tensors."""
