"""n-grams as a draft: q by hand and by brute force, the best token, the file, and what `generate` makes of it.

Axes: B rows, G draft length, N contexts, V vocabulary.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding import DecodeConfig
from spec_jax.drafters import ngram
from spec_jax.drafters.base import Round
from spec_jax.generation import generate, plain_generate
from spec_jax.sampling import GREEDY, SamplingConfig, logits_to_probs, row_keys
from spec_jax.testing import TableModel, chi_square, histogram, joint, next_distributions, prompts
from spec_jax.training.ngram import count_ngrams
from spec_jax.types import Context

EOS, V = 1, 6
MIN_COUNTS, MOST = (1, 1, 2, 2), 3


def random_texts(seed=0, size=120):
    """Texts of tokens 1 .. V - 2, each chosen by the two before it, up to EOS; the last id is never seen."""
    random = np.random.default_rng(seed)
    table = random.dirichlet([0.3] * (V - 2), (V, V))
    texts = []
    for _ in range(size):
        text = [0, 0]
        while text[-1] != EOS and len(text) < 10:
            text.append(1 + random.choice(V - 2, p=table[text[-2], text[-1]]))
        texts.append(np.array(text[2:]))
    return texts


COUNTS = count_ngrams(random_texts(), 4, V, MIN_COUNTS, MOST)


def every_context(order, vocab_size=V):
    contexts = itertools.product(range(vocab_size), repeat=order - 1)
    return np.array([*contexts], np.int32).reshape(vocab_size ** (order - 1), order - 1)


def brute_force(texts, order, vocab_size, min_counts, most):
    """q(context) by counting in a dictionary and applying the formula context by context."""
    grams = collections.Counter()
    for text in texts:
        padded = [0] * (order - 1) + list(text)
        for end in range(order, len(padded) + 1):
            grams.update(tuple(padded[end - n : end]) for n in range(1, order + 1))
    successors = collections.defaultdict(list)
    for gram, count in grams.items():
        successors[gram[:-1]].append((-count, gram[-1]))

    @functools.cache
    def q(context):
        shorter = q(context[1:]) if context else np.full(vocab_size, 1 / vocab_size)
        seen = successors.get(context)
        if seen is None:
            return shorter
        divisor = len(seen) - sum(count for count, _ in seen)
        kept = [(-count, token) for count, token in sorted(seen) if -count >= min_counts[len(context)]]
        seen_share = np.zeros(vocab_size)
        for count, token in kept[: most if context else None]:
            seen_share[token] = count / divisor
        return seen_share + (1 - seen_share.sum()) * shorter

    return q


# --- q ------------------------------------------------------------------------------------------------------

# Two texts, 2 3 EOS and 2 2 EOS. c(2) = 3, c(EOS) = 2, c(3) = 1 among six tokens of three kinds, so that
# q(w) = c(w) / 9 + 3 / 9 / 5. After 2 come 2, 3 and EOS, once each: 1 / 6 + q(w) / 2 for these.
BY_HAND = [[2, 3, EOS], [2, 2, EOS]]
UNIGRAM = np.array([3, 13, 18, 8, 3]) / 45


probs_after, best_after = jax.jit(ngram.NgramDrafter.probs_after), jax.jit(ngram.NgramDrafter.best_after)


def dense(drafter, contexts):
    return np.asarray(probs_after(ngram.on_device(drafter), np.asarray(contexts, np.int32)))


def test_q_of_a_text_worked_by_hand():
    counts = count_ngrams(BY_HAND, 2, 5, (1, 1), 9)
    np.testing.assert_allclose(dense(ngram.make_drafter(counts, 1), np.zeros((1, 0)))[0], UNIGRAM, atol=1e-7)
    expected = [
        np.array([3, 13, 108, 8, 3]) / 135,  # the start token, after which 2 comes twice: 2 / 3 + q / 3
        UNIGRAM,  # EOS, after which nothing comes
        np.array([3, 28, 33, 23, 3]) / 90,
        np.array([3, 58, 18, 8, 3]) / 90,  # 3, after which EOS comes once: 1 / 2 + q / 2
        UNIGRAM,
    ]
    np.testing.assert_allclose(
        dense(ngram.make_drafter(counts), [[0], [1], [2], [3], [4]]), expected, atol=1e-7
    )


def test_what_is_pruned_goes_to_the_back_off():
    """Of three equals the smallest id stays when K is 1; 1 / 6 of its own, and 5 / 6 of the unigram's 13 / 45."""
    one = ngram.make_drafter(count_ngrams(BY_HAND, 2, 5, (1, 1), 1))
    expected = np.array([3 / 54, 11 / 27, 18 / 54, 8 / 54, 3 / 54])
    np.testing.assert_allclose(dense(one, [[2]])[0], expected, atol=1e-7)
    twice = ngram.make_drafter(count_ngrams(BY_HAND, 2, 5, (1, 2), 9))
    expected = [UNIGRAM, np.array([3, 13, 108, 8, 3]) / 135]
    np.testing.assert_allclose(dense(twice, [[2], [0]]), expected, atol=1e-7)
    none = ngram.make_drafter(count_ngrams(BY_HAND, 3, 5, (1, 9, 9), 9))
    np.testing.assert_allclose(dense(none, [[0, 2], [2, 3]]), [UNIGRAM, UNIGRAM], atol=1e-7)
    assert none.best_after(np.array([[0, 2], [2, 3]]))[0].tolist() == [2, 2]


