"""What ``scripts/gpu_check.py`` checks and times on a GPU, and rehearses on a CPU in Triton's interpreter.

One module an idea: bits, a first step in a fresh process, a huge tensor, graph capture, the host's part, timings.
"""
