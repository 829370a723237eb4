"""Prompt lookup: which match is followed, how far, and what that does to the loop.

Texts are written as letters, a token each; '.' is EOS.

Axes: B rows, G draft length, S source length, N length of the token buffer, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters.base import Outcome, Round
from spec_jax.drafters.prompt_lookup import LookupState, PromptLookup
from spec_jax.generation import generate, plain_generate
from spec_jax.models.t5 import T5, T5Config
from spec_jax.sampling import GREEDY, SamplingConfig, row_keys
from spec_jax.testing import TableModel, chi_square, histogram, joint, next_distributions
from spec_jax.types import Context, Inputs, Verification

LETTERS = '^.abcdefghijklmnopqrstuvwxyz'  # ids in this order; ^ is the start token
START, EOS, V = 0, 1, len(LETTERS)
GAMMA, S, N = 3, 16, 20
LOOKUP = PromptLookup()


def ids(text):
    return [LETTERS.index(letter) for letter in text]


def pad(texts, size, fill=0):
    """[B, size] int32 and the lengths [B]; `fill` is a token or an array of the result's shape."""
    tokens = np.broadcast_to(np.asarray(fill, np.int32), (len(texts), size)).copy()
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens, np.array([len(text) for text in texts], np.int32)


def batch(sources, outputs, width=S, buffer=N, start=START, fill=0):
    """Inputs and context of texts given as lists of ids."""
    sources, size = pad(sources, width, fill)
    texts, length = pad([[start, *output] for output in outputs], buffer, fill)
    inputs = Inputs(jnp.asarray(sources), jnp.arange(width) < jnp.asarray(size)[:, None])
    return inputs, context_of(texts, length)


def context_of(texts, length):
    return Context(jnp.asarray(texts), jnp.ones(len(texts), jnp.int32), jnp.asarray(length))


@partial(jax.jit, static_argnames=('gamma', 'vocab_size'))
def propose(drafter, state, context, gamma=GAMMA, vocab_size=V):
    return drafter.propose(state, Round(context, None, gamma, GREEDY, vocab_size))


def proposals(drafter, inputs, context, **options):
    """The tokens that are valid, a list for each row."""
    draft, _ = propose(drafter, drafter.init(None, None, inputs, 0), context, **options)
    return valid(draft)


def valid(draft):
    assert draft.probs is None
    return [row[:size].tolist() for row, size in zip(np.asarray(draft.tokens), draft.length, strict=True)]


# source, output, proposed
TABLE = {
    'three tokens before two': ('bcxxabcdef', 'abc', 'def'),
    'two where three do not match': ('ezbcpqr', 'abc', 'pqr'),
    'one where two do not match': ('czcpqr', 'abc', 'zcp'),
    'never more than three': ('eabcxyzdabcpqr', 'dabc', 'xyz'),
    'no match': ('pqr', 'abc', ''),
    'nothing generated yet': ('pqr', '', ''),
    'one token generated': ('apqr', 'a', 'pqr'),
    'two tokens generated': ('axyabpqr', 'ab', 'pqr'),
    'the source ends after the match, EOS and all': ('abcd.', 'abc', 'd.'),
    'EOS alone is left': ('abc.', 'abc', '.'),
    'a match with nothing after it': ('pqc', 'abc', ''),
    'a shorter match where the longer has nothing after it': ('cxyzabc', 'abc', 'xyz'),
    'the first match of the source before a later one': ('axyzapqr', 'a', 'xyz'),
    'the source before the output': ('apqr.', 'axyza', 'pqr'),
    'the output where its match is longer': ('apqr.', 'baxyzba', 'xyz'),
    'the output where the source has none': ('pqr.', 'axyza', 'xyz'),
    'the most recent of the output': ('.', 'axyzwaxpqrax', 'pqr'),
    'the most recent that gamma tokens follow': ('.', 'axyzwaa', 'xyz'),
    'a text that repeats one token': ('.', 'bbbbbbb', 'bbb'),
    'as many as there are': ('.', 'bcb', 'cb'),
    'the longest match though less follows it': ('.', 'bbb', 'b'),
    'the start token is not what a text begins with': ('axyz^apqr', 'a', 'xyz'),
    'the start token is not text to be found': ('.', 'xy^', ''),
}


def columns():
    """Sources, outputs and proposals of the table, as lists of ids."""
    return [[ids(text) for text in column] for column in zip(*TABLE.values(), strict=True)]


