"""Makes tests/models/golden: tiny T5 folders and the log-probabilities that transformers gives for them.

    .venv/bin/pip install -r requirements-dev.txt && .venv/bin/python tests/models/make_golden.py

The tests read the folders without torch, and use `hf_tensors` and `reference_log_probs` beside them.
"""

from __future__ import annotations

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GOLDEN = pathlib.Path(__file__).parent / 'golden'

# Heads times head width is not the model width, so that no two axes can be taken for each other.
_SIZES = dict(
    model_type='t5',
    architectures=['T5ForConditionalGeneration'],
    is_encoder_decoder=True,
    vocab_size=32,
    d_model=16,
    d_kv=4,
    d_ff=20,
    num_heads=3,
    num_layers=1,
    num_decoder_layers=2,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
)
V1_0 = dict(_SIZES, feed_forward_proj='relu', tie_word_embeddings=True)
V1_1 = dict(
    _SIZES,
    feed_forward_proj='gated-gelu',
    tie_word_embeddings=False,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)


def hf_tensors(config: dict, seed: int, untied_head: bool) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names; large enough for each to show in the output."""
    rng = np.random.default_rng(seed)
    width, heads = config['d_model'], config['num_heads'] * config['d_kv']
    hidden = ('wi_0', 'wi_1') if config['feed_forward_proj'] == 'gated-gelu' else ('wi',)
    tensors = {}

    def add(name, *shape, std=1.0, mean=0.0):
        tensors[f'{name}.weight'] = (mean + std * rng.normal(size=shape)).astype(np.float32)

    def attention(name):
        for part in 'qkv':
            add(f'{name}.{part}', heads, width, std=width**-0.5)
        add(f'{name}.o', width, heads, std=heads**-0.5)

    def block(name, attentions):
        for i, kind in enumerate(attentions):
            attention(f'{name}.layer.{i}.{kind}')
            add(f'{name}.layer.{i}.layer_norm', width, mean=1, std=0.3)
        last = f'{name}.layer.{len(attentions)}'
        for part in hidden:
            add(f'{last}.DenseReluDense.{part}', config['d_ff'], width, std=width**-0.5)
        add(f'{last}.DenseReluDense.wo', width, config['d_ff'], std=config['d_ff'] ** -0.5)
        add(f'{last}.layer_norm', width, mean=1, std=0.3)

    add('shared', config['vocab_size'], width)
    buckets = config.get('relative_attention_num_buckets', 32)
    for stack, layers, attentions in (
        ('encoder', config['num_layers'], ['SelfAttention']),
        ('decoder', config['num_decoder_layers'], ['SelfAttention', 'EncDecAttention']),
    ):
        for i in range(layers):
            block(f'{stack}.block.{i}', attentions)
        bias = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias'
        add(bias, buckets, config['num_heads'])
        add(f'{stack}.final_layer_norm', width, mean=1, std=0.3)
    if untied_head:
        add('lm_head', config['vocab_size'], width, std=width**-0.5)
    return tensors


def write_folder(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """Writes config.json and model.safetensors as they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config, indent=1) + '\n')
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    return folder


def example(config: dict, seed: int, lengths=(20, 7, 1), decoder_length: int = 24):
    """Ragged sources [B, S], their mask, and decoder inputs [B, T] that start from pad and hold another."""
    rng = np.random.default_rng(seed)
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    source = np.where(mask, rng.integers(1, config['vocab_size'], mask.shape), 0).astype(np.int32)
    decoder_input = rng.integers(1, config['vocab_size'], (len(lengths), decoder_length)).astype(np.int32)
    decoder_input[:, 0] = decoder_input[0, decoder_length // 2] = 0
    return source, mask, decoder_input


def reference_log_probs(folder, source, mask, decoder_input) -> np.ndarray:
    """[B, T, V] float32 by transformers in float32.

    A model built from a config has its head tied for any value in the config; only a file is loaded untied.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(decoder_input, dtype=torch.long),
        ).logits
        return torch.log_softmax(logits, dim=-1).numpy()


def main():
    for name, config, dtype, seed in (('v1_0', V1_0, np.float32, 0), ('v1_1', V1_1, ml_dtypes.bfloat16, 1)):
        tensors = hf_tensors(config, seed, untied_head=not config['tie_word_embeddings'])
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        folder = write_folder(GOLDEN / name, config, tensors)
        source, mask, decoder_input = example(config, seed + 10)
        log_probs = reference_log_probs(folder, source, mask, decoder_input)
        np.savez_compressed(
            folder / 'expected.npz',
            source=source,
            mask=mask,
            decoder_input=decoder_input,
            log_probs=log_probs,
        )


if __name__ == '__main__':
    main()
