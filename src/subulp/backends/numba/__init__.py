"""The CPU backend: rules, noise and storage formats compiled by Numba into one native call for many tensors."""
