"""alpha along given texts, with tables: what should come out is worked out in NumPy along the same text.

All of it has one shape (8 rows, order 2, texts of up to 24 tokens), so that few programs are compiled.

Axes: B rows, N places, R tables, V vocabulary, Z leniences.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import DraftShape
from spec_jax.drafters.model import ModelDrafter
from spec_jax.generation import plain_generate
from spec_jax.measure import acceptance, runs, setup
from spec_jax.run.journal import Journal
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.testing import NanAt, ScriptedDrafter, TableModel, prompts
from spec_jax.types import Draft

V, EOS, ROWS, LIMIT = 16, 1, 8, 24
SAMPLED = SamplingConfig()
SAMPLINGS = {'greedy': GREEDY, 'sampled': SAMPLED}
LENIENCES = (1.0, 0.5, 0.1)
KEYS = row_keys(jax.random.key(5), range(ROWS))


def random_model(seed, scale=1.5):
    """Eight tables of order 2; EOS comes now and then."""
    return TableModel.random(jax.random.key(seed), V, order=2, num_tables=ROWS, scale=scale, eos_id=EOS)


def wide_prompts(rows):
    """As wide as a batch of lines, so that both share their programs."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 15))), prompts(rows))


ALL = wide_prompts(range(ROWS))  # row r reads table r
TARGET, OTHER = random_model(0), random_model(1)
CLOSE = OTHER.replace(table=TARGET.table + 0.5 * OTHER.table)


def texts_of(target, sampling, inputs=ALL, keys=KEYS):
    output = plain_generate(target, inputs, keys, DecodeConfig(0, LIMIT, sampling))
    return output.tokens, output.length


def measured(drafter, texts, length, sampling, target=TARGET, inputs=ALL, keys=KEYS, leniences=LENIENCES):
    return acceptance.measure(
        target, drafter, inputs, texts, length, keys, sampling=sampling, leniences=leniences
    )


def always(token, valid=1):
    """A draft of one token, deterministic."""
    token, valid = (jnp.full((ROWS, LIMIT), value, jnp.int32) for value in (token, valid))
    return ScriptedDrafter(token, lengths=valid)


def places(model, text, row, sampling):
    """The distribution of a table of order 2 at each place of a text, in float64: [N, V]."""
    before = np.array([0, 0, *text], int)
    logits = np.asarray(model.table, np.float64)[row, before[:-2], before[1:-1]]
    if sampling.temperature == 0:
        return np.eye(V)[logits.argmax(-1)]
    exp = np.exp(logits / sampling.temperature)
    return exp / exp.sum(-1, keepdims=True)


def by_hand(target, draft, texts, length, sampling, lenience=1.0):
    """[B] sum over places and tokens of min(p / l, q)."""
    sums = []
    for row, (text, count) in enumerate(zip(np.asarray(texts), np.asarray(length), strict=True)):
        p, q = (places(model, text[:count], row, sampling) for model in (target, draft))
        sums.append(np.minimum(p / lenience, q).sum())
    return np.array(sums)


