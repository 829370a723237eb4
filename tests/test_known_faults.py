"""Faults that users of other systems met, a test for each, named after the symptom.

Inputs are the smallest that show it, and the right values are literal. Each test names the public issues where the
symptom is described; most kinds have a thorough test elsewhere.

Nearly all runs of the loop share two programs: 8 rows, order 2, gamma 4, and a limit of 250 tokens, 50 rounds.

Axes: B rows, G draft length, T tokens of one call, V vocabulary.
"""

import functools
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from safetensors.numpy import load_file

from spec_jax import analysis, decoding
from spec_jax.conformance.tables import ending
from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.draw import fit_vocabulary
from spec_jax.drafters.model import ModelDrafter, check_vocabularies
from spec_jax.exactness.rule import Chain, integrate
from spec_jax.generation import generate, plain_generate
from spec_jax.measure import agreement
from spec_jax.models.t5 import T5
from spec_jax.models.t5_weights import load_t5
from spec_jax.run import report
from spec_jax.sampling import GREEDY, SamplingConfig, logits_to_probs, row_keys, sample
from spec_jax.testing import (
    TableModel,
    chi_square,
    enumerate_round,
    histogram,
    joint,
    next_distributions,
    prompts,
)
from spec_jax.types import Block, Draft, Inputs
from spec_jax.verification import residual_distribution, verify_chain

GOLDEN = pathlib.Path(__file__).parent / 'models' / 'golden'
V, EOS, ROWS, GAMMA, LIMIT = 16, 1, 8, 4, 250
KEY = jax.random.key(0)
ALL = prompts(range(ROWS))
SAMPLED = SamplingConfig()
LONG = list(range(2, 14))


def writer(texts, eos_id=EOS):
    """Row r writes texts[r], then starts again; the last text serves the rows that are left."""
    texts = [*texts, *[texts[-1]] * (ROWS - len(texts))]
    table = TableModel.from_texts(texts, V, eos_id=eos_id).table
    return TableModel(jnp.broadcast_to(table[:, None], (ROWS, V, V, V)), eos_id=eos_id)


def chance(seed, eos_id=EOS):
    """Tables that generate EOS at times, or if eos_id is -1 continue to the limit."""
    return TableModel.random(jax.random.key(seed), V, order=2, num_tables=ROWS, eos_id=eos_id)


def speculate(target, draft, inputs=ALL):
    """Greedy; one program, whether texts end or not."""
    ends, drafter = ending(target, target.eos_id), ModelDrafter(draft.replace(eos_id=-1))
    output = generate(ends, drafter, inputs, KEY, DecodeConfig(GAMMA, LIMIT, GREEDY))
    return jax.tree.map(np.asarray, output)


def texts_of(output):
    return [row[:length].tolist() for row, length in zip(output.tokens, output.length, strict=True)]


@jax.jit
def last_state(target, drafter, inputs, keys, limit):
    """The loop up to `limit` <= 16 tokens, and the target's next token: its state and logits [B, V]."""
    config, limits = DecodeConfig(GAMMA, 16, GREEDY), jnp.full((ROWS,), limit, jnp.int32)
    state = decoding.start(target, drafter, inputs, keys, limits, config=config)
    step = partial(decoding.speculative_step, target, drafter, config=config)
    state = lax.while_loop(decoding.unfinished, step, state)
    empty = Draft(jnp.zeros((ROWS, 0), jnp.int32), None, jnp.zeros((ROWS,), jnp.int32))
    logits, *_ = decoding.target_call(target, state.target_cache, state.context, empty)
    return state, logits[:, 0]


# --- the accept test ----------------------------------------------------------------------------------------


def test_01_the_q_of_the_accept_test_is_what_the_draft_was_sampled_from():
    """huggingface/transformers 32867, 33534: q=[.8, .2] and p=[.6, .4] give [.6, .4], by `verify_chain` itself."""
    p, q, bonus = np.zeros(5, np.float32), np.zeros(5, np.float32), np.full((5, 5), 0.2, np.float32)
    p[:2], q[:2] = (0.6, 0.4), (0.8, 0.2)
    rejected, accepted = enumerate_round([p, bonus], [q])
    np.testing.assert_allclose(rejected[:2], [0, 0.2], atol=1e-7)  # of the 0s one in four fails, for a 1
    np.testing.assert_allclose(accepted.sum(1)[:2], [0.6, 0.2], atol=1e-7)
    errors = integrate([Chain([p, bonus], [q])], with_probs=True)
    assert errors.rules == 10  # 5 drafts, valid or not
    assert errors.emitted < 1e-6 and errors.accepted < 1e-6 and errors.ends == errors.others == 0


