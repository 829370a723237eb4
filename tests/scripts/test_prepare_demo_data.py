import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MANUALS = {
    'train': 'Open the file.\tÖffnen Sie die Datei.\nSAVE: it\tSpeichern\nGo on.\tWeiter.\n',
    'valid': 'Save it!\tSpeichern Sie.\n',
    'test': 'Print it.\tDrucken.\n',
}
TATOEBA = (
    'Go.\tGeh.\n'
    'Go on.\tWeiter.\n'
    'I know.\tIch weiß.\n'
    'I know.\tIch weiß es.\n'
    'I know!\tIch weiß!\n'
    'We ran.\tWir liefen.\n'
    'print it\tdrucke es\n'
    'You won.\tDu hast gewonnen.\n'
    'You won.\tIhr habt gewonnen.\n'
)


def run(tmp_path, *flags):
    for split, text in MANUALS.items():
        (tmp_path / f'{split}.tsv').write_text(text, encoding='utf-8')
    (tmp_path / 'tatoeba').write_text(TATOEBA, encoding='utf-8')
    paths = [f'--libreoffice={tmp_path}', f'--tatoeba={tmp_path / "tatoeba"}', f'--output={tmp_path / "out"}']
    command = [sys.executable, ROOT / 'scripts' / 'prepare_demo_data.py', *paths, *flags]
    return subprocess.run(command, capture_output=True, text=True, env={'PYTHONPATH': str(ROOT)})


def read(path):
    return [tuple(line.split('\t')) for line in path.read_text(encoding='utf-8').splitlines()]


def words(text):
    return ''.join(c for c in text.lower() if c.isalpha() or c == ' ')


def test_nothing_held_out_stands_in_train(tmp_path):
    done = run(tmp_path, '--num_test=2', '--num_valid=1')
    assert done.returncode == 0, done.stderr
    out = tmp_path / 'out'
    train, test, valid = (read(out / f'{name}.tsv') for name in ('train', 'test_tatoeba', 'valid_tatoeba'))
    assert (len(test), len(valid)) == (2, 1)
    held_out = {words(english) for english, _ in test + valid}
    assert len(held_out) == 3
    held_out |= {'save it', 'print it'}  # the manual's
    assert not held_out & {words(english) for english, _ in train}
    # All else is there, each pair once: 'Go on.' stands in both sources.
    everything = {tuple(line.split('\t')) for line in (MANUALS['train'] + TATOEBA).splitlines()}
    assert sorted(train) == sorted(pair for pair in everything if words(pair[0]) not in held_out)
    assert ('Go.', 'Geh.') in train  # one word is never held out
    assert read(out / 'test_libreoffice.tsv') == [('Print it.', 'Drucken.')]
    assert read(out / 'valid_libreoffice.tsv') == [('Save it!', 'Speichern Sie.')]


def test_the_references_of_a_sentence_stand_side_by_side(tmp_path):
    run(tmp_path, '--num_test=4', '--num_valid=0')
    lines = (tmp_path / 'out' / 'test_tatoeba_refs.jsonl').read_text(encoding='utf-8').splitlines()
    references = {record['source']: record['targets'] for record in map(json.loads, lines)}
    assert len(references) == 4
    several = {
        'I know.': ['Ich weiß.', 'Ich weiß es.'],
        'You won.': ['Du hast gewonnen.', 'Ihr habt gewonnen.'],
    }
    assert {
        source: targets for source, targets in references.items() if len(targets) > 1
    }.items() <= several.items()
    assert read(tmp_path / 'out' / 'test_tatoeba.tsv') == [
        (s, targets[0]) for s, targets in references.items()
    ]


def test_too_small_a_file_is_one_line(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr == 'error: expected more than 800 sentences; got 5: lower num_test\n'
    assert not (tmp_path / 'out').exists()
