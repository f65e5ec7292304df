"""`make gpu`: are kernels and engines right and fast on this machine's NVIDIA GPU, with what its Python has, nothing installed or fetched.

    python -m benchmarks.gpu [--device cuda|cpu] [--sizes full|small] [--parts NAME,...] [--json FILE] [--seed N]

Every part is a process of its own: one that crashes, hangs or lacks a package fails or is skipped by name, and the others run.
"""