# --- where texts end ----------------------------------------------------------------------------------------


def test_02_an_eos_inside_a_block_ends_the_text():
    """huggingface/transformers 47912: EOS in the first, a middle, the last and the bonus place of a block."""
    texts = [[*LONG[:place], EOS, *LONG[place:]] for place in range(ROWS)]
    target = writer(texts)
    output = speculate(target, target)
    assert texts_of(output) == [text[: place + 1] for place, text in enumerate(texts)]
    np.testing.assert_array_equal(output.stats.rounds, [1, 1, 1, 1, 1, 2, 2, 2])  # so it was inside a block
    assert not output.tokens[np.arange(LIMIT) >= output.length[:, None]].any()


def test_03_tokens_after_an_eos_are_not_counted():
    """vllm-project/vllm 56101: of [a, b, EOS, d, e], fully matched, 3 are emitted."""
    target = writer([[2, 3, EOS, 4, 5]])
    stats = speculate(target, target).stats
    for name, count in dict(emitted=3, tested=3, accepted=3, rounds=1).items():
        np.testing.assert_array_equal(getattr(stats, name), count, err_msg=name)
    np.testing.assert_array_equal(stats.histogram[0], [0, 0, 0, 1, 0])
    assert analysis.acceptance_figures(stats)['tokens_per_call'] == 3


