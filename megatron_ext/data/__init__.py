"""Text in, microbatches out: a Megatron indexed dataset per domain, mixed during training.

    corpus.py     text that every machine has, gathered into folders
    build.py      text files -> one indexed dataset per domain and a manifest
    indexed.py    Megatron's indexed dataset, made and opened
    manifest.py   what a dataset folder holds
    tokenizer.py  bytes, or any Hugging Face tokenizer.json
    mixing.py     indexed datasets -> the microbatches of each data-parallel rank
    files.py      inputs in a stable order, outputs complete or absent

Only `indexed.py` imports Megatron, when it is used.
"""

from megatron_ext.data.build import BuildResult, Skipped, build_dataset, parse_sources
from megatron_ext.data.manifest import Domain, Manifest
from megatron_ext.data.mixing import MIX_BY, SPLITS, MixedDataset, microbatches
from megatron_ext.data.tokenizer import Tokenizer, padded_vocab_size

__all__ = [
    "MIX_BY",
    "SPLITS",
    "BuildResult",
    "Domain",
    "Manifest",
    "MixedDataset",
    "Skipped",
    "Tokenizer",
    "build_dataset",
    "microbatches",
    "padded_vocab_size",
    "parse_sources",
]
