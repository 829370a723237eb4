"""Exact speculative decoding in JAX."""

from spec_jax.decoding import (
    DecodeConfig,
    finish,
    generate,
    plain_generate,
    speculative_loop,
    speculative_step,
    start,
    stream,
)
from spec_jax.drafters.base import Drafter, DraftShape, NoDrafter, Outcome, Round
from spec_jax.failures import Failure
from spec_jax.models.base import Model, ModelSpec
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.stats import Stats
from spec_jax.types import Block, Context, Draft, Inputs, Output, Prefill, SpecState, Verification
from spec_jax.verification import LenientRule, Rule, Scores, TokenRule

__all__ = [
    'GREEDY',
    'Block',
    'Context',
    'DecodeConfig',
    'Draft',
    'DraftShape',
    'Drafter',
    'Failure',
    'Inputs',
    'LenientRule',
    'Model',
    'ModelSpec',
    'NoDrafter',
    'Outcome',
    'Output',
    'Prefill',
    'Round',
    'Rule',
    'SamplingConfig',
    'Scores',
    'SpecState',
    'Stats',
    'TokenRule',
    'Verification',
    'finish',
    'generate',
    'plain_generate',
    'row_keys',
    'speculative_loop',
    'speculative_step',
    'start',
    'stream',
]
