"""Lines in, lines out: order, empty lines, agreement with re-scoring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import analysis
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.model import ModelDrafter
from spec_jax.measure import agreement, runs, setup
from spec_jax.models.t5 import T5, T5Config
from spec_jax.sampling import GREEDY, SamplingConfig
from spec_jax.state import Stats

CONFIG = T5Config(
    vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
)
SETTINGS = setup.Settings(DecodeConfig(2, 7, GREEDY), batch_size=2, max_source_length=16)


@pytest.fixture(scope='module')
def pair():
    return T5.create(CONFIG, jax.random.key(0)), ModelDrafter(T5.create(CONFIG, jax.random.key(1)))


@pytest.fixture(scope='module')
def sources():
    """Five lines, of which the third is empty."""
    rng = np.random.default_rng(0)
    lines = [np.append(rng.integers(2, 40, size), 1).astype(np.int32) for size in (5, 2, 0, 9, 4)]
    return lines


def test_outputs_come_in_the_order_of_the_lines_and_empty_stays_empty(pair, sources):
    target, drafter = pair
    program = runs.speculative_program(target, drafter, SETTINGS)
    together = runs.decode_lines(sources, SETTINGS, program)
    assert len(together.ids) == 5 and len(together.ids[2]) == 0
    for line in (0, 1, 3, 4):
        alone = runs.decode_lines([sources[line]], SETTINGS, program)
        np.testing.assert_array_equal(together.ids[line], alone.ids[0])
        assert 1 <= len(together.ids[line]) <= 7
    assert int(together.stats.emitted) == sum(map(len, together.ids))


def test_sampled_lines_do_not_depend_on_the_batch(pair, sources):
    target, drafter = pair
    settings = SETTINGS.decoding(sampling=SamplingConfig(1.0))
    single = dataclasses.replace(settings, batch_size=1)
    one, many = (
        runs.decode_lines(sources, batching, runs.speculative_program(target, drafter, batching)).ids
        for batching in (single, settings)
    )
    for ours, theirs in zip(one, many, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_compare_decodes_what_decode_lines_does(pair, sources):
    target, drafter = pair
    programs = dict(
        plain=runs.plain_program(target, SETTINGS),
        speculative=runs.speculative_program(target, drafter, SETTINGS),
    )
    timer = runs.step_timer(target, drafter, sources, SETTINGS)
    results = runs.compare(sources, SETTINGS, programs, repeats=1, timer=timer)
    expected = runs.decode_lines(sources, SETTINGS, programs['plain'])
    for name in programs:
        assert results[name].prefill_seconds > 0
        for ours, theirs in zip(expected.ids, results[name].ids, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    figures = runs.comparison_figures(results, timer.medians(), SETTINGS)
    assert figures['tokens'] == sum(map(len, expected.ids))
    assert figures['attainable_speedup'] == pytest.approx(
        figures['tokens_per_call'] / (2 * figures['c'] + figures['cost_of_calls'])
    )
    assert agreement.agreement(target, sources, results['plain'].ids, results['speculative'].ids) == dict(
        greedy_match=1.0, near_ties=[], mismatches=[]
    )


def test_the_mean_cost_of_calls_is_weighed_by_how_many_there_were():
    """One over a row, two over three and one over four, of 10, 12 and 15 ms: (10 + 2 x 12 + 15) / 4 / 10."""
    times = dict(plain_step=0.01, target_call_3_rows=0.012, target_call=0.015, draft_step=0.0)
    stats = Stats(*np.zeros((6, 1)), calls=np.array([1, 0, 2, 1])).replace(
        rounds=4,
        emitted=6,
        accepted=2,
        overlap=2.0,
        tested_at=np.array([3, 1, 0]),
        histogram=np.array([2, 2, 0, 0]),
    )
    plain = runs.Decoded([], stats, 1.0, 0.0, 0.0)
    settings = SETTINGS.decoding(gamma=3)
    figures = runs.comparison_figures(dict(plain=plain, speculative=plain), times, settings)
    assert figures['cost_of_calls'] == pytest.approx(1.225) and figures['cost_of_rows'] == pytest.approx(1.5)
    assert figures['attainable_speedup'] == pytest.approx(6 / 4 / 1.225) and figures['guessed'] == 0.75


def test_a_wrong_token_is_a_mismatch_and_a_tie_is_not(pair, sources):
    target, _ = pair
    plain = runs.decode_lines(sources, SETTINGS, runs.plain_program(target, SETTINGS)).ids
    other = [ids.copy() for ids in plain]
    other[3][1] = (other[3][1] + 1) % 40
    result = agreement.agreement(target, sources, plain, other)
    assert result['greedy_match'] == pytest.approx(0.8)
    (fault,) = result['mismatches']
    assert (fault['line'], fault['position']) == (3, 1) and fault['gap'] > 1e-5

    # Two ids with the same column of the head have the same score: an exact tie.
    token = int(plain[3][1])
    twin = (token + 1) % 40
    head = target.params['head'][...]
    tied = target.replace(params=jax.tree.map(lambda x: x, target.params))
    tied.params['head'] = tied.params['head'].replace(head.at[:, twin].set(head[:, token]))
    result = agreement.agreement(tied, sources, plain, other)
    assert result['greedy_match'] == 1.0 and len(result['near_ties']) == 1
    assert result['near_ties'][0]['gap'] == 0.0


def test_an_output_that_ends_early_is_a_mismatch(pair, sources):
    target, _ = pair
    plain = runs.decode_lines(sources, SETTINGS, runs.plain_program(target, SETTINGS)).ids
    shorter = [ids[:-1] if line == 0 else ids for line, ids in enumerate(plain)]
    (fault,) = agreement.agreement(target, sources, plain, shorter)['mismatches']
    assert fault['speculative'] == -1 and fault['gap'] == float('inf')


def test_ids_without_a_piece_are_kept_out(pair):
    class Tokenizer:
        def __len__(self):
            return 38

    fitted = setup.fit_to_vocabulary(SETTINGS, pair[0], Tokenizer())
    assert fitted.decode.sampling.vocab_limit == 38
    with pytest.raises(ValueError, match='tokenizer of at most 30 pieces'):
        small = dataclasses.replace(CONFIG, vocab_size=30)
        setup.fit_to_vocabulary(SETTINGS, T5.create(small, jax.random.key(0)), Tokenizer())


def test_filler_rows_are_finished_from_the_start(sources):
    batches = list(runs.batches(sources[:3], dataclasses.replace(SETTINGS, batch_size=4)))
    ((batch, inputs, keys),) = batches
    assert sorted(batch.rows.tolist()) == [-1, -1, 0, 1]
    np.testing.assert_array_equal(inputs.mask.any(-1), batch.rows >= 0)
    assert keys.shape == (4,) and inputs.tokens.dtype == jnp.int32


def test_empty_lines_alone_give_empty_outputs(pair):
    target, drafter = pair
    sources = [np.array([1], np.int32)] * 3
    decoded = runs.decode_lines(sources, SETTINGS, runs.speculative_program(target, drafter, SETTINGS))
    assert [len(ids) for ids in decoded.ids] == [0, 0, 0] and decoded.stats.emitted == 0
    assert analysis.acceptance_figures(decoded.stats)['tokens'] == 0
    with pytest.raises(ValueError, match='empty lines alone'):
        runs.compare(sources, SETTINGS, {})