@pytest.mark.parametrize('order', [1, 2, 3, 4])
def test_q_is_the_formulas_and_sums_to_1_after_every_context(order):
    """Contexts seen, pruned, unseen and of start tokens; each with every token."""
    q = brute_force(random_texts(), 4, V, MIN_COUNTS, MOST)
    contexts = every_context(order)
    expected = np.array([q(tuple(map(int, context))) for context in contexts])
    drafter = ngram.make_drafter(COUNTS, order)
    rows, tokens = np.repeat(contexts, V, axis=0), np.tile(np.arange(V), len(contexts))
    np.testing.assert_allclose(drafter.prob_of(rows, tokens).reshape(-1, V), expected, rtol=1e-12)
    probs = dense(drafter, contexts)
    np.testing.assert_allclose(probs, expected, rtol=1e-6)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    assert (
        len(np.unique(expected, axis=0)) >= [1, 5, 15, 25][order - 1]
    )  # contexts differ, and many were kept


@pytest.mark.parametrize('order', [1, 2, 3, 4])
def test_the_best_token_is_the_argmax_of_q_and_of_equals_the_smallest(order):
    contexts, q = every_context(order), brute_force(random_texts(), 4, V, MIN_COUNTS, MOST)
    expected = np.array([q(tuple(map(int, context))) for context in contexts])
    best = ngram.make_drafter(COUNTS, order).best_after(contexts)[0]
    np.testing.assert_array_equal(best, (expected > expected.max(-1, keepdims=True) - 1e-12).argmax(-1))
    on_device = best_after(ngram.on_device(ngram.make_drafter(COUNTS, order)), contexts)[0]
    np.testing.assert_array_equal(on_device, best)


def test_of_equally_probable_tokens_the_smallest_id_is_the_best():
    """2 and EOS among the unigrams, 3 and 4 after 2: each pair of equals."""
    drafter = ngram.make_drafter(count_ngrams([[2, 4, EOS], [2, 3, EOS]], 2, 5, (1, 1), 9))
    q = drafter.prob_of(np.repeat([[1], [2]], 5, axis=0), np.tile(np.arange(5), 2)).reshape(2, 5)
    assert q[0, EOS] == q[0, 2] == q[0].max() and q[1, 3] == q[1, 4] == q[1].max()
    assert drafter.best_after(np.array([[1], [2]]))[0].tolist() == [EOS, 3]