@pytest.mark.parametrize('fill', [0, *ids('abcx')])
def test_what_is_proposed(fill):
    """Stale tokens and padding that would match if they were valid change nothing."""
    sources, outputs, expected = columns()
    got = proposals(LOOKUP, *batch(sources, outputs, fill=fill))
    assert dict(zip(TABLE, got, strict=True)) == dict(zip(TABLE, expected, strict=True))


def test_padding_width_changes_nothing():
    sources, outputs, expected = columns()
    assert proposals(LOOKUP, *batch(sources, outputs, width=25, buffer=33)) == expected


def test_ids_that_the_target_lacks_end_a_proposal():
    inputs, context = batch([ids('abcd'), ids('abzd'), ids('azcd')], [ids('a')] * 3)
    assert proposals(LOOKUP, inputs, context, vocab_size=LETTERS.index('z')) == [ids('bcd'), ids('b'), []]


def outcome(accepted):
    return Outcome(None, Verification(accepted, None, None, None), None)


# --- a reference in plain Python --------------------------------------------------------------------------


def reference(source, output, cursor, gamma, most, fewest):
    """The proposal and where in the source its match ends, None if it is not from there; by trying all."""
    for n in range(min(most, len(output)), fewest - 1, -1):
        suffix = output[len(output) - n :]
        ends = [end for end in range(n - 1, len(source) - 1) if source[end - n + 1 : end + 1] == suffix]
        if ends:
            place = min(ends, key=lambda end: (abs(end - cursor), end))
            return source[place + 1 : place + 1 + gamma], place
        ends = [end for end in range(n - 1, len(output) - 1) if output[end - n + 1 : end + 1] == suffix]
        if ends:
            full = [end for end in ends if end + gamma < len(output)]
            place = max(full) if full else min(ends)
            return output[place + 1 : place + 1 + gamma], None
    return [], None


@pytest.mark.parametrize(('most', 'fewest', 'gamma'), [(3, 1, 3), (4, 2, 5)])
def test_random_texts_of_few_letters_through_several_rounds(most, fewest, gamma):
    """Rows are independent: each has its own text, acceptances and copy position."""
    rows, rounds = 600, 4
    random = np.random.default_rng(most)
    letters = random.integers(2, 5, rows)
    sources = [random.integers(2, 2 + n, random.integers(1, S + 1)).tolist() for n in letters]
    outputs = [random.integers(2, 2 + n, random.integers(0, 6)).tolist() for n in letters]
    drafter = PromptLookup(most, fewest)
    tokens, size = pad(sources, S, fill=random.integers(2, 6, (rows, S)))  # padding that looks like text
    inputs = Inputs(jnp.asarray(tokens), jnp.arange(S) < size[:, None])
    state = drafter.init(None, None, inputs, 0)
    cursors, copied = [0] * rows, 0
    for _ in range(rounds):
        texts = [[START, *output] for output in outputs]
        tokens, length = pad(texts, N + 10, fill=random.integers(2, 6, (rows, N + 10)))
        context = context_of(tokens, length)
        draft, state = propose(drafter, state, context, gamma=gamma)
        accepted = random.integers(0, np.asarray(draft.length) + 1)
        for row, got in enumerate(valid(draft)):
            expected, place = reference(sources[row], outputs[row], cursors[row], gamma, most, fewest)
            assert got == expected, (sources[row], outputs[row], cursors[row])
            if place is not None:
                cursors[row] = place + 1 + accepted[row]
                copied += 1
            outputs[row] = outputs[row] + got[: accepted[row]] + [int(random.integers(2, 2 + letters[row]))]
        state = drafter.update(state, outcome(jnp.asarray(accepted)))
    assert 0.3 * rows * rounds < copied < 0.98 * rows * rounds


# --- in the loop --------------------------------------------------------------------------------------------


def writer(texts, size=V):
    """A target that writes texts[r] to a prompt of first token r; each next token follows from the last two."""
    table = np.zeros((size, size, size, size), np.float32)
    for prompt, text in texts.items():
        seen = [START, START, *ids(text)]
        for before in zip(seen, seen[1:], seen[2:], strict=False):
            table[LETTERS.index(prompt), *before] = 9.0
    return TableModel(jnp.asarray(table), start_id=START, eos_id=EOS)


