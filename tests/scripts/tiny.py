"""What the tests of scripts share: a tiny pair of random weights with its tokenizer, and a way to run many command
lines of a script."""

import atexit
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax
import tokenizers

from spec_jax.models.t5 import T5, T5Config
from spec_jax.models.t5_weights import save_t5

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
HOW_TO_COMPILE = 'XLA_FLAGS', 'JAX_DISABLE_MOST_OPTIMIZATIONS'  # conftest.py sets them
PAIR = (  # what most command lines begin with
    '--config=configs/demo_ende.py',
    '--config.target={w}/target',
    '--config.draft.path={w}/draft',
    '--config.data.path={w}/lines.txt',
)
PROGRESS = re.compile(r'\d\d:\d\d[<,]')  # a bar of tqdm's
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


def run_forked(
    script: pathlib.Path,
    command_lines: Sequence[Sequence[str]],
    home: pathlib.Path,
    optimised: bool = False,
) -> list:
    """[exit code, stdout, stderr] of each command line; what they compile alike is compiled once.

    `optimised` is for those that compute for longer than they compile.
    """
    server = _server(home.parent)
    print(json.dumps([str(script), command_lines, optimised]), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, 'forked.py has ended; its stderr has the reason'
    return json.loads(answer)


@functools.cache
def _server(home: pathlib.Path) -> subprocess.Popen:
    """forked.py, started once, since importing takes longer than most command lines; it ends when we do."""
    server = subprocess.Popen(
        [sys.executable, HERE / 'forked.py'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: os.environ[name] for name in HOW_TO_COMPILE if name in os.environ}
        | {
            'PYTHONPATH': str(ROOT),
            'JAX_PLATFORMS': 'cpu',
            'PATH': '/usr/bin:/bin',
            'HF_HUB_OFFLINE': '1',
            'HOME': str(home),
            'JAX_COMPILATION_CACHE_DIR': str(home / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        },
    )
    atexit.register(server.communicate)
    return server


def runner(script: str | pathlib.Path, world: pathlib.Path, *shared: str) -> Callable:
    """Runs command lines of a script of scripts/, or of a path, as `run_forked` does.

    `shared` come before the arguments of each; `{w}` in any of them stands for `world`.
    """

    def run(*command_lines, **options):
        lines = [[one.format(w=world) for one in [*shared, *extra]] for extra in command_lines]
        return run_forked(ROOT / 'scripts' / script, lines, world, **options)

    return run


def assert_refused(run: Callable, world: pathlib.Path, bad: dict[str, tuple[list[str], str]]) -> None:
    """Each of `bad`, arguments and the expected error, ends in that one line and leaves no files."""
    lines = [[f'--workdir={{w}}/bad{n}', *arguments] for n, (arguments, _) in enumerate(bad.values())]
    for n, ((name, (_, message)), (code, _, err)) in enumerate(zip(bad.items(), run(*lines), strict=True)):
        shown = [line for line in err.splitlines() if line.strip() and not PROGRESS.search(line)]
        assert code == 1, (name, err)
        assert len(shown) == 1 and shown[0].startswith('error: ') and message in shown[0], (name, err)
        folder = world / f'bad{n}'
        assert not folder.exists() or not list(folder.iterdir()), name