def test_the_best_token_may_be_one_that_was_never_seen_after_the_context():
    """3 comes once after 4, and 2 nearly everywhere else: 1 / 2 of q(2) is above 1 / 2 + 1 / 2 q(3) only when
    the share of 3 is small, as where it was pruned."""
    texts = [[2] * 8 + [EOS]] * 9 + [[4, 3, EOS], [4, 5, EOS], [4, EOS]]
    drafter = ngram.make_drafter(count_ngrams(texts, 2, V, (1, 1), 1))
    assert drafter.best_after(np.array([[4], [2], [0]]))[0].tolist() == [2, 2, 2]
    assert dense(drafter, [[4]])[0].argmax() == 2


def test_contexts_of_one_bucket_are_distinguished_and_others_are_not_found():
    """6,000 pairs of tokens, of which half are kept; many share a hash with one that is kept."""
    pairs = np.unique(np.random.default_rng(0).integers(0, 32128, (6000, 2)), axis=0)
    kept, others = pairs[::2], pairs[1::2]
    ones = np.ones(len(kept), np.int64)
    counts = ngram.LevelCounts(kept, 2 * ones, ones, np.arange(len(kept)), ones)
    unigrams = ngram.LevelCounts(np.zeros((1, 0), int), *np.array([[2], [1], [0], [1]]))
    bigrams = ngram.LevelCounts(np.zeros((0, 1), int), *[ones[:0]] * 4)
    level = ngram.make_drafter(ngram.NgramCounts((unigrams, bigrams, counts), 32128)).levels[1]
    assert level.depth > 2
    buckets = len(level.buckets)
    assert np.isin(ngram._hash(others, buckets), ngram._hash(kept, buckets)).sum() > 500
    device = jax.tree.map(jnp.asarray, level)
    for one, find in (level, ngram.Level.find), (device, jax.jit(ngram.Level.find)):
        rows = np.asarray(find(one, kept))
        np.testing.assert_array_equal(level.contexts[rows], kept)
        np.testing.assert_array_equal(level.following(rows)[0][:, 0], np.arange(len(kept)))
        np.testing.assert_array_equal(find(one, others), len(kept))


# --- propose ------------------------------------------------------------------------------------------------

DRAFTER = ngram.on_device(ngram.make_drafter(COUNTS, 3))
TEXT = np.array([[0, 2, 1, 3, 2], [0, 9, 9, 9, 9], [0, 3, 3, 9, 9], [0, 4, 4, 2, 9]], np.int32)
LENGTH = np.array([5, 1, 3, 4], np.int32)


@functools.partial(jax.jit, static_argnames=('gamma', 'sampling', 'vocab_size'))
def propose(drafter, context, keys, gamma=3, sampling=GREEDY, vocab_size=V):
    return drafter.propose((), Round(context, keys, gamma, sampling, vocab_size))[0]


def four_rows():
    context = Context(jnp.asarray(TEXT), jnp.ones(4, jnp.int32), jnp.asarray(LENGTH))
    return context, row_keys(jax.random.key(0), np.arange(4))


def q_after(texts):
    """q [B, V] after texts of any length, with start tokens before them."""
    contexts = [[0, 0, *text][-2:] for text in texts]
    return dense(ngram.make_drafter(COUNTS, 3), contexts)


def test_a_greedy_draft_is_the_argmax_after_the_last_tokens_of_each_row():
    draft = propose(DRAFTER, *four_rows())
    texts = [list(text[:length]) for text, length in zip(TEXT, LENGTH, strict=True)]
    for step in range(3):
        expected = q_after(texts).argmax(-1)
        np.testing.assert_array_equal(draft.tokens[:, step], expected)
        texts = [[*text, token] for text, token in zip(texts, expected, strict=True)]
    assert draft.probs is None and draft.length.tolist() == [3] * 4
    assert len(set(map(tuple, np.asarray(draft.tokens).tolist()))) > 1