def test_04_neither_text_nor_cache_overruns_the_limit():
    """turboderp/exllamav2 274, vllm-project/vllm 24662: limits of 1 .. 2 gamma + 2 tokens."""
    target = chance(1, eos_id=-1)
    drafts = target.replace(table=target.table.at[1].set(chance(2).table[1]))  # row 1 is right at times
    keys = row_keys(KEY, range(ROWS))
    for limit in range(1, 2 * GAMMA + 3):
        end = last_state(target, ModelDrafter(drafts), ALL, keys, limit)
        state, logits = jax.tree.map(np.asarray, (end[0].replace(keys=()), end[1]))
        text = state.context.tokens[:, : limit + 1]  # with the start token
        np.testing.assert_array_equal(state.context.length, limit + 1)
        attention = state.target_cache.self_attention
        np.testing.assert_array_equal(attention.length, limit)
        np.testing.assert_array_equal(attention.values[0][:, 0, 1 : limit + 1, 0], text[:, :-1])
        np.testing.assert_array_equal(
            logits, np.asarray(target.table)[np.arange(ROWS), text[:, -2], text[:, -1]]
        )
        assert state.stats.rounds[0] == -(-limit // (GAMMA + 1))


# --- caches and rows ----------------------------------------------------------------------------------------


def test_05_acceptance_does_not_decay_after_full_acceptance():
    """vllm-project/vllm 5765, 9730: with the target as its own draft 50 rounds of 50 accept all."""
    target = chance(3, eos_id=-1)
    stats = speculate(target, target).stats
    np.testing.assert_array_equal(stats.rounds, 50)
    np.testing.assert_array_equal(stats.histogram, [[0, 0, 0, 0, 50]] * ROWS)


def test_06_uneven_rollback_leaves_no_stale_rows():
    """Blaizzy/mlx-vlm 1155, 2113: acceptances of 0, 2 and gamma in one batch; each row as it is alone."""
    target = writer([LONG], eos_id=-1)
    guesses = writer([LONG[::-1], LONG], eos_id=-1)
    wrong = np.array(LONG[1::3])  # after these the second row guesses 15
    guesses = guesses.replace(table=guesses.table.at[1, :, wrong, 15].set(50.0))
    keys, drafter = row_keys(KEY, range(ROWS)), ModelDrafter(guesses)
    together, logits = last_state(target, drafter, ALL, keys, 12)
    np.testing.assert_array_equal(together.stats.accepted[:3], [0, 8, 10])
    np.testing.assert_array_equal(together.stats.rounds[:3], [12, 4, 3])
    np.testing.assert_array_equal(together.context.tokens[:, 1:13], [LONG] * ROWS)
    np.testing.assert_array_equal(logits, target.table[:, LONG[-2], LONG[-1]])
    for row in range(3):
        inputs = prompts(np.where(np.arange(ROWS) == row, row, -1))
        alone, alone_logits = last_state(target, drafter, inputs, keys, 12)
        np.testing.assert_array_equal(alone_logits[row], logits[row])
        np.testing.assert_array_equal(alone.context.tokens[row, :13], together.context.tokens[row, :13])
        np.testing.assert_array_equal(alone.stats.histogram[row], together.stats.histogram[row])


MANY, TABLES = 20_000, np.arange(20_000) % 2


@functools.cache
def two_kinds_of_rows():
    """A target, and a sampler of 6 tokens from prompts and keys; the draft is never right with table 0."""
    target = TableModel.random(jax.random.key(3), 3, num_tables=2)
    target = target.replace(table=target.table.at[0, :, 2].set(-jnp.inf))
    only_2 = jnp.where(jnp.arange(3) == 2, 0.0, -jnp.inf)
    draft = ModelDrafter(target.replace(table=target.table.at[0].set(only_2)))
    config = DecodeConfig(2, 6, SAMPLED)
    return target, lambda *args: jax.tree.map(np.asarray, generate(target, draft, *args, config))


@pytest.mark.usefixtures('optimised')
def test_07_a_batch_does_not_advance_by_its_minimum():
    """huggingface/transformers 32165, keras-hub's sampler: rows of acceptance 0 and gamma, sampled side by side."""
    target, run = two_kinds_of_rows()
    output = run(prompts(TABLES), KEY)
    never, always = (jax.tree.map(lambda x, kind=kind: x[TABLES == kind], output) for kind in (0, 1))
    np.testing.assert_array_equal(never.stats.accepted, 0)
    np.testing.assert_array_equal(never.stats.rounds, 6)
    np.testing.assert_array_equal(always.stats.accepted, 4)
    np.testing.assert_array_equal(always.stats.rounds, 2)
    p = next_distributions(target, prompts([1]), 6, SAMPLED)
    assert chi_square(histogram(always.tokens, 3), joint(p)) > 1e-4


# --- vocabularies and odd numbers ---------------------------------------------------------------------------


def test_08_vocabularies_that_differ_are_refused_and_padding_is_never_drawn():
    """vllm-project/vllm 5203, 7252; ggml-org/llama.cpp 3812; huggingface/transformers 4875, 9247."""
    pieces = ['<pad>', '</s>', '<unk>', 'a', 'b']
    with pytest.raises(ValueError, match="id 3 is 'a' in the target and 'b' in the draft"):
        check_vocabularies(pieces, [*pieces[:3], 'b', 'a'])
    with pytest.raises(
        ValueError, match="the target has 5 pieces and the draft 6; id 5, 'c', is in the draft only"
    ):
        check_vocabularies(pieces, [*pieces, 'c'])
    logits = np.array([0, 0, 0, 0, 0, 9, 9, 9], np.float32)  # 5 pieces, and 3 rows that have none
    np.testing.assert_allclose(
        logits_to_probs(logits, SamplingConfig(vocab_limit=5)), [0.2] * 5 + [0] * 3, atol=1e-7
    )
    np.testing.assert_array_equal(fit_vocabulary(logits, 5), logits[:5])
    np.testing.assert_array_equal(fit_vocabulary(logits[:5], 8), [0] * 5 + [-np.inf] * 3)


def test_09_equal_and_disjoint_distributions_give_no_nan_and_nan_is_an_error():
    """vllm-project/vllm 21876, 53029: 0 / 0 where p equals q, and NaN that becomes a token."""
    uniform = np.full(4, 0.25, np.float32)
    low, high = np.array([0.5, 0.5, 0, 0], np.float32), np.array([0, 0, 0.5, 0.5], np.float32)
    np.testing.assert_array_equal(residual_distribution(uniform, uniform), uniform)
    np.testing.assert_array_equal(residual_distribution(high, low), high)
    q = jnp.asarray([[uniform], [low], [high]] * 1000)
    p = jnp.asarray([[uniform, uniform], [high, uniform], [high, uniform]] * 1000)
    draft = Draft(jnp.tile(jnp.array([[3], [1], [2]]), (1000, 1)), q, jnp.ones(3000, jnp.int32))
    verified = jax.jit(verify_chain)(p, draft, row_keys(KEY, range(3000)))
    np.testing.assert_array_equal(verified.num_accepted.reshape(-1, 3), [[1, 0, 1]] * 1000)
    assert set(verified.tokens[1::3, 0].tolist()) == {2, 3}

    target = writer([LONG])
    broken = target.replace(table=target.table.at[5, :, LONG[2]].set(jnp.nan))
    with pytest.raises(
        FloatingPointError, match=r'rows \[5\]: expected finite logits from the target, got NaN'
    ):
        speculate(broken, target)
    with pytest.raises(
        FloatingPointError, match=r'rows \[5\]: expected tokens of the vocabulary from the draft'
    ):
        speculate(target, broken)


def test_10_the_residual_never_gives_a_token_of_probability_0():
    """vllm-project/vllm 51367: a one-hot residual at V = 32128, 20,000 draws."""
    q = jnp.full(32_128, 1 / 32_128)
    p = q.at[31_000].add(2**-20)
    residual = residual_distribution(p, q)
    np.testing.assert_array_equal(residual, np.arange(32_128) == 31_000)
    draw = jax.jit(partial(lax.map, lambda key: sample(key[None], residual[None])[0], batch_size=500))
    np.testing.assert_array_equal(draw(row_keys(KEY, range(20_000))), 31_000)


# --- what can be compared -----------------------------------------------------------------------------------


def test_11_near_ties_are_distinguished_from_faults():
    """huggingface/transformers 39421, SafeAILab/EAGLE 212: ids that differ by rounding, and ids that are wrong."""
    table = np.full((1, 8, 8), -20, np.float32)
    table[0, :, 2], table[0, :, 3], table[0, :, 4] = 0, -5e-6, -0.1
    target, sources = TableModel(jnp.asarray(table), eos_id=EOS), [np.array([5, EOS], np.int32)] * 2
    plain = [np.array([2, 2, EOS])] * 2
    tie = agreement.agreement(target, sources, plain, [plain[0], np.array([2, 3, EOS])])
    assert tie['greedy_match'] == 1 and not tie['mismatches']
    (near,) = tie['near_ties']
    assert (near['line'], near['position'], near['plain'], near['speculative']) == (1, 1, 2, 3)
    assert near['gap'] == pytest.approx(5e-6, abs=1e-6)
    wrong = agreement.agreement(target, sources, plain, [plain[0], np.array([2, 4, EOS])])
    assert wrong['greedy_match'] == 0.5 and not wrong['near_ties']
    assert wrong['mismatches'][0]['gap'] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.usefixtures('optimised')
def test_12_a_seed_gives_a_row_the_same_text_in_any_batch():
    """vllm-project/vllm 6038, 9441, 10863: alone among empty rows, in a batch, and in another order."""
    _, run = two_kinds_of_rows()
    keys = row_keys(jax.random.key(4), np.arange(MANY))
    together = run(prompts(TABLES), keys)
    order = np.random.default_rng(0).permutation(MANY)
    shuffled = run(prompts(TABLES[order]), keys[order])
    np.testing.assert_array_equal(shuffled.tokens, together.tokens[order])
    alone = run(prompts(np.where(np.arange(MANY) == 77, TABLES, -1)), keys)
    np.testing.assert_array_equal(alone.length, 6 * (np.arange(MANY) == 77))
    np.testing.assert_array_equal(alone.tokens[77], together.tokens[77])
    assert len(np.unique(together.tokens[TABLES == 1], axis=0)) > 200  # of 729: rows have keys of their own


# --- T5 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def models():
    return {family: load_t5(GOLDEN / family) for family in ('v1_0', 'v1_1')}


def test_13_a_block_at_an_offset_of_the_cache_equals_the_full_forward_pass(models):
    """huggingface/candle 899, google/flax 1317: T5's relative bias and mask for gamma + 1 = 4 tokens after 5."""
    model, tokens = models['v1_1'], jnp.array([[0, 7, 30, 2, 9, 11, 4, 28, 3]])
    inputs = Inputs(jnp.array([[5, 9, 31, 1]]), jnp.ones((1, 4), bool))
    full = jax.jit(T5.forward)(model, inputs, tokens)

    @partial(jax.jit, static_argnums=(1, 2))
    def read(cache, start, end):
        block = Block(tokens[:, start:end], jnp.arange(start, end)[None])
        hidden, _, cache = model.decode(block, cache)
        return model.logits(hidden), model.keep(cache, None, jnp.array([end]))

    _, cache = read(jax.jit(T5.prefill, static_argnums=2)(model, inputs, 10).cache, 0, 5)
    block, _ = read(cache, 5, 9)
    np.testing.assert_allclose(block, full[:, 5:], atol=1e-4)
    assert np.ptp(np.asarray(full), axis=-1).min() > 1  # logits that are not flat


def test_14_a_tied_head_has_its_input_scaled_and_an_untied_one_has_not(models):
    """ml-explore/mlx-examples 591, huggingface/candle 903: d_model ** -0.5 inverted, or left out."""
    hidden = np.random.default_rng(0).normal(size=(1, 1, 16)).astype(np.float32)
    for family, name, scale in ('v1_0', 'shared.weight', 0.25), ('v1_1', 'lm_head.weight', 1.0):
        head = load_file(GOLDEN / family / 'model.safetensors')[name].astype(np.float32)  # [V, D]
        expected = scale * hidden @ head.T
        np.testing.assert_allclose(models[family].logits(jnp.asarray(hidden)), expected, atol=1e-5)


def test_15_float16_is_refused_with_a_hint_at_bfloat16():
    """huggingface/transformers 5651, 9295: T5 overflows in float16."""
    with pytest.raises(ValueError, match='float16; T5 overflows in it, use bfloat16'):
        load_t5(GOLDEN / 'v1_0', 'float16')


# --- figures ------------------------------------------------------------------------------------------------


def test_16_the_summary_states_where_plain_decoding_is_faster():
    """vllm-project/vllm 5000, sgl-project/sglang 4759: gamma 0 is the plain program; a warning below 1."""
    target = chance(4)
    jax.tree.map(
        np.testing.assert_array_equal,
        generate(target, None, ALL, KEY, DecodeConfig(3, 12, GREEDY)),
        plain_generate(target, ALL, KEY, DecodeConfig(0, 12, GREEDY)),
    )
    assert analysis.best_gamma(0.1, 0.2) == 0 and analysis.best_gamma(0.8, 0.05) == 8
    figures = dict(alpha=0.1, c=0.2, cost_of_rows=1.2, predicted_speedup=0.79, attainable_speedup=0.66)
    warning = 'WARNING: slower than plain decoding, '
    message = report.summary(figures).splitlines()[-1]
    assert (
        message
        == warning + 'predicted 0.79 times as fast: no gamma gains with this draft; gamma 0 decodes plainly'
    )
    message = report.summary(figures | dict(alpha=0.4, predicted_speedup=0.99)).splitlines()[-1]
    assert message == warning + 'predicted 0.99 times as fast: gamma 1 suits this draft best'
    message = report.summary(figures | dict(predicted_speedup=1.6, cost_of_rows=3.1)).splitlines()[-1]
    assert message == (
        warning
        + 'at most 0.66 times as fast: a target call over gamma + 1 rows costs 3.1 plain steps, so try a '
        'smaller batch or gamma'
    )
    assert 'WARNING' not in report.summary(figures | dict(predicted_speedup=1.6, attainable_speedup=1.0))
    assert 'WARNING' not in report.summary(dict(lines=3, tokens=70, alpha=0.1))  # nothing was compared


def test_17_acceptance_is_counted_over_tested_tokens_and_can_be_compared():
    """SafeAILab/EAGLE 146, 191: three texts whose counts are made by hand."""
    text = [2, 3, 4, 5, 6, 7, 8, EOS]
    # Row 0 guesses all: 2 3 4 5 and a 6 of the target's own, then 7 8 EOS. Row 1 guesses wrong after 3 and 6:
    # 2 3 and a 4, 5 6 and a 7, then 8 EOS. Row 2 is never right.
    guesses = writer([text, text, [9, 10]])
    guesses = guesses.replace(table=guesses.table.at[1, :, np.array([3, 6]), 15].set(50.0))
    inputs = prompts([0, 1, 2, -1, -1, -1, -1, -1])
    output = speculate(writer([text]), guesses, inputs)
    assert texts_of(output) == [text] * 3 + [[]] * 5
    counts = dict(
        emitted=[8, 8, 8],
        rounds=[2, 3, 8],
        tested=[7, 8, 8],
        accepted=[7, 6, 0],
        histogram=[[0, 0, 0, 1, 1], [0, 0, 3, 0, 0], [8, 0, 0, 0, 0]],
    )
    for name, expected in counts.items():
        np.testing.assert_array_equal(getattr(output.stats, name)[:3], expected, err_msg=name)
        assert not getattr(output.stats, name)[3:].any()
    figures = analysis.acceptance_figures(output.stats)
    assert figures['acceptance_rate'] == pytest.approx(13 / 23) and figures[
        'tokens_per_call'
    ] == pytest.approx(24 / 13)
    assert figures['alpha'] == pytest.approx(13 / 23)  # q one-hot: the overlap is 1 where the guess is right
    assert figures['accepted_histogram'] == [8, 0, 3, 1, 1]
