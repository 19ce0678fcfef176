"""The arithmetic: numba kernels on quantised blocks, each with a plain numpy oracle."""
