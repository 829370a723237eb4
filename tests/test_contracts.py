"""The contracts hold what is to come: prompted models, trees, several EOS ids, features, and parts of a user's own.

Axes: B rows, G draft depth, N nodes of a draft, S prompt length, V vocabulary.
"""

import dataclasses
import importlib.util

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import (
    GREEDY,
    DecodeConfig,
    DraftShape,
    Inputs,
    ModelSpec,
    SamplingConfig,
    generate,
    plain_generate,
)
from spec_jax.drafters.model import ModelDrafter
from spec_jax.sampling import row_keys
from spec_jax.testing import (
    ModelWrapper,
    PromptedTable,
    ScriptedDrafter,
    TableModel,
    chi_square,
    histogram,
    joint,
    next_distributions,
    prompts,
)
from spec_jax.types import Draft, Verification

V, EOS, ROWS, LIMIT = 8, 1, 4, 24
KEY = jax.random.key(0)


def prompted(seed=0, size=V, order=2):
    return PromptedTable(
        TableModel.random(jax.random.key(seed), size, order=order, num_tables=size).table, eos_id=EOS
    )


def blurred(model, seed=9):
    noise = TableModel.random(jax.random.key(seed), model.vocab_size, order=2, num_tables=model.vocab_size)
    return ModelDrafter(model.replace(table=model.table + noise.table))


