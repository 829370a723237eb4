"""Makes the demo pair's training, validation and test files from LibreOffice's help and Tatoeba.

python scripts/prepare_demo_data.py --libreoffice=DIR --tatoeba=FILE --output=DIR

writes train.tsv, train_tatoeba.tsv (its short sentences alone), {valid,test}_{libreoffice,tatoeba}.tsv and
test_tatoeba_refs.jsonl (all references of each sentence). No held-out sentence is in train, not even with other
capitals or punctuation.
"""

import hashlib
import json
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from absl import app, flags

from spec_jax.text.data import Example, read_examples

LIBREOFFICE = flags.DEFINE_string('libreoffice', None, 'Folder with {train,valid,test}.tsv.', required=True)
TATOEBA = flags.DEFINE_string('tatoeba', None, 'File of Tatoeba pairs: English, tab, German.', required=True)
OUTPUT = flags.DEFINE_string('output', None, 'Folder to write to.', required=True)
NUM_TEST = flags.DEFINE_integer('num_test', 500, 'English sentences of Tatoeba held out as a test set.')
NUM_VALID = flags.DEFINE_integer('num_valid', 300, 'English sentences of Tatoeba held out for validation.')
SEED = flags.DEFINE_string('seed', 'spec_jax', 'Chooses the held-out sentences.')


def read_pairs(path: str | Path) -> list[Example]:
    """Reads a file; every line must have both columns."""
    pairs = read_examples(path, 'tsv')
    for n, pair in enumerate(pairs, 1):
        if not pair.source or not pair.target:
            raise ValueError(
                f'{path}, line {n}: expected English, tab, German; got one of them: mend the line'
            )
    return pairs


def sentence_key(text: str) -> str:
    """The words alone: lower case, no punctuation, single spaces. Sentences of one key count as the same."""
    kept = ''.join(c for c in text.casefold() if not unicodedata.category(c).startswith('P'))
    return ' '.join(kept.split())


def group_by_key(pairs: Iterable[Example]) -> dict[str, list[Example]]:
    """All pairs of each English sentence, sentences and pairs in the order of the file."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[sentence_key(pair.source)].append(pair)
    return groups


def choose_held_out(keys: Iterable[str], count: int, seed: str) -> list[str]:
    """`count` keys of two words or more, by hash: the file is sorted, and its order must not matter."""
    eligible = [key for key in keys if len(key.split()) >= 2]
    if len(eligible) <= count:
        raise ValueError(f'expected more than {count} sentences; got {len(eligible)}: lower num_test')
    return sorted(eligible, key=lambda key: hashlib.sha256(f'{seed} {key}'.encode()).hexdigest())[:count]


def references(group: list[Example]) -> dict:
    """One English sentence, in its first spelling, with all its translations, each once."""
    source = group[0].source
    targets = dict.fromkeys(pair.target for pair in group if pair.source == source)
    return {'source': source, 'targets': list(targets)}


def write_pairs(path: Path, pairs: list[Example]) -> None:
    path.write_text(''.join(f'{pair.source}\t{pair.target}\n' for pair in pairs), encoding='utf-8')
    print(f'{len(pairs):7,} pairs  {path}')


def prepare(libreoffice: Path, tatoeba: str, output: Path, num_test: int, num_valid: int, seed: str) -> None:
    """Reads both sources, holds sentences out and writes the files."""
    manuals = {split: read_pairs(libreoffice / f'{split}.tsv') for split in ('train', 'valid', 'test')}
    groups = group_by_key(read_pairs(tatoeba))
    held_out = choose_held_out(groups, num_test + num_valid, seed)
    test, valid = (
        [references(groups[key]) for key in keys] for keys in (held_out[:num_test], held_out[num_test:])
    )

    short = {pair for group in groups.values() for pair in group}
    unique = dict.fromkeys(manuals['train'] + [pair for group in groups.values() for pair in group])
    forbidden = {sentence_key(pair.source) for pair in manuals['valid'] + manuals['test']}.union(held_out)
    train = [pair for pair in unique if sentence_key(pair.source) not in forbidden]

    output.mkdir(parents=True, exist_ok=True)
    write_pairs(output / 'train.tsv', train)
    write_pairs(output / 'train_tatoeba.tsv', [pair for pair in train if pair in short])
    for split, chosen in (('valid', valid), ('test', test)):
        write_pairs(output / f'{split}_libreoffice.tsv', manuals[split])
        first = [Example(sentence['source'], sentence['targets'][0]) for sentence in chosen]
        write_pairs(output / f'{split}_tatoeba.tsv', first)
    with open(output / 'test_tatoeba_refs.jsonl', 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(sentence, ensure_ascii=False) + '\n' for sentence in test)
    print(f'{len(unique) - len(train):7,} pairs of held-out sentences left out of train')
    several = sum(len(sentence['targets']) > 1 for sentence in test)
    print(f'{several:7,} of the {len(test)} test sentences of Tatoeba have several references')


def main(_) -> None:
    libreoffice, output = Path(LIBREOFFICE.value), Path(OUTPUT.value)
    try:
        prepare(libreoffice, TATOEBA.value, output, NUM_TEST.value, NUM_VALID.value, SEED.value)
    except (ValueError, OSError) as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    app.run(main)
