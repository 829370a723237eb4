"""What the tests of scripts share: a tiny pair of random weights with its tokenizer, and a way to run many command
lines of a script."""

import json
import pathlib
import subprocess
import sys
from functools import partial

import jax
import tokenizers

from spec_jax.models.t5 import T5, T5Config
from spec_jax.models.t5_weights import save_t5

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
# Compiling is nearly all that the scripts do here; this halves it. XLA ends the program at a flag it does not know.
COMPILE_QUICKLY = '--xla_backend_optimization_level=0'
if jax.__version__.startswith('0.10.'):
    COMPILE_QUICKLY += ' --xla_cpu_use_fusion_emitters=false'
WORDS = 'a b c d e f g h i j k l m'.split()
LINES = ['a b c', 'd', '', 'e f g h i j', 'b b b b b b b b b b b b']
CONFIG = T5Config(
    vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
)


def make_model(seed: int) -> T5:
    return jax.jit(partial(T5.create, CONFIG))(jax.random.key(seed))


def save_models(root: pathlib.Path, *names: str) -> None:
    """A folder under `root` for each name, of weights of its own and one vocabulary."""
    for seed, name in enumerate(names):
        save_t5(make_model(seed), root / name)
        write_tokenizer(root / name)


def write_tokenizer(folder: pathlib.Path, words=WORDS) -> None:
    pieces = ['<pad>', '</s>', '<unk>', *words]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token='<unk>')
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='$A </s>', special_tokens=[('</s>', 1)]
    )
    tokenizer.save(str(folder / 'tokenizer.json'))
    names = {'pad_token': '<pad>', 'eos_token': '</s>', 'unk_token': '<unk>'}
    (folder / 'tokenizer_config.json').write_text(
        json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast', **names})
    )


def run_forked(script: pathlib.Path, command_lines, home: pathlib.Path, timeout=900) -> list:
    """[exit code, stdout, stderr] of each command line; what they compile alike is compiled once."""
    done = subprocess.run(
        [sys.executable, HERE / 'forked.py', script],
        input=json.dumps(command_lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
        env={
            'PYTHONPATH': str(ROOT),
            'JAX_PLATFORMS': 'cpu',
            'PATH': '/usr/bin:/bin',
            'HF_HUB_OFFLINE': '1',
            'HOME': str(home),
            'XLA_FLAGS': COMPILE_QUICKLY,
            'JAX_COMPILATION_CACHE_DIR': str(home.parent / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        },
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
