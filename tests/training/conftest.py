"""A world small enough to be learnt by heart: eight sentences of four words, to be written in capitals."""

import json
import pathlib

import pytest
import tokenizers
from ml_collections import ConfigDict

from spec_jax.training import loop

WORDS = 'a b c d e f g h'.split()
SOURCES = [' '.join(WORDS[(n + k * (1 + n % 2)) % 8] for k in range(4)) for n in range(8)]


@pytest.fixture(scope='session')
def tokenizer_folder(tmp_path_factory) -> pathlib.Path:
    """A word is a piece, so that lengths are known: 19 pieces."""
    folder = tmp_path_factory.mktemp('tokenizer')
    pieces = ['<pad>', '</s>', '<unk>', *WORDS, *(word.upper() for word in WORDS)]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token='<unk>'))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / 'tokenizer.json'))
    names = {'pad_token': '<pad>', 'eos_token': '</s>', 'unk_token': '<unk>'}
    content = {'tokenizer_class': 'PreTrainedTokenizerFast', **names}
    (folder / 'tokenizer_config.json').write_text(json.dumps(content))
    return folder


@pytest.fixture(scope='session')
def pairs_file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('pairs') / 'train.tsv'
    path.write_text(''.join(f'{source}\t{source.upper()}\n' for source in SOURCES))
    return path


@pytest.fixture
def config(tokenizer_folder, pairs_file) -> ConfigDict:
    return make_config(tokenizer_folder, pairs_file)


@pytest.fixture(scope='session')
def finished(tmp_path_factory, tokenizer_folder, pairs_file) -> pathlib.Path:
    """The workdir of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp('finished') / 'workdir'
    config = make_config(tokenizer_folder, pairs_file)
    assert loop.train_model(config, workdir) == config.steps
    return workdir


def make_config(tokenizer_folder: pathlib.Path, pairs_file: pathlib.Path) -> ConfigDict:
    """A step is one batch of eight rows, five tokens and padding. Always the same, so that it is compiled once."""
    return ConfigDict(
        dict(
            seed=0,
            model=dict(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_heads=4,
                num_encoder_layers=1,
                num_decoder_layers=1,
                tied_head=True,
                scale_head_input=True,
                dropout=0.02,
            ),
            tokenizer=str(tokenizer_folder),
            dtype='float32',
            data=dict(
                train=str(pairs_file),
                valid=str(pairs_file),
                prefix='',
                max_source_length=8,
                max_target_length=8,
            ),
            optimizer='adamw',
            peak_learning_rate=1e-2,
            warmup_steps=10,
            decay_fraction=0.25,
            weight_decay=0.01,
            clip=1.0,
            label_smoothing=0.0,
            distill_from='',
            distill_weight=0.0,
            tokens_per_batch=64,
            steps=300,
            eval_every=200,
            eval_bleu_sentences=8,
            eval_batch_size=8,
            checkpoint_every=90,
            export_dtype='float32',
        )
    )
