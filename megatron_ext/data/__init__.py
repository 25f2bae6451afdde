"""Text in, microbatches out: a Megatron indexed dataset per domain, mixed during training."""

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
