"""A SentencePiece vocabulary as T5 has it: `<pad>` 0, `</s>` 1, `<unk>` 2, no start token, no sentinels."""

import io
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase

# All that transformers needs. transformers 4 cannot read what save_pretrained of version 5 writes beyond this.
TOKENIZER_CONFIG = {
    'tokenizer_class': 'T5Tokenizer',
    'extra_ids': 0,
    'pad_token': '<pad>',
    'eos_token': '</s>',
    'unk_token': '<unk>',
}


def train_tokenizer(texts: Iterable[str], vocab_size: int, output: str | Path) -> PreTrainedTokenizerBase:
    """Trains a unigram vocabulary and writes a folder that `AutoTokenizer.from_pretrained` loads.

    The folder holds `tokenizer.json` and `tokenizer_config.json`, which transformers reads, and
    `spiece.model`, which SentencePiece and t5x read. Their ids are the same, except for ties between two
    segmentations of a text.

    Args:
      texts: sentences of both languages; every character in them gets a piece.
      vocab_size: number of pieces, the three special ones included.
      output: the folder; created if it does not exist.

    Returns:
      The tokenizer. It ends every sequence with `</s>`.

    Raises:
      ValueError: no text, or too little of it (or too many characters in it) for the size.
    """
    output = Path(output)
    model = train_sentencepiece(texts, vocab_size)
    tokenizer_json = convert_sentencepiece(model)
    output.mkdir(parents=True, exist_ok=True)
    (output / 'spiece.model').write_bytes(model)
    _write_json(output / 'tokenizer.json', tokenizer_json)
    _write_json(output / 'tokenizer_config.json', TOKENIZER_CONFIG)
    return AutoTokenizer.from_pretrained(output)


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a unigram model with T5's special ids and normalisation; returns the serialized model."""
    sentences = [text for text in texts if text.strip()]
    if not sentences:
        raise ValueError('expected text to train a vocabulary on; got none: check the input files')
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type='unigram',
            vocab_size=vocab_size,
            character_coverage=1.0,
            byte_fallback=False,
            normalization_rule_name='nmt_nfkc',
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            pad_piece='<pad>',
            eos_piece='</s>',
            unk_piece='<unk>',
            num_threads=1,  # a sum over threads would make the pieces depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition('] ')[2].strip().rstrip('.')  # after the place in its source code
        raise ValueError(
            f'expected text for {vocab_size} pieces; got from SentencePiece: {reason}'
        ) from error
    return model.getvalue()


def convert_sentencepiece(model: bytes) -> dict:
    """The content of `tokenizer.json` for a SentencePiece model, as transformers converts T5's."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'spiece.model').write_bytes(model)
        _write_json(Path(folder) / 'tokenizer_config.json', TOKENIZER_CONFIG)
        return json.loads(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(',', ':')), encoding='utf-8')