# --- closed form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('sampling', SAMPLINGS.values(), ids=SAMPLINGS)
def test_overlaps_equal_those_worked_out_along_the_text(sampling):
    """The rows end at different times, and some at the limit."""
    texts, length = texts_of(TARGET, sampling)
    assert len(set(np.asarray(length).tolist())) > 3 and np.max(length) == LIMIT
    for draft in (OTHER, CLOSE):
        sums = measured(ModelDrafter(draft), texts, length, sampling)
        expected = by_hand(TARGET, draft, texts, length, sampling)
        np.testing.assert_allclose(sums.overlap[:, 0], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(sums.tokens, length)
        np.testing.assert_array_equal(sums.proposed, length)
    assert 0 < expected.sum() < np.sum(length)


def test_greedy_overlap_is_the_number_of_agreeing_argmaxes():
    texts, length = texts_of(TARGET, GREEDY)
    agreeing = [
        sum(
            int(token) == places(CLOSE, text[:count], row, GREEDY)[at].argmax()
            for at, token in enumerate(text[:count])
        )
        for row, (text, count) in enumerate(zip(np.asarray(texts), np.asarray(length), strict=True))
    ]
    sums = measured(ModelDrafter(CLOSE), texts, length, GREEDY)
    np.testing.assert_array_equal(sums.overlap[:, 0], agreeing)
    assert 0 < sum(agreeing) < np.sum(length)


@pytest.mark.parametrize('sampling', SAMPLINGS.values(), ids=SAMPLINGS)
def test_alpha_is_1_when_the_draft_is_the_target(sampling):
    texts, length = texts_of(TARGET, sampling)
    sums = measured(ModelDrafter(TARGET), texts, length, sampling)
    np.testing.assert_allclose(sums.overlap[:, 0], length, rtol=1e-6)


def test_lenience_divides_p():
    texts, length = texts_of(TARGET, SAMPLED)
    sums = measured(ModelDrafter(CLOSE), texts, length, SAMPLED)
    for column, lenience in enumerate(LENIENCES):
        expected = by_hand(TARGET, CLOSE, texts, length, SAMPLED, lenience)
        np.testing.assert_allclose(sums.overlap[:, column], expected, rtol=1e-5)


def test_a_deterministic_guess_counts_with_its_probability_where_it_was_made():
    """Row r guesses token r + 2 at each place, but has no guess at the places r, r + 1 and 6."""
    texts, length = texts_of(TARGET, SAMPLED)
    guesses = jnp.broadcast_to(jnp.arange(ROWS)[:, None] + 2, (ROWS, LIMIT))
    no_guess = np.zeros((ROWS, LIMIT), bool)
    no_guess[np.arange(ROWS), np.arange(ROWS)] = no_guess[np.arange(ROWS), np.arange(ROWS) + 1] = True
    no_guess[:, 6] = True
    drafter = ScriptedDrafter(guesses, lengths=jnp.asarray(~no_guess, jnp.int32))
    sums = measured(drafter, texts, length, SAMPLED)
    for row, count in enumerate(np.asarray(length)):
        p = places(TARGET, np.asarray(texts)[row, :count], row, SAMPLED)[:, row + 2]
        with_guess = ~no_guess[row, :count]
        assert sums.proposed[row] == with_guess.sum() and sums.tokens[row] == count
        expected = [np.minimum(p[with_guess] / lenience, 1).sum() for lenience in LENIENCES]
        np.testing.assert_allclose(sums.overlap[row], expected, rtol=1e-5)
    assert np.sum(sums.proposed) < np.sum(length)


def test_a_draft_that_never_guesses_has_no_overlap_and_no_coverage():
    texts, length = texts_of(TARGET, SAMPLED)
    drafter = always(2, valid=0)
    sums = measured(drafter, texts, length, SAMPLED)
    np.testing.assert_array_equal(sums.overlap, 0)
    np.testing.assert_array_equal(sums.proposed, 0)
    np.testing.assert_array_equal(sums.tokens, length)


# --- where texts end ----------------------------------------------------------------------------------------


def test_places_after_a_texts_length_do_not_count():
    """Cut to 0, 1, .., limit tokens; the tokens after it are of another text."""
    texts, length = texts_of(TARGET, SAMPLED)
    cut = jnp.minimum(length, jnp.array([0, 1, 2, 5, 23, 24, 24, 3]))
    spoilt = jnp.where(jnp.arange(LIMIT) < cut[:, None], texts, EOS)
    sums = measured(ModelDrafter(CLOSE), spoilt, cut, SAMPLED)
    np.testing.assert_array_equal(sums.tokens, cut)
    expected = by_hand(TARGET, CLOSE, texts, cut, SAMPLED)
    np.testing.assert_allclose(sums.overlap[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_an_eos_within_the_length_is_a_token_like_any_other():
    """Texts of a target that continues after EOS."""
    forever = TARGET.replace(eos_id=-1)
    texts, length = texts_of(forever, SAMPLED)
    assert np.any(np.asarray(texts)[:, :-1] == EOS) and np.all(np.asarray(length) == LIMIT)
    sums = measured(ModelDrafter(CLOSE), texts, length, SAMPLED)
    np.testing.assert_allclose(sums.overlap[:, 0], by_hand(TARGET, CLOSE, texts, length, SAMPLED), rtol=1e-5)


def test_filler_rows_count_nothing():
    inputs = wide_prompts([0, -1, 2, -1, 4, 5, 6, 7])
    texts, length = texts_of(TARGET, SAMPLED, inputs)
    sums = measured(ModelDrafter(CLOSE), texts, length, SAMPLED, inputs=inputs)
    np.testing.assert_array_equal(sums.tokens, length)
    np.testing.assert_array_equal(np.asarray(sums.overlap)[[1, 3]], 0)


def test_a_row_is_the_same_alone_and_in_another_order():
    texts, length = texts_of(TARGET, SAMPLED)
    together = measured(ModelDrafter(CLOSE), texts, length, SAMPLED)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    shuffled = measured(
        ModelDrafter(CLOSE),
        texts[order],
        length[order],
        SAMPLED,
        inputs=wide_prompts(order),
        keys=KEYS[order],
    )
    jax.tree.map(np.testing.assert_array_equal, shuffled, jax.tree.map(lambda x: x[order], together))
    alone = measured(
        ModelDrafter(CLOSE), texts[5:6], length[5:6], SAMPLED, inputs=wide_prompts([5]), keys=KEYS[5:6]
    )
    np.testing.assert_allclose(alone.overlap[0], together.overlap[5], rtol=1e-6)


# --- what a drafter gets to see -----------------------------------------------------------------------------


@flax.struct.dataclass
class Notebook:
    """Guesses token 2, or -1, which ends the run with an error, unless all that it receives is as specified.

    Its state: the text from its updates, `received` [B, size]; the round; each row's table; what was `sound` [B].
    """

    target: TableModel

    def shape(self, gamma):
        return DraftShape(gamma, gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        batch = inputs.tokens.shape[0]
        return dict(
            received=jnp.zeros((batch, num_slots + 1), jnp.int32),
            round=jnp.zeros((), jnp.int32),
            row=inputs.tokens[:, 0],
            sound=jnp.ones((batch,), bool),
        )

    def propose(self, state, round):
        context = round.context
        unwritten = jnp.arange(state['received'].shape[1]) >= context.length[:, None]
        unseen = jnp.where(unwritten, context.tokens, 0).max(-1) == 0  # nothing of the text to come
        same = (unwritten | (context.tokens == state['received'])).all(-1)
        same &= context.length == state['round'] + 1
        token = jnp.where(unseen & same & state['sound'], 2, -1)[:, None]
        return Draft(token, None, jnp.ones_like(context.length)), state

    def update(self, state, outcome):
        hidden, verified = outcome.hidden, outcome.verification
        at, received, row = state['round'] + 1, state['received'], state['row']
        before, newest = received[:, jnp.maximum(at - 2, 0)], received[:, at - 1]
        # A table's hidden states are its logits: after the newest token, then after the guess.
        table = self.target.table
        sound = (hidden[:, 0] == table[row, before, newest]).all(-1) & (
            hidden[:, 1] == table[row, newest, 2]
        ).all(-1)
        sound &= verified.num_accepted == 0
        received = received.at[:, at].set(verified.tokens[:, 0])
        return dict(received=received, round=at, row=row, sound=sound)


def test_a_drafter_gets_the_targets_tokens_one_by_one_and_never_in_advance():
    texts, length = texts_of(TARGET, SAMPLED)
    sums = measured(Notebook(TARGET), texts, length, SAMPLED)
    expected = [
        places(TARGET, np.asarray(texts)[row, :count], row, SAMPLED)[:, 2].sum()
        for row, count in enumerate(np.asarray(length))
    ]
    np.testing.assert_allclose(sums.overlap[:, 0], expected, rtol=1e-5)


# --- errors -------------------------------------------------------------------------------------------------


def test_faults_of_target_and_draft_are_errors():
    texts, length = texts_of(TARGET, SAMPLED)
    with pytest.raises(FloatingPointError, match=r'rows \[0, 1.*finite logits from the target'):
        measured(ModelDrafter(CLOSE), texts, length, SAMPLED, target=NanAt(TARGET, jnp.int32(1)))
    outside = always(V)
    with pytest.raises(FloatingPointError, match='tokens of the vocabulary from the draft'):
        measured(outside, texts, length, SAMPLED)
    unsound = ScriptedDrafter(jnp.full((1, 1), 2, jnp.int32), jnp.full((1, 1, V), 2 / V))
    with pytest.raises(FloatingPointError, match='probabilities that sum to 1 from the draft'):
        measured(unsound, texts, length, SAMPLED)
    narrow = ScriptedDrafter(jnp.full((1, 1), 2, jnp.int32), jnp.full((1, 1, V - 1), 1 / (V - 1)))
    with pytest.raises(ValueError, match='Draft.probs: expected floating numbers of shape'):
        measured(narrow, texts, length, SAMPLED)


def test_texts_and_leniences_that_do_not_fit_are_refused():
    texts, length = texts_of(TARGET, SAMPLED)
    for bad in ((texts[:7], length), (texts, length[:7]), (texts, length + LIMIT)):
        with pytest.raises(ValueError, match='texts: expected 8 rows with lengths up to their width'):
            measured(ModelDrafter(CLOSE), *bad, SAMPLED)
    with pytest.raises(ValueError, match=r'leniences: expected numbers in \(0, 1\], got 0'):
        measured(ModelDrafter(CLOSE), texts, length, SAMPLED, leniences=(1.0, 0))


# --- lines --------------------------------------------------------------------------------------------------

SETTINGS = setup.Settings(DecodeConfig(1, LIMIT, SAMPLED), batch_size=ROWS)
# The second line is empty; the others read table 2, 3, ... by their first token.
SOURCES = [np.array([row, EOS], np.int32) if row != 1 else np.array([EOS], np.int32) for row in range(20)]


def test_texts_are_the_first_lines_that_give_enough_tokens(monkeypatch):
    monkeypatch.setattr(acceptance, '_BATCHES_AT_ONCE', 1)
    everything = acceptance.target_texts(TARGET, SOURCES, SETTINGS, 0)
    assert list(everything) == [0, *range(2, 20)]
    program = runs.plain_program(TARGET, SETTINGS)
    decoded = runs.decode_lines(SOURCES, SETTINGS, program).ids
    for line, ids in everything.items():
        np.testing.assert_array_equal(ids, decoded[line])
    counts = np.cumsum([len(ids) for ids in everything.values()])
    for wanted, lines in (counts[4], 5), (counts[4] + 1, 6), (1, 1):
        some = acceptance.target_texts(TARGET, SOURCES, SETTINGS, int(wanted))
        assert list(some) == list(everything)[:lines]


def test_lines_measured_before_are_not_measured_again_and_the_batch_does_not_matter(tmp_path):
    texts = acceptance.target_texts(TARGET, SOURCES, SETTINGS, 0)
    drafter = ModelDrafter(CLOSE)
    whole = acceptance.measure_lines(TARGET, drafter, SOURCES, texts, SETTINGS, LENIENCES)
    assert [record['tokens'] for record in whole] == [len(ids) for ids in texts.values()]
    for record, (line, ids) in zip(whole, texts.items(), strict=True):
        p, q = (places(model, ids, line % ROWS, SAMPLED) for model in (TARGET, CLOSE))
        np.testing.assert_allclose(record['overlap'][0], np.minimum(p, q).sum(), rtol=1e-5)

    journal = Journal.open(tmp_path / 'journal', {})
    marked = dict(tokens=7, proposed=7, overlap=[7.0] * 3)
    journal.add([2, 9, 11, 17], [marked] * 4)
    shown = []
    resumed = acceptance.measure_lines(
        TARGET,
        drafter,
        SOURCES,
        texts,
        SETTINGS,
        LENIENCES,
        lambda some: shown.append(len(some)) or some,
        journal,
    )
    assert shown == [2]  # 15 of 19 lines, in batches of 8
    kept = [number for number, line in enumerate(texts) if line in (2, 9, 11, 17)]
    for number, (ours, theirs) in enumerate(zip(resumed, whole, strict=True)):
        if number in kept:
            assert ours == marked
        else:
            np.testing.assert_allclose(ours['overlap'], theirs['overlap'], rtol=1e-6)
    assert Journal.open(tmp_path / 'journal', {}).records.keys() == texts.keys()


# --- figures ------------------------------------------------------------------------------------------------


def test_figures_of_two_texts_by_hand():
    records = [dict(tokens=4, proposed=4, overlap=[3.0, 3.5]), dict(tokens=6, proposed=1, overlap=[1.0, 1.5])]
    figures = acceptance.figures(records, (1.0, 0.5))
    assert figures['alpha'] == 0.4 and figures['lenience'] == {'1': 0.4, '0.5': 0.5}
    assert (figures['tokens'], figures['texts'], figures['coverage']) == (10, 2, 0.5)
    np.testing.assert_allclose(figures['expected_tokens']['3'], 1 + 0.4 + 0.16 + 0.064)
    # Of two texts drawn twice, a quarter of the draws are one text alone.
    np.testing.assert_allclose([figures['low'], figures['high']], [1 / 6, 3 / 4])


def test_the_interval_is_that_of_whole_texts():
    """Equal texts: none at all; n unlike texts: the normal interval of their mean; one: unknown."""
    assert acceptance.bootstrap_interval(np.full(9, 2.0), np.full(9, 4)) == (0.5, 0.5)
    assert acceptance.bootstrap_interval(np.ones(1), np.ones(1)) == (None, None)
    random = np.random.default_rng(0)
    sums = 10 * random.random(400)
    low, high = acceptance.bootstrap_interval(sums, np.full(400, 10))
    half = 1.96 * sums.std() / 10 / 20
    np.testing.assert_allclose([low, high], sums.mean() / 10 + np.array([-half, half]), atol=0.1 * half)
    assert acceptance.bootstrap_interval(sums, np.full(400, 10), seed=1) != (low, high)


def test_the_interval_covers_the_truth_as_often_as_stated():
    """500 samples of 60 texts, of 1 to 19 places each; in the longer texts a guess fits more often."""
    random = np.random.default_rng(0)
    lengths = np.arange(1, 20)
    truth = (lengths * np.where(lengths > 10, 0.8, 0.2)).sum() / lengths.sum()
    hits = 0
    for seed in range(500):
        counts = random.choice(lengths, 60)
        sums = random.binomial(counts, np.where(counts > 10, 0.8, 0.2))
        low, high = acceptance.bootstrap_interval(sums, counts, seed)
        hits += low <= truth <= high
    assert 0.90 <= hits / 500 <= 0.98
