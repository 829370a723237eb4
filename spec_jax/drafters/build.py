"""Ways of drafting, by the name that a config gives them."""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from spec_jax.drafters.base import Drafter
from spec_jax.drafters.model import ModelDrafter, check_vocabularies
from spec_jax.models.t5_weights import load_t5
from spec_jax.tokenizers import load_tokenizer, pieces

KINDS = ('model', 'none')


def build_drafter(config: ConfigDict, tokenizer, dtype) -> Drafter | None:
    """The drafter that a config's `draft` section describes; None for kind 'none'.

    Args:
      config: `kind`, and what that kind needs: for 'model' the `path` of a folder or a hub id.
      tokenizer: the target's.
      dtype: of the draft's parameters and activations.

    Raises:
      ValueError: for an unknown kind, or a draft whose vocabulary is not the target's.
    """
    if config.kind == 'none':
        return None
    if config.kind != 'model':
        raise ValueError(f'draft.kind: expected one of {", ".join(KINDS)}; got {config.kind!r}')
    check_vocabularies(pieces(tokenizer), pieces(load_tokenizer(config.path)))
    window = 1 if jax.default_backend() == 'cpu' else 2
    return ModelDrafter(load_t5(config.path, dtype), window)
