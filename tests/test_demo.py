"""The shipped pair, and the README's examples of it."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import (
    GREEDY,
    DecodeConfig,
    Inputs,
    SamplingConfig,
    analysis,
    demo,
    generate,
    row_keys,
    speculative_loop,
    stream,
)
from spec_jax.drafters.model import ModelDrafter, check_vocabularies
from spec_jax.measure import agreement, runs, setup
from spec_jax.models.t5_weights import load_t5
from spec_jax.text import data
from spec_jax.text.tokenizers import load_tokenizer, pieces

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def pair():
    return load_t5(demo.TARGET), ModelDrafter(load_t5(demo.DRAFT))


def test_it_is_as_small_as_the_readme_states(pair):
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(model)) for model in pair]
    assert 9e6 < sizes[0] < 25e6 and 1e6 < sizes[1] < 2e6
    files = [path for path in demo.FOLDER.rglob('*.safetensors')]
    assert len(files) == 2 and sum(path.stat().st_size for path in files) < 40e6


def test_target_and_draft_share_a_t5_vocabulary(pair):
    target, draft = load_tokenizer(demo.TARGET), load_tokenizer(demo.DRAFT)
    check_vocabularies(pieces(target), pieces(draft))
    assert (target.pad_token_id, target.eos_token_id, target.unk_token_id) == (0, 1, 2)
    assert 'T5' in type(target).__name__
    assert target('Straße "über" 12').input_ids[-1] == 1
    assert len(target) == pair[0].spec.vocab_size == pair[1].model.spec.vocab_size


def test_it_translates_the_same_both_ways_and_drafts_are_mostly_right(pair):
    target, drafter = pair
    examples = data.read_examples(demo.SENTENCES)
    assert len(examples) == 200
    tokenizer = load_tokenizer(demo.TARGET)
    texts = [example.source for example in examples[:16]]
    sources, _ = data.encode_sources(tokenizer, texts, max_source_length=64)
    settings = setup.Settings(DecodeConfig(3, 48, GREEDY), batch_size=8)
    plain = runs.decode_lines(sources, settings, runs.plain_program(target, settings))
    fast = runs.decode_lines(sources, settings, runs.speculative_program(target, drafter, settings))
    match = agreement.agreement(target, sources, plain.ids, fast.ids)
    assert match['greedy_match'] == 1.0, match
    assert analysis.acceptance_figures(fast.stats)['acceptance_rate'] > 0.4
    assert all(np.isin(ids, range(len(tokenizer))).all() for ids in fast.ids)


def test_the_readmes_examples_run_and_what_is_streamed_is_generates_text():
    """Compiled as users do, not as conftest.py has it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(('JAX_DISABLE_', 'XLA_'))}
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
    code = blocks[0] + next(block for block in blocks if 'in stream(' in block)
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr
    text, *pieces = done.stdout.splitlines()
    assert 'Boston' in text
    streamed = [int(number) for piece in pieces for number in re.findall(r'\d+', piece.partition('dtype')[0])]
    assert len(pieces) > 1 and load_tokenizer(demo.TARGET).decode(streamed, skip_special_tokens=True) in text


@pytest.mark.parametrize('sampling', [GREEDY, SamplingConfig()], ids=['greedy', 'sampled'])
def test_the_pairs_stream_and_its_loop_under_jit_and_vmap_are_generate(pair, sampling):
    target, drafter = (model.for_decoding() for model in (pair[0], pair[1].model))
    drafter, tokenizer = ModelDrafter(drafter), load_tokenizer(demo.TARGET)
    batch = tokenizer(
        ['Tom lives in Boston, and I have not seen him for a long time.', 'I do not know.'],
        return_tensors='np',
        padding=True,
    )
    inputs = Inputs(batch['input_ids'], batch['attention_mask'] == 1)
    config, key = DecodeConfig(3, 24, sampling), jax.random.key(3)
    expected = generate(target, drafter, inputs, key, config)
    rows = [row[:end].tolist() for row, end in zip(np.asarray(expected.tokens), expected.length, strict=True)]
    pieces = list(stream(target, drafter, inputs, key, config, rounds=2))
    assert len(pieces) > 1
    assert [np.concatenate(parts).tolist() for parts in zip(*pieces, strict=True)] == rows

    def program(key):
        return speculative_loop(target, drafter, inputs, row_keys(key, jnp.arange(2)), config=config)

    np.testing.assert_array_equal(jax.jit(program)(key).tokens, expected.tokens)
    keys = jnp.stack([jax.random.key(1), key])
    np.testing.assert_array_equal(jax.jit(jax.vmap(program))(keys).tokens[1], expected.tokens)
