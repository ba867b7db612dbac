"""Tools for work on the GPU kernels, for machines without a GPU."""
