"""Exact speculative decoding in JAX."""

from spec_jax.decoding import generate, plain_generate
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.types import Context, Draft, Inputs, Output, Stats, Verification

__all__ = [
    'GREEDY',
    'Context',
    'Draft',
    'Inputs',
    'Output',
    'SamplingConfig',
    'Stats',
    'Verification',
    'generate',
    'plain_generate',
    'row_keys',
]
