import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from spec_jax.training.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 80
TEXTS = [
    'The bridge is long.',
    'Die Brücke ist lang.',
    'He said: "Good morning, 1234567890!"',
    'Er sagte: „Schöne Grüße, 1234567890!“',
    'She reads a book about the river.',
    'Sie liest ein Buch über den Fluss.',
    'Übung macht den Meister; Ärger auch, Öl nicht.',
    'We write the letters of the alphabet: xyz, jkv, qpf.',
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp('tokenizer') / 'new' / 'folder'
    train_tokenizer(TEXTS, VOCAB_SIZE, output)
    return output


def test_the_folder_loads_as_a_t5_tokenizer_without_a_network(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError('opened a socket')

    monkeypatch.setattr(socket, 'socket', refuse)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__.startswith('T5Tokenizer')
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ['<pad>', '</s>', '<unk>']
    assert tokenizer.bos_token_id is None


def test_the_folder_is_small_and_without_surprises(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {'spiece.model', 'tokenizer.json', 'tokenizer_config.json'}
    assert json.loads((folder / 'tokenizer_config.json').read_text()) == {
        'tokenizer_class': 'T5Tokenizer',
        'extra_ids': 0,
        'pad_token': '<pad>',
        'eos_token': '</s>',
        'unk_token': '<unk>',
    }


def test_text_comes_back_and_ids_are_sentencepieces_own(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / 'spiece.model'))
    assert pieces.get_piece_size() == VOCAB_SIZE
    for text in [*TEXTS, 'Größe 42: „ja“, "no"!']:
        ids = tokenizer(text).input_ids
        assert ids == pieces.encode(text, add_eos=True)
        assert ids[-1] == 1 and ids.count(1) == 1 and 2 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_empty_text_is_eos_and_an_unseen_character_is_unk(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer('').input_ids == [1]
    assert tokenizer('日').input_ids[-2:] == [2, 1]


def test_training_again_gives_the_same_vocabulary(folder, tmp_path):
    train_tokenizer(iter(TEXTS), VOCAB_SIZE, tmp_path)
    for name in ('spiece.model', 'tokenizer.json'):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    'texts, vocab_size, message',
    [
        ([], 80, 'expected text to train a vocabulary on; got none'),
        (['', ' '], 80, 'expected text to train a vocabulary on; got none'),
        (TEXTS, 8000, 'expected text for 8000 pieces; got from SentencePiece: Vocabulary size too high'),
        (TEXTS, 10, 'expected text for 10 pieces; got from SentencePiece: Vocabulary size is smaller than'),
    ],
)
def test_a_vocabulary_that_cannot_be_trained_writes_nothing(tmp_path, texts, vocab_size, message):
    with pytest.raises(ValueError, match=message) as error:
        train_tokenizer(texts, vocab_size, tmp_path / 'tokenizer')
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'tokenizer').exists()


def test_the_script_reads_both_columns(tmp_path):
    lines = [f'{english}\t{german}\n' for english, german in zip(TEXTS[::2], TEXTS[1::2], strict=True)]
    (tmp_path / 'train.tsv').write_text(''.join(lines), encoding='utf-8')
    (tmp_path / 'more.txt').write_text('ç\n', encoding='utf-8')

    def run(inputs):
        flags = [f'--input={inputs}', f'--vocab_size={VOCAB_SIZE}', f'--output={tmp_path / "out"}']
        command = [sys.executable, ROOT / 'scripts' / 'train_tokenizer.py', *flags]
        return subprocess.run(command, capture_output=True, text=True, env={'PYTHONPATH': str(ROOT)})

    failed = run(tmp_path / 'none.tsv')
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith('error: expected a text file')
    assert not (tmp_path / 'out').exists()
    done = run(f'{tmp_path / "train.tsv"},{tmp_path / "more.txt"}')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('80 pieces from 9 texts: ')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert 2 not in tokenizer('bridge Brücke ç').input_ids