@pytest.mark.parametrize(
    ('sampling', 'vocab_size'),
    [
        (SamplingConfig(), V),
        (SamplingConfig(temperature=0.7, top_k=3), V),
        (SamplingConfig(temperature=1.3, top_p=0.8, vocab_limit=4), V + 3),
        (SamplingConfig(), V - 3),
    ],
    ids=str,
)
def test_a_sampled_draft_has_the_q_after_each_of_its_tokens(sampling, vocab_size):
    draft = propose(DRAFTER, *four_rows(), sampling=sampling, vocab_size=vocab_size)
    texts = [list(text[:length]) for text, length in zip(TEXT, LENGTH, strict=True)]
    for step in range(3):
        logits = np.full((4, vocab_size), -np.inf)
        logits[:, :V] = np.log(q_after(texts))[:, :vocab_size]
        expected = np.asarray(logits_to_probs(jnp.asarray(logits), sampling))
        np.testing.assert_allclose(draft.probs[:, step], expected, atol=1e-6)
        token = np.asarray(draft.tokens[:, step])
        assert (np.asarray(draft.probs)[range(4), step, token] > 0).all()
        texts = [[*text, one] for text, one in zip(texts, token, strict=True)]


@pytest.mark.parametrize(('limit', 'vocab_size'), [(2, V), (None, 2), (V, V + 2)])
def test_a_greedy_draft_keeps_to_the_vocabulary(limit, vocab_size):
    draft = propose(
        DRAFTER,
        *four_rows(),
        gamma=1,
        sampling=SamplingConfig(temperature=0, vocab_limit=limit),
        vocab_size=vocab_size,
    )
    texts = [text[:length] for text, length in zip(TEXT, LENGTH, strict=True)]
    allowed = q_after(texts)[:, : min(limit or V, vocab_size)]
    np.testing.assert_array_equal(draft.tokens[:, 0], allowed.argmax(-1))


@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=str)
def test_a_rows_draft_does_not_depend_on_its_neighbours(sampling):
    context, keys = four_rows()
    both = propose(DRAFTER, context, keys, sampling=sampling)
    for row in range(4):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], (context, keys))
        one = propose(DRAFTER, *alone, sampling=sampling)
        jax.tree.map(lambda x, y, row=row: np.testing.assert_array_equal(x[row], y[0]), both, one)


def test_drafts_are_sampled_from_q():
    rows = 20_000
    one = jnp.ones(rows, jnp.int32)
    context = Context(jnp.zeros((rows, 4), jnp.int32), one, one)
    keys = row_keys(jax.random.key(3), np.arange(rows))
    draft = propose(DRAFTER, context, keys, gamma=2, sampling=SamplingConfig())
    expected = q_after([[0]])[0][:, None] * q_after([[0, token] for token in range(V)])
    assert chi_square(histogram(draft.tokens, V), expected) > 0.001


# --- the whole loop -----------------------------------------------------------------------------------------

ALWAYS, CHANCE, SELDOM = range(3)  # how often the draft of a row's table is right


def target():
    """Three tables of order 2: the draft's own q; any; and nearly all on a token that the draft never saw."""
    own_q = np.log(q_after(every_context(3))).reshape(V, V, V)
    model = TableModel.random(jax.random.key(1), V, order=2, num_tables=3, eos_id=EOS)
    table = model.table.at[ALWAYS].set(own_q).at[SELDOM, ..., V - 1].add(6.0)
    return model.replace(table=table)


def test_greedy_output_is_the_targets_own():
    inputs = prompts([ALWAYS, CHANCE, SELDOM] * 2)
    model = target()
    model = model.replace(table=model.table.at[..., EOS].add(-2.0))  # or it ends before anything happens
    config = DecodeConfig(3, 30, GREEDY)
    plain = plain_generate(model, inputs, jax.random.key(0), config)
    output = generate(model, DRAFTER, inputs, jax.random.key(0), config)
    np.testing.assert_array_equal(output.tokens, plain.tokens)
    np.testing.assert_array_equal(output.length, plain.length)
    assert plain.length.max() == 30 and len(set(output.stats.accepted.tolist())) > 1


