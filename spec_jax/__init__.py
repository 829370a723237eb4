"""Exact speculative decoding in JAX."""

from spec_jax.decoding import DecodeConfig, finish, speculative_loop, speculative_step, start
from spec_jax.drafters.base import Drafter, DraftShape, Outcome, Round
from spec_jax.drafters.none import NoDrafter
from spec_jax.failures import Failure
from spec_jax.generation import generate, plain_generate, stream
from spec_jax.lenience import LenientRule
from spec_jax.models.base import Model, ModelSpec
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.state import Output, SpecState, Stats
from spec_jax.types import Block, Context, Draft, Inputs, Prefill, Verification
from spec_jax.verification import Rule, Scores, TokenRule

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
