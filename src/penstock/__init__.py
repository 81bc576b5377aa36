"""Penstock: predict, apply and measure what makes Transformers fast."""
