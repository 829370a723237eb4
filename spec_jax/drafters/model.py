"""A small model as the draft, with its own prefill and cache.

The draft's cache lacks the newest token and, after a round in which all of its tokens were accepted, the
one before it. So each round begins with a call over the last two tokens of the text.

Axes: B rows, G draft depth, W tokens of a window, V vocabulary.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.drafters.base import DraftShape, Outcome, Round
from spec_jax.drafters.draw import draw, fit_vocabulary
from spec_jax.models.base import Model
from spec_jax.models.blocks import next_logits
from spec_jax.runtime.backend import fewest_rows
from spec_jax.sampling import split_rows
from spec_jax.types import Cache, Draft, Inputs, Prefill


@flax.struct.dataclass
class ModelDrafter:
    """Samples from a small model's distribution.

    Attributes:
      model: any `models.base.Model` with the target's vocabulary.
    """

    model: Model

    def shape(self, gamma: int) -> DraftShape:
        return DraftShape(nodes=gamma, depth=gamma, may_be_empty=False)

    def init(self, target: Model, prefill: Prefill, inputs: Inputs, num_slots: int) -> Cache:
        return self.model.prefill(inputs, num_slots).cache

    def propose(self, state: Cache, round: Round) -> tuple[Draft, Cache]:
        context, gamma = round.context, round.gamma
        window = fewest_rows(len(context.length))  # of the steps after the first
        step_keys = split_rows(round.keys, gamma)  # [G, B]

        def step(cache, tokens, newest, key):
            """Reads tokens [B, W], the last at position `newest`, and draws the next one."""
            logits, cache = next_logits(self.model, cache, tokens, newest)
            token, probs = draw(key, fit_vocabulary(logits, round.vocab_size), round.sampling)
            tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
            return cache, tokens[:, -window:], probs

        def scan_step(carry, key):
            cache, tokens, newest = carry
            cache, tokens, probs = step(cache, tokens, newest, key)
            return (cache, tokens, newest + 1), (tokens[:, -1], probs)

        newest = context.length - 1
        cache, tokens, probs = step(state, context.last(2), newest, step_keys[0])
        first = (tokens[:, -1], probs)
        (cache, _, _), rest = lax.scan(scan_step, (cache, tokens, newest + 1), step_keys[1:])
        tokens, probs = jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), first, rest
        )
        return Draft(tokens, probs, jnp.full_like(context.length, gamma)), cache

    def update(self, state: Cache, outcome: Outcome) -> Cache:
        return state  # the next round's first step keeps what was accepted


def check_vocabularies(target: list[str], draft: list[str]) -> None:
    """Compares two vocabularies, each given as its pieces in the order of their ids.

    Raises:
      ValueError: naming the first id at which they differ.
    """
    for index, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise ValueError(
                f'vocabularies differ: id {index} is {ours!r} in the target and {theirs!r} in the draft; '
                "a draft must share its target's tokenizer"
            )
    if len(target) != len(draft):
        longer, name = (target, 'target') if len(target) > len(draft) else (draft, 'draft')
        index = min(len(target), len(draft))
        raise ValueError(
            f'vocabularies differ: the target has {len(target)} pieces and the draft {len(draft)}; '
            f"id {index}, {longer[index]!r}, is in the {name} only; a draft must share its target's tokenizer"
        )
