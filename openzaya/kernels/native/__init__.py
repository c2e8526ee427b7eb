"""Kernels in C for CPUs: what torch has no operation for, or only one that moves more memory.

Each kernel makes one pass over the activations where separate operations would make five to
twenty; products inside run on AMX tiles where the CPU has them.
"""
