"""One test suite for every drafter, shipped or user-written.

    from spec_jax import conformance

    def make(target):  # a `testing.TableModel` of a small vocabulary -> the draft for it
        return MyDrafter(target.vocab_size)

    @pytest.mark.parametrize('name', conformance.CHECKS)
    def test_my_draft(name):
        result = conformance.CHECKS[name](make)
        assert result.passed, result.detail

or, all of them at once, `for result in conformance.check(make): print(result)`. A draft that is sometimes right is
tested best: each detail has its acceptances. The suite takes about half a minute on one core, nearly all of it
compilation. Seeds are fixed, so results repeat.

The targets are tables of order 2, one for each token of the vocabulary; a prompt's first token selects its table.
So the correct distribution is known in closed form, and a wrong cache changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spec_jax.conformance.proposals import closed_form, shapes, tokens_follow_q
from spec_jax.conformance.results import Make, Result
from spec_jax.conformance.rounds import eos_in_every_place, honest_counts, length_limits
from spec_jax.conformance.texts import (
    acceptance_of_1,
    greedy_identity,
    joint_distribution,
    seeds,
    uneven_batches,
)

__all__ = ['CHECKS', 'Make', 'Result', 'acceptance_of_1', 'check']

CHECKS: dict[str, Callable[[Make], Result]] = dict(
    shapes=shapes,
    closed_form=closed_form,
    tokens_follow_q=tokens_follow_q,
    greedy_identity=greedy_identity,
    joint_distribution=joint_distribution,
    uneven_batches=uneven_batches,
    eos_in_every_place=eos_in_every_place,
    length_limits=length_limits,
    seeds=seeds,
    honest_counts=honest_counts,
)


def check(make: Make, make_same: Make | None = None, progress=iter) -> list[Result]:
    """Runs all of `CHECKS` on a draft.

    Args:
      make: TableModel -> Drafter, called by each check.
      make_same: the same for `acceptance_of_1`, where the draft can be the target itself; None skips that check.
      progress: wraps the list of checks, for instance tqdm.
    """
    checks = [partial(one, make) for one in CHECKS.values()]
    if make_same is not None:
        checks.append(partial(acceptance_of_1, make_same))
    return [one() for one in progress(checks)]
