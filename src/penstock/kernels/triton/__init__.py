"""Triton kernels: nothing but kernels and their launches. Imported only where Triton is installed."""
