"""Operations made of several steps: what each code base's implementation really runs.

Every function takes the tape first and records what transformers 5.23 (or the kernel named by
``Kernels``) does on CUDA, with what torch 2.13's derivatives.yaml keeps for backward. What is kept
was compared with real runs; see ``tests/graph``.
"""
