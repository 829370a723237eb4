"""The public sizes of T5, by name: shapes for reports that need no weights.

Source: Raffel et al. 2020, and the released T5 v1.1 checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re

from spec_jax.models.hf_folder import CONFIG
from spec_jax.models.t5 import T5Config
from spec_jax.models.t5_hf import config_from_hf

# d_model, d_ff, heads, layers of encoder and of decoder; head width is 64, but 128 in v1.0's two largest.
_V1_1 = dict(
    small=(512, 1024, 6, 8),
    base=(768, 2048, 12, 12),
    large=(1024, 2816, 16, 24),
    xl=(2048, 5120, 32, 24),
    xxl=(4096, 10240, 64, 24),
)
_V1_0 = {
    'small': (512, 2048, 8, 6),
    'base': (768, 3072, 12, 12),
    'large': (1024, 4096, 16, 24),
    '3b': (1024, 16384, 32, 24),
    '11b': (1024, 65536, 128, 24),
}
_WIDE_HEADS = ('3b', '11b')
_NAME = re.compile(
    r't5[-_]?(?P<version>v1[._-]1)?.*?[-_](?P<size>small|base|large|xxl|xl|3b|11b)(?![a-z0-9])'
)


def sized(name: str) -> T5Config:
    """The configuration for a public name or a folder's name, such as google/t5-v1_1-xxl or t5-small.

    Raises:
      ValueError: the name contains no known size.
    """
    match = _NAME.search(str(name).lower())
    sizes = _V1_1 if match and match['version'] else _V1_0
    if not match or match['size'] not in sizes:
        raise ValueError(
            f'{name}: expected a folder with {CONFIG}, or a name that tells a size, such as t5-v1_1-xxl or '
            't5-small; found neither'
        )
    d_model, d_ff, num_heads, layers = sizes[match['size']]
    config = T5Config(
        d_model=d_model, d_ff=d_ff, num_heads=num_heads, num_encoder_layers=layers, num_decoder_layers=layers
    )
    if match['version']:
        return config
    d_kv = 128 if match['size'] in _WIDE_HEADS else 64
    v1_0 = dict(activation='relu', gated=False, tied_head=True, scale_head_input=True)
    return dataclasses.replace(config, d_kv=d_kv, **v1_0)


def config_of(source: str | os.PathLike) -> T5Config:
    """The configuration of a folder's config.json, or where there is none, of its name (`sized`).

    No weights are read; whether the head is tied is taken from config.json.
    """
    path = pathlib.Path(source).expanduser() / CONFIG
    if not path.is_file():
        return sized(source)
    return config_from_hf(json.loads(path.read_text(encoding='utf-8')), path)


def size_of(config: T5Config) -> str | None:
    """The name of a public size with these widths and layers, such as 'small'; None for any other."""
    sizes = _V1_1 if config.gated else _V1_0
    widths = config.d_model, config.d_ff, config.num_heads, config.num_decoder_layers
    return next((name for name, size in sizes.items() if size == widths), None)