@pytest.mark.usefixtures('optimised')
def test_rows_of_uneven_acceptance_are_each_distributed_as_their_target():
    kinds = np.resize([ALWAYS, CHANCE, SELDOM], 60_000)
    sampling, model = SamplingConfig(), target()
    config = DecodeConfig(3, 4, sampling)
    output = generate(model, DRAFTER, prompts(kinds), jax.random.key(7), config)
    tokens, stats = np.asarray(output.tokens), jax.tree.map(np.asarray, output.stats)
    rates = [stats.accepted[kinds == kind].sum() / stats.tested[kinds == kind].sum() for kind in range(3)]
    assert rates[ALWAYS] == 1 and 0.2 < rates[CHANCE] < 0.9 and rates[SELDOM] < 0.1
    for kind in range(3):
        p = joint(next_distributions(model, prompts([kind]), 4, sampling), EOS)
        assert chi_square(histogram(tokens[kinds == kind], V), p) > 0.001, kind


# --- memory -------------------------------------------------------------------------------------------------


def num_bytes(drafter):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(ngram.on_device(drafter)))


def test_memory_is_that_of_the_docstring_at_the_largest():
    """Every token of 32128 a context of 32 successors: 9.4 MB, where V x V floats would be 4.1 GB."""
    size, most = 32128, 32
    every = np.ones(size, np.int64)
    unigrams = ngram.LevelCounts(
        np.zeros((1, 0), int), np.array([2 * size]), every[:1] * size, np.arange(size), every
    )
    bigrams = ngram.LevelCounts(
        np.arange(size)[:, None],
        every * 2 * most,
        every * most,
        (np.arange(size)[:, None] + np.arange(most)).ravel() % size,
        np.ones(size * most, int),
    )
    counts = ngram.NgramCounts((unigrams, bigrams), size)
    assert num_bytes(ngram.make_drafter(counts, 1)) == 4 * size + 8
    level = num_bytes(ngram.make_drafter(counts)) - 4 * size - 8
    assert level <= 36 * size + 8 * size * most + 44
    assert level < 9.4e6


@pytest.mark.parametrize('k', [1, 2, 3])
def test_memory_grows_with_the_contexts_and_successors_alone(k):
    drafter = ngram.make_drafter(COUNTS)
    size, successors = len(COUNTS.levels[k].lengths), len(COUNTS.levels[k].counts)
    level = sum(np.asarray(leaf).size * 4 for leaf in jax.tree.leaves(drafter.levels[k - 1]))
    assert level <= (4 * k + 32) * size + 8 * successors + 4 * k + 28


def test_a_greedy_step_makes_no_array_as_wide_as_the_vocabulary():
    wide = count_ngrams(random_texts(), 3, 32128, MIN_COUNTS[:3], MOST)
    drafter = ngram.on_device(ngram.make_drafter(wide))

    def program(sampling):
        return str(
            jax.make_jaxpr(functools.partial(propose, sampling=sampling, vocab_size=32128))(
                drafter, *four_rows()
            )
        )

    assert '4,32128' in program(SamplingConfig())
    assert '4,32128' not in program(GREEDY)


# --- the file -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    ngram.save_ngram(
        tmp_path / 'ngram.npz', dataclasses.replace(COUNTS, fingerprint=ngram.fingerprint('abcdef'))
    )
    return tmp_path / 'ngram.npz'


