"""The shipped pair, and the README's example of it."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from spec_jax import GREEDY, analysis, demo
from spec_jax.decoding import DecodeConfig
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


def test_the_readme_example_runs():
    """Compiled as users do, not as conftest.py has it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(('JAX_DISABLE_', 'XLA_'))}
    code = re.search(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr
    assert 'Boston' in done.stdout
