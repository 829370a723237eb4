"""The files of a tokenizer."""

from spec_jax.text.tokenizers import copy_tokenizer


def test_a_tokenizer_is_copied_without_the_weights(tmp_path):
    source = tmp_path / 'source'
    source.mkdir()
    for name in (
        'tokenizer.json',
        'tokenizer_config.json',
        'spiece.model',
        'config.json',
        'model.safetensors',
    ):
        (source / name).write_text(name)
    copy_tokenizer(source, None, tmp_path / 'copy')
    copied = sorted(path.name for path in (tmp_path / 'copy').iterdir())
    assert copied == ['spiece.model', 'tokenizer.json', 'tokenizer_config.json']