def test_copies_are_accepted_as_worked_out_by_hand():
    """Three rows. The first copies its source: nothing, then bcd and e, then f and EOS, which ends it.
    The second repeats itself: a, b, c, a; then bca and b; then cab and c.
    The third leaves a copy for another word and takes it up again where it would have been, not at the
    first a: c; then d of dea, and z; then a; then bfg and EOS."""
    sources = ['abcdef.', 'xyz', 'habcdeabfg']
    texts = {'a': 'abcdef.', 'x': 'abcabcabcabca', 'h': 'cdzabfg.'}
    inputs, _ = batch([ids(source) for source in sources], [[]] * 3)
    config = DecodeConfig(GAMMA, 12, GREEDY)
    output = generate(writer(texts), LOOKUP, inputs, jax.random.key(0), config)
    texts_written = [
        row[:size].tolist() for row, size in zip(np.asarray(output.tokens), output.length, strict=True)
    ]
    assert texts_written == [ids('abcdef.'), ids('abcabcabcabc'), ids('cdzabfg.')]
    np.testing.assert_array_equal(output.stats.rounds, [3, 6, 4])
    np.testing.assert_array_equal(output.stats.tested, [5, 6, 5])
    np.testing.assert_array_equal(output.stats.accepted, [5, 6, 4])
    np.testing.assert_array_equal(output.stats.histogram, [[1, 0, 1, 1], [4, 0, 0, 2], [2, 1, 0, 1]])


def test_the_cursor_moves_with_a_copy_from_the_source_alone():
    state = LookupState(None, None, jnp.array([4, 4]), jnp.array([True, False]))
    moved = LOOKUP.update(state, outcome(jnp.array([2, 2])))
    np.testing.assert_array_equal(moved.cursor, [6, 4])


SMALL = 5  # vocabulary
ROWS = 20_000
PROMPTS = [[0, 2, 3, 2, 4, 1], [1, 3, 2], [2, 4, 4, 4]]  # the first token picks the target's table


def test_sampled_texts_are_distributed_as_the_targets_in_an_uneven_batch():
    target = TableModel.random(jax.random.key(0), SMALL, order=2, num_tables=3, eos_id=EOS)
    inputs, _ = batch([PROMPTS[row % 3] for row in range(ROWS)], [[]] * ROWS, width=6)
    sampling = SamplingConfig()
    config = DecodeConfig(2, 4, sampling)
    output = generate(target, LOOKUP, inputs, jax.random.key(1), config)
    for row, prompt in enumerate(PROMPTS):
        one = Inputs(jnp.array([prompt[:1]], jnp.int32), jnp.ones((1, 1), bool))
        exact = joint(next_distributions(target, one, 4, sampling), EOS)
        assert chi_square(histogram(output.tokens[row::3], SMALL), exact) > 0.001
        tested, accepted = (getattr(output.stats, name)[row::3].sum() for name in ('tested', 'accepted'))
        assert 0 < accepted < tested
        # q is one-hot, so the sum of min(p, q) is the probability of acceptance
        deviation = 4 * (0.25 * float(tested)) ** 0.5
        assert float(output.stats.overlap[row::3].sum()) == pytest.approx(float(accepted), abs=deviation)


@pytest.mark.slow
def test_greedy_output_of_a_t5_is_its_own():
    config = T5Config(
        vocab_size=24,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        eos_id=-1,
    )
    model = jax.jit(partial(T5.create, config))(jax.random.key(3))
    target = model.replace(params=jax.tree.map(lambda x: 2 * x, model.params))
    inputs, _ = batch([[5, 6, 7, 8, 9, 5, 6, 1], [3, 4, 1], [7, 7, 7, 7, 1]], [[]] * 3, width=8)
    config = DecodeConfig(GAMMA, 40, GREEDY)
    keys = row_keys(jax.random.key(0), range(3))
    plain = plain_generate(target, inputs, keys, config)
    output = generate(target, LOOKUP, inputs, keys, config)
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    np.testing.assert_array_equal(output.length, 40)
    assert (np.asarray(output.stats.accepted) > 0).all() and (np.asarray(output.stats.rounds) < 40).all()


@pytest.mark.parametrize(('most', 'fewest'), [(0, 0), (2, 3), (3, 0), (-1, 1)])
def test_ngrams_out_of_range_are_refused(most, fewest):
    with pytest.raises(ValueError, match=f'got min_ngram {fewest} and max_ngram {most}'):
        PromptLookup(max_ngram=most, min_ngram=fewest)