@pytest.mark.parametrize('order', [1, 2, 3, 4])
def test_a_file_serves_every_order_up_to_its_own(file, order):
    """What is read is what was counted; from the folder too."""
    expected = ngram.on_device(ngram.make_drafter(COUNTS, order))
    for path in file, file.parent:
        jax.tree.map(np.testing.assert_array_equal, ngram.load_ngram(path, order, V, 'abcdef'), expected)
    assert expected.order == order and [level.length for level in expected.levels] == [*range(1, order)]
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize(
    ('order', 'vocab_size', 'pieces', 'message'),
    [
        (5, V, None, 'order: expected 1 to 4, the highest order in .*, got 5; count again'),
        (0, V, None, 'order: expected 1 to 4, .* got 0'),
        (2, V - 1, None, "expected ids below 5, the target's, got counts of 6 pieces; count again"),
        (2, V, 'abcdfe', "expected counts of the target's tokenizer, got those of another of 6 pieces"),
    ],
)
def test_a_file_of_too_few_orders_or_another_vocabulary_is_refused(file, order, vocab_size, pieces, message):
    with pytest.raises(ValueError, match=message):
        ngram.load_ngram(file, order, vocab_size, pieces)


def test_a_file_that_is_not_there(tmp_path):
    for path in tmp_path, tmp_path / 'nowhere.npz':
        with pytest.raises(FileNotFoundError, match='expected a file of n-gram counts, found none'):
            ngram.load_ngram(path, 1, V)


def test_no_damage_goes_unseen(file):
    """Cut anywhere, or with any byte changed: an error of one line, or the same counts as before."""
    whole, expected = file.read_bytes(), ngram.read_ngram(file)
    damaged = [whole[:size] for size in range(0, len(whole), 97)]
    for place in range(0, len(whole), 11):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            came = ngram.read_ngram(file)
        except ValueError as error:
            assert 'expected counts of n-grams, got a damaged or other file' in str(error)
            assert '\n' not in str(error)
            refused += 1
        else:
            jax.tree.map(
                np.testing.assert_array_equal, *(dataclasses.asdict(one) for one in (came, expected))
            )
    assert refused > len(damaged) / 2  # much of so small a file is zip's own, names and dates


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('contexts_1', lambda x: x[:, :-1], r'contexts_1 has shape \(3, 1\), not \(4, 1\)'),
        ('contexts_1', lambda x: 0 * x, 'a context or successor of level 1 comes twice'),
        ('contexts_2', lambda x: np.full_like(x, V), 'an id of level 2 is not below vocab_size 6'),
        ('successors_1', lambda x: np.full_like(x, V), 'an id of level 1 is not below vocab_size 6'),
        ('successors_0', lambda x: np.zeros_like(x), 'a context or successor of level 0 comes twice'),
        ('counts_1', lambda x: x * 100, 'counts_1 leave nothing to the back-off'),
        ('counts_2', lambda x: x * 0, 'lengths_2 or counts_2 do not match'),
        ('denominators_0', lambda x: x.astype(np.float32), 'denominators_0 is of float32'),
        ('lengths_1', lambda x: x + 1, 'lengths_1 or counts_1 do not match'),
        ('vocab_size', lambda x: np.array([1, 2], np.uint8), 'can be converted'),
        ('counts_0', lambda x: np.array([{}], object), 'allow_pickle'),
        ('counts_3', None, 'counts_3'),
        ('contexts_0', None, 'contexts_'),
    ],
)
def test_arrays_that_make_no_distribution_are_refused(file, name, change, message):
    arrays = dict(np.load(file))
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays[name])
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=f'expected counts of n-grams, got a damaged.*{message}'):
        ngram.load_ngram(file, 1, V)


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / 'ngram.npz', weights=np.ones(3))
    (tmp_path / 'text').write_text('no counts at all\n')
    np.save(tmp_path / 'array.npy', np.ones(3, np.uint8))
    for name in 'ngram.npz', 'text', 'array.npy':
        with pytest.raises(ValueError, match='expected counts of n-grams, got a damaged or other file'):
            ngram.load_ngram(tmp_path / name, 1, V)