def ragged(texts, width=6, padding=0):
    """Inputs of texts of several lengths, padded on the right."""
    tokens = np.full((len(texts), width), padding, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Inputs(jnp.asarray(tokens), jnp.arange(width) < jnp.array([[len(text)] for text in texts]))


TEXTS = [[3, 5, 2, 2, 6, 4], [2], [5, 1, 7], [6, 6, 0, 2]]  # an EOS within a prompt ends nothing


# --- a prefilled decoder-only model -----------------------------------------------------------------------------


def continued(model, prompt):
    """The likeliest tokens after a prompt, by the table."""
    table, text = np.asarray(model.table[prompt[0]]), [0, *prompt]
    while len(text) < 1 + len(prompt) + LIMIT and (len(text) == 1 + len(prompt) or text[-1] != EOS):
        text.append(int(table[text[-2], text[-1]].argmax()))
    return text[1 + len(prompt) :]


@pytest.mark.parametrize('gamma', [0, 1, 3, 5])
def test_ragged_prompts_are_continued_as_the_table_says(gamma):
    model = prompted()
    output = generate(model, blurred(model), ragged(TEXTS), KEY, DecodeConfig(gamma, LIMIT, GREEDY))
    for row, prompt in enumerate(TEXTS):
        assert output.tokens[row, : output.length[row]].tolist() == continued(model, prompt)
    if gamma:
        assert 0 < output.stats.accepted.sum() < output.stats.tested.sum()


def test_the_target_as_its_own_draft_has_every_token_accepted_after_a_prompt():
    model = prompted().replace(eos_id=-1)
    output = generate(model, ModelDrafter(model), ragged(TEXTS), KEY, DecodeConfig(3, LIMIT))
    np.testing.assert_array_equal(output.stats.rounds, LIMIT // 4)
    np.testing.assert_array_equal(output.stats.accepted, 3 * LIMIT // 4)


@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=['greedy', 'sampled'])
def test_a_prompt_is_continued_alike_alone_in_a_wider_batch_and_whatever_pads_it(sampling):
    model, keys, config = prompted(), row_keys(KEY, range(ROWS)), DecodeConfig(3, LIMIT, sampling)
    together = generate(model, blurred(model), ragged(TEXTS), keys, config)
    wider = generate(model, blurred(model), ragged(TEXTS, width=9, padding=5), keys, config)
    jax.tree.map(np.testing.assert_array_equal, together, wider)
    for row, text in enumerate(TEXTS):
        alone = generate(model, blurred(model), ragged([text], len(text)), keys[row : row + 1], config)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_a_row_without_a_prompt_is_finished_from_the_start():
    model = prompted()
    inputs = ragged(TEXTS)
    inputs = inputs.replace(mask=inputs.mask & (jnp.arange(ROWS) != 2)[:, None])
    output = generate(model, blurred(model), inputs, KEY, DecodeConfig(3, LIMIT, GREEDY))
    assert output.length[2] == 0 and not output.tokens[2].any() and output.stats.rounds[2] == 0


@pytest.mark.usefixtures('optimised')
@pytest.mark.parametrize('prompt', [[2], [3, 0, 2, 4]])
def test_sampled_continuations_of_a_prompt_are_distributed_as_the_targets(prompt):
    size, rows, sampling = 5, 20_000, SamplingConfig(temperature=0.9)
    model = prompted(3, size)
    inputs = ragged([prompt] * rows, width=5)
    output = generate(model, blurred(model), inputs, KEY, DecodeConfig(2, 4, sampling))
    one = ragged([prompt], width=5)
    exact = joint(next_distributions(model, one, 4, sampling), EOS)
    assert chi_square(histogram(output.tokens, size), exact) > 1e-3
    assert output.stats.accepted.sum() > 0.2 * output.stats.tested.sum()


# --- trees ------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class AsTree:
    """A chain, declared as a tree in which each node follows the one before it."""

    drafter: ModelDrafter

    def shape(self, gamma):
        return self.drafter.shape(gamma)

    def init(self, *args):
        return self.drafter.init(*args)

    def propose(self, state, round):
        draft, state = self.drafter.propose(state, round)
        return draft.replace(parents=tuple(range(-1, round.gamma - 1))), state

    def update(self, state, outcome):
        return self.drafter.update(state, outcome)


@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=['greedy', 'sampled'])
@pytest.mark.parametrize('rows', [1, ROWS])
def test_a_chain_is_a_degenerate_tree(rows, sampling):
    model, config = prompted(), DecodeConfig(3, LIMIT, sampling)
    inputs = ragged(TEXTS[:rows])
    chain = generate(model, blurred(model), inputs, KEY, config)
    tree = generate(model, AsTree(blurred(model)), inputs, KEY, config)
    jax.tree.map(np.testing.assert_array_equal, chain, tree)
    assert chain.stats.accepted.sum() > 0


@flax.struct.dataclass
class Branches:
    """Two chains side by side, of scripts: node 2 i is the i-th token of the first, 2 i + 1 of the second."""

    scripts: tuple[ScriptedDrafter, ScriptedDrafter]

    def shape(self, gamma):
        return DraftShape(nodes=2 * gamma, depth=gamma, deterministic=True)

    def init(self, *args):
        return self.scripts[0].init(*args)

    def propose(self, state, round):
        tokens = jnp.stack([one.propose(state, round)[0].tokens for one in self.scripts], axis=2)  # [B, G, 2]
        nodes = 2 * round.gamma
        parents = (-1, -1, *range(nodes - 2))
        return Draft(tokens.reshape(-1, nodes), None, jnp.full_like(state, nodes), parents), state

    def update(self, state, outcome):
        return state


@dataclasses.dataclass(frozen=True)
class GreedyTree:
    """A rule of a user's own: follows the child that is the target's likeliest token, as long as there is one."""

    name = 'greedy tree'
    lossy = False

    def __call__(self, scores, draft, keys):
        best, parents = scores.best, jnp.array(draft.parents) + 1  # [B, N + 1]; places in the block
        batch, depth = len(best), draft.tokens.shape[1] // 2
        place, alive = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool)
        tokens, nodes, accepted = [], [], jnp.zeros((batch,), jnp.int32)
        for _ in range(depth + 1):
            token = jnp.take_along_axis(best, place[:, None], axis=1)  # [B, 1]
            child = (parents == place[:, None]) & (draft.tokens == token) & alive[:, None]
            alive = child.any(1)
            place = jnp.where(alive, child.argmax(1) + 1, place)
            accepted += alive
            tokens.append(token[:, 0])
            nodes.append(place)
        accepted = jnp.minimum(accepted, depth)
        beta = jnp.zeros((batch, depth), jnp.float32)
        return Verification(accepted, jnp.stack(tokens, axis=1), jnp.stack(nodes, axis=1), beta)


@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('prompted_text', [False, True])
def test_the_accepted_path_of_a_tree_is_kept_whichever_branch_it_is(rows, prompted_text):
    """By turns the first, the second and neither branch is right; a cache off the path would give NaN."""
    model = TableModel.random(jax.random.key(2), V, order=2, num_tables=V)
    inputs = prompts(range(rows))
    if prompted_text:
        model, inputs = PromptedTable(model.table), ragged([[row, 4, 3] for row in range(rows)])
    config = DecodeConfig(3, LIMIT, GREEDY)
    expected = plain_generate(model, inputs, KEY, config)
    texts, turn = np.asarray(expected.tokens), np.arange(LIMIT) // 4 % 3
    scripts = tuple(
        ScriptedDrafter(jnp.asarray(np.where(turn == one, texts, (texts + 1) % V))) for one in (0, 1)
    )
    tree = dataclasses.replace(config, rule=GreedyTree())
    output = generate(model, Branches(scripts), inputs, KEY, tree)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    # Rounds of 4, 4, 1, 1, 1, 1 tokens, and so on.
    np.testing.assert_array_equal(output.stats.rounds, 2 * (1 + 1 + 4))
    np.testing.assert_array_equal(output.stats.histogram, [[8, 0, 0, 4]] * rows)
    np.testing.assert_array_equal(output.stats.calls[:, 6], output.stats.rounds)


