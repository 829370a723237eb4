"""What a call must read, against closed forms; and a program compiled for real where libtpu is installed."""

import subprocess
import sys

import pytest

from spec_jax.models.load import describe
from spec_jax.tpu import chips, programs

XXL, SMALL = describe('t5-v1_1-xxl'), describe('t5-v1_1-small')


def multiplied(config):
    """Weights that a decoder step multiplies by: self-attention, cross-attention's query and output, MLP, head."""
    inner = config.num_heads * config.d_kv
    layer = 6 * config.d_model * inner + 3 * config.d_model * config.d_ff + 3 * config.d_model
    tables = config.num_buckets * config.num_heads + config.d_model
    return config.num_decoder_layers * layer + config.d_model * config.vocab_size + tables


@pytest.mark.parametrize('shape, millions', [(SMALL, 38.5), (XXL, 5568)])
def test_a_call_reads_each_weight_that_it_multiplies_by_once(shape, millions):
    read = programs.read_bytes(shape, 'bfloat16', slots=0, source_length=0)
    assert read == 2 * multiplied(shape.config)
    assert read / 2e6 == pytest.approx(millions, rel=2e-3)  # as published


def test_caches_of_xxl_take_393_kilobytes_a_position():
    assert XXL.cache_bytes('bfloat16', 1, 0) == 2 * 24 * 64 * 64 * 2 == 393_216
    assert XXL.cache_bytes('bfloat16', 256, 512, batch_size=2) == 2 * 768 * 393_216


def test_chips_share_what_divides():
    """On 8 chips all but norms and tables is split; T5-small's 6 heads are not, nor its caches."""
    whole, share = (programs.weight_bytes(XXL, 'bfloat16', number) for number in (1, 8))
    assert whole == 2 * 11_135_332_352 and whole / 8 < share < whole / 8 * 1.001
    assert XXL.cache_bytes('bfloat16', 8, 0, devices=8) == 393_216
    assert SMALL.cache_bytes('bfloat16', 8, 0, devices=8) == 8 * 2 * 8 * 6 * 64 * 2


@pytest.mark.parametrize(
    'topology, message',
    [
        ('v3', "expected one of v4, v5e, v5p, v6e, or NAME:CHIPS; got 'v3'"),
        ('v5e:3', "expected 1, 4, 8 chips of v5e, got '3'"),
        ('v4:two', "expected 1, 2, 4, 8 chips of v4, got 'two'"),
    ],
)
def test_a_chip_that_is_not_known_is_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        chips.named(topology)


@pytest.mark.slow
def test_t5_small_compiles_for_a_v4_that_is_not_there(tmp_path):
    pytest.importorskip('libtpu')
    script = [sys.executable, 'scripts/tpu_report.py', '--config=configs/t5_pair.py', f'--workdir={tmp_path}']
    overrides = [
        '--config.target=t5-v1_1-small',
        '--config.draft.path=t5-v1_1-small',
        '--config.max_new_tokens=16',
    ]
    done = subprocess.run([*script, *overrides, '--config.gamma=3'], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'fits' in done.stdout and "compiler's estimate, not measured" in done.stdout
    assert (tmp_path / 'tpu_report.png').stat().st_size > 10_000
