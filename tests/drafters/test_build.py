"""Drafters by name, and by FILE.py:NAME."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from spec_jax import DecodeConfig, generate, plain_generate
from spec_jax.drafters.build import KINDS, build_drafter
from spec_jax.sampling import GREEDY
from spec_jax.testing import TableModel, prompts

TARGET = TableModel.random(jax.random.key(0), 6, eos_id=1)

OWN = '''
import flax.struct, jax.numpy as jnp
from spec_jax import Draft, DraftShape

@flax.struct.dataclass
class Repeat:
    """Guesses that the last token comes again."""

    times: int = flax.struct.field(pytree_node=False)

    def shape(self, gamma):
        return DraftShape(nodes=gamma, depth=gamma, deterministic=True)

    def init(self, target, prefill, inputs, num_slots):
        return ()

    def propose(self, state, round):
        last, length = round.context.last(1), jnp.full_like(round.context.length, min(round.gamma, self.times))
        return Draft(jnp.repeat(last, round.gamma, axis=1), None, length), state

    def update(self, state, outcome):
        return state

def repeat(config, target, tokenizer):
    return Repeat(config.times)

class Unregistered(Repeat):
    pass

def unregistered(config, target, tokenizer):
    return Unregistered(1)

def nothing(config, target, tokenizer):
    return object()

number = 3
'''


@pytest.fixture
def custom(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text(OWN)
    return file


def build(kind, **keys):
    return build_drafter(ConfigDict(dict(kind=kind, **keys)), TARGET, None, 'float32')


def test_a_drafter_of_ones_own_from_a_file(custom):
    drafter = build(f'{custom}:repeat', times=2)
    assert drafter.times == 2
    inputs, key, config = prompts([0, 1]), jax.random.key(0), DecodeConfig(3, 20, GREEDY)
    output = generate(TARGET, drafter, inputs, key, config)
    np.testing.assert_array_equal(output.tokens, plain_generate(TARGET, inputs, key, config).tokens)


def test_none_is_no_drafter():
    assert build('none') is None


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match='expected one of .*model.*, or FILE.py:NAME; got .guess.') as error:
        build('guess')
    assert all(kind in str(error.value) for kind in KINDS)


def test_an_error_in_a_file_is_one_line(custom, tmp_path):
    broken = tmp_path / 'broken.py'
    broken.write_text('import spec_jax\n1 / 0\n')
    for kind, error, message in [
        (
            f'{tmp_path}/none.py:repeat',
            FileNotFoundError,
            'expected FILE.py:NAME with a Python file, got .*none.py',
        ),
        (f'{tmp_path}:repeat', FileNotFoundError, 'expected FILE.py:NAME'),
        (f'{broken}:repeat', ValueError, 'broken.py: ZeroDivisionError as the file was run'),
        (f'{custom}:other', ValueError, "expected a function 'other' in .*own.py, found none"),
        (f'{custom}:number', ValueError, "expected a function 'number'"),
        (f'{custom}:nothing', ValueError, "got object without 'shape'"),
        (
            f'{custom}:unregistered',
            ValueError,
            'expected a drafter that is a pytree of arrays, got Unregistered',
        ),
    ]:
        with pytest.raises(error, match=message):
            build(kind)