@pytest.mark.parametrize('parents', [(-1, 0), (-1, 0, 2), (-2, 0, 1)])
def test_parents_that_are_no_tree_are_refused(parents):
    @flax.struct.dataclass
    class Wrong(AsTree):
        def propose(self, state, round):
            draft, state = self.drafter.propose(state, round)
            return draft.replace(parents=parents), state

    model = prompted()
    with pytest.raises(
        ValueError, match='Draft.parents: expected 3 integers, each from -1 to below its own place'
    ):
        generate(model, Wrong(blurred(model)), ragged(TEXTS), KEY, DecodeConfig(3, LIMIT, GREEDY))


@flax.struct.dataclass
class WithoutQ(AsTree):
    """Samples, and does not say from what."""

    def propose(self, state, round):
        draft, state = self.drafter.propose(state, round)
        return draft.replace(probs=None), state


def test_a_sampled_draft_without_its_distributions_is_refused():
    """Its tokens would be taken for those of a deterministic draft, which is not exact."""
    model = prompted()
    generate(model, WithoutQ(blurred(model)), ragged(TEXTS), KEY, DecodeConfig(3, LIMIT, GREEDY))
    with pytest.raises(
        ValueError, match='Draft.probs: expected the distributions that tokens were sampled from'
    ):
        generate(model, WithoutQ(blurred(model)), ragged(TEXTS), KEY, DecodeConfig(3, LIMIT))


# --- several EOS ids, and ids to stop at ------------------------------------------------------------------------


@flax.struct.dataclass
class TwoEnds(ModelWrapper):
    @property
    def spec(self):
        return dataclasses.replace(self.model.spec, eos_ids=(EOS, 5))


@pytest.mark.parametrize('gamma', [0, 3])
@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=['greedy', 'sampled'])
def test_a_text_ends_at_the_first_of_two_eos_ids_or_of_those_to_stop_at(gamma, sampling):
    model = TableModel.random(jax.random.key(1), V, order=2, num_tables=V)  # whose texts do not end
    inputs, keys = prompts(range(V)), row_keys(KEY, range(V))
    config = DecodeConfig(gamma, LIMIT, sampling)
    whole = generate(model, blurred(model), inputs, keys, config)
    with_two = generate(TwoEnds(model), blurred(model), inputs, keys, config)
    stopped = generate(
        model.replace(eos_id=EOS), blurred(model), inputs, keys, dataclasses.replace(config, stop=(5,))
    )
    jax.tree.map(np.testing.assert_array_equal, with_two, stopped)
    ends = set()
    for row, text in enumerate(np.asarray(whole.tokens).tolist()):
        length = next((at + 1 for at, token in enumerate(text) if token in (EOS, 5)), LIMIT)
        assert with_two.tokens[row].tolist() == text[:length] + [0] * (LIMIT - length)
        ends.add(text[length - 1])
    assert {EOS, 5} <= ends


