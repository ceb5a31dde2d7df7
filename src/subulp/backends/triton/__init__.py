"""The GPU backend: the same, compiled by Triton into one launch."""
