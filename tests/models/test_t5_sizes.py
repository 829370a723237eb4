"""Sizes by name, against the parameter counts of the released checkpoints."""

import pytest

from spec_jax.models import t5_sizes
from spec_jax.models.t5 import T5


def parameters(config):
    """Weights by the architecture: an embedding, a head of its own where it has one, two stacks."""
    inner, width = config.num_heads * config.d_kv, config.d_model
    mlp = (3 if config.gated else 2) * width * config.d_ff + width  # with its norm
    attention = 4 * width * inner + width
    encoder = config.num_encoder_layers * (attention + mlp) + width
    decoder = config.num_decoder_layers * (2 * attention + mlp) + width
    tables = (1 if config.tied_head else 2) * config.vocab_size * width + 2 * 32 * config.num_heads
    return encoder + decoder + tables


@pytest.mark.parametrize(
    'name, expected',
    {
        'google/t5-v1_1-small': 76_961_152,
        'google/t5-v1_1-base': 247_577_856,
        'google/t5-v1_1-large': 783_150_080,
        'google/t5-v1_1-xl': 2_849_757_184,
        './t5_v1_1_xxl_wmt_ende': 11_135_332_352,
        'google-t5/t5-small': 60_506_624,
        't5-base': 222_903_552,
        't5-large': 737_668_096,
        't5-3b': 2_851_598_336,
        't5-11b': 11_307_321_344,
    }.items(),
)
def test_a_name_gives_the_released_checkpoints_number_of_parameters(name, expected):
    assert parameters(t5_sizes.sized(name)) == expected


@pytest.mark.parametrize(
    'size, millions', dict(small=38.5, base=123.8, large=391.6, xl=1425, xxl=5568).items()
)
def test_parameters_read_by_a_step_of_t5_v1_1(size, millions):
    assert T5({}, t5_sizes.sized(f't5-v1_1-{size}')).parameters_read / 1e6 == pytest.approx(
        millions, rel=1e-3
    )


def test_the_size_of_a_configuration():
    for name in ('small', 'xxl'):
        assert t5_sizes.size_of(t5_sizes.sized(f't5-v1_1-{name}')) == name
    assert t5_sizes.size_of(t5_sizes.sized('t5-11b')) == '11b'


@pytest.mark.parametrize('name', ['./target', 't5', 't5-v1_1-11b', 'bert-large', 't5-smallish'])
def test_a_name_without_a_size_is_refused(name):
    with pytest.raises(ValueError, match='expected a folder with config.json, or a name that tells a size'):
        t5_sizes.sized(name)


def test_a_folder_is_read_before_its_name(tmp_path):
    folder = tmp_path / 't5-large'
    folder.mkdir()
    (folder / 'config.json').write_text('{"model_type": "t5", "d_model": 24, "num_layers": 3}')
    assert (t5_sizes.config_of(folder).d_model, t5_sizes.config_of(folder).num_decoder_layers) == (24, 3)
    assert t5_sizes.config_of(tmp_path / 'none' / 't5-large').d_model == 1024