# --- features ---------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class BestFeature:
    """Guesses the token of the greatest feature at the newest token that the target has read.

    A table's features are its logits, so this is the token that the target has just said: one place late.
    """

    def shape(self, gamma):
        return DraftShape(nodes=gamma, depth=gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        if not target.spec.feature_layers:
            raise ValueError('expected a target with feature_layers, got none; set them')
        size, batch = target.spec.vocab_size, len(prefill.context.length)
        width = size * len(target.spec.feature_layers)
        if prefill.features is None:
            return jnp.zeros((batch, width)), jnp.zeros((batch,), jnp.int32)
        last = jnp.maximum(prefill.context.length - 2, 0)
        return prefill.features[jnp.arange(batch), last], jnp.zeros((batch,), jnp.int32)

    def propose(self, state, round):
        tokens = jnp.repeat(state[0][:, : round.vocab_size].argmax(-1)[:, None], round.gamma, axis=1)
        return Draft(tokens, None, jnp.full((len(tokens),), round.gamma)), state

    def update(self, state, outcome):
        """Counts the rounds in which the features at the last accepted token said what came next."""
        accepted = outcome.verification.num_accepted
        row = jnp.arange(len(accepted))
        features, following = outcome.features[row, accepted], outcome.verification.tokens[row, accepted]
        return features, state[1] + (features[:, : outcome.hidden.shape[-1]].argmax(-1) == following)


def test_a_drafter_gets_the_features_that_the_target_is_asked_for():
    model = prompted().replace(eos_id=-1)
    config = DecodeConfig(2, 8, GREEDY)
    with pytest.raises(ValueError, match='expected a target with feature_layers'):
        generate(model, BestFeature(), ragged(TEXTS), KEY, config)
    asked = model.replace(feature_layers=(0, 3))
    assert asked.spec.feature_layers == (0, 3)
    expected = plain_generate(model, ragged(TEXTS), KEY, config)
    output = generate(asked, BestFeature(), ragged(TEXTS), KEY, config)
    np.testing.assert_array_equal(output.tokens, expected.tokens)

    from spec_jax import speculative_step, start

    state = start(asked, BestFeature(), ragged(TEXTS), row_keys(KEY, range(ROWS)), config=config)
    for row, text in enumerate(TEXTS):  # of the prompt's last token but one, which is read before the loop
        before = [0, *text][-3:-1] if len(text) > 1 else [0, 0]
        expected = asked.table[text[0], before[-2] if len(text) > 1 else 0, before[-1]]
        if len(text) > 1:
            np.testing.assert_array_equal(state.draft_state[0][row], jnp.tile(expected, 2))
    for number in range(1, 4):
        state = speculative_step(asked, BestFeature(), state, config=config)
        np.testing.assert_array_equal(state.draft_state[1], number)


# --- all of it from a file outside the package ------------------------------------------------------------------

OWN = '''
import dataclasses
import flax.struct
import jax
import jax.numpy as jnp
from spec_jax import Context, Draft, DraftShape, ModelSpec, Prefill, TokenRule


@flax.struct.dataclass
class Bigrams:
    """A decoder-only model whose next token depends on the last one alone: it needs no cache."""

    table: jax.Array  # [V, V] logits

    @property
    def spec(self):
        return ModelSpec(vocab_size=len(self.table), eos_ids=(1,), pad_id=0)

    def prefill(self, inputs, num_slots):
        length = jnp.maximum(inputs.mask.sum(-1), 1)
        tokens = jnp.pad(inputs.tokens, ((0, 0), (0, num_slots)))
        return Prefill(Context(tokens, start=length, length=length), cache=())

    def decode(self, block, cache):
        return self.table[block.tokens], None, cache

    def logits(self, hidden):
        return hidden

    def embed(self, tokens):
        return self.table[tokens]

    def keep(self, cache, nodes, length):
        return cache


@flax.struct.dataclass
class Repeat:
    """Guesses that the last token comes again."""

    def shape(self, gamma):
        return DraftShape(nodes=gamma, depth=gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        return ()

    def propose(self, state, round):
        last = round.context.last(1)
        return Draft(jnp.repeat(last, round.gamma, axis=1), None, jnp.full(len(last), round.gamma)), state

    def update(self, state, outcome):
        return state


@dataclasses.dataclass(frozen=True)
class AtMost(TokenRule):
    """The exact rule, on no more than the first few tokens of a draft."""

    number: int = 1
    name = 'at most'

    def __call__(self, scores, draft, keys):
        draft = draft.replace(length=jnp.minimum(draft.length, self.number))
        return super().__call__(scores, draft, keys)
'''


@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=['greedy', 'sampled'])
def test_a_model_a_draft_and_a_rule_of_ones_own_run_through_the_loop(tmp_path, sampling):
    (tmp_path / 'own.py').write_text(OWN)
    spec = importlib.util.spec_from_file_location('own', tmp_path / 'own.py')
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    table = TableModel.random(jax.random.key(0), V).table[0] + 2 * jnp.eye(V)  # tokens tend to come again
    model, inputs = own.Bigrams(table), ragged(TEXTS * 64)
    config = DecodeConfig(3, LIMIT, sampling, rule=own.AtMost(number=2))
    output = generate(model, own.Repeat(), inputs, KEY, config)
    assert output.stats.histogram[:, 3].sum() == 0 and output.stats.histogram[:, 2].sum() > 0
    if sampling == GREEDY:
        np.testing.assert_array_equal(output.tokens, plain_generate(model, inputs, KEY, config).tokens)
    else:
        first = np.asarray(output.tokens)[np.asarray(inputs.tokens)[:, 0] == 2, 0]  # after the prompt [2]
        assert chi_square(np.bincount(first, minlength=V), np.asarray(jax.nn.softmax(table[2]))) > 1e-3


def test_a_spec_is_static():
    assert hash(ModelSpec(5, (1, 2), 0)) == hash(ModelSpec(5, (1, 2), 0))
    assert hash(DecodeConfig(2, 5)) == hash(DecodeConfig(2, 5)) and DecodeConfig(2, 5) != DecodeConfig(3, 5)
