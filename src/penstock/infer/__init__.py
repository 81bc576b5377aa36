"""Inference: texts generated, embedded and classified by trained models."""

from __future__ import annotations
