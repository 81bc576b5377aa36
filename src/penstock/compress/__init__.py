"""Compression: smaller models out of trained ones, step by step, each measured beside its prediction."""
