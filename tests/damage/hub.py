"""Damages what `checkpoint import-hf` and `export-hf` read; needs Python 3.12 with Bridge.

By hand: `python -m tests.damage --hugging-face --tries 500`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.cli import main
from megatron_ext.config import ConfigError
from megatron_ext.trainer.compose import load_config
from tests.damage.kinds import objects, pickles, raw, weights
from tests.damage.tries import Answer, Files, Try, call_command, tries

_IMPORT = "checkpoint import-hf hub --out out --json"
_EXPORT = "checkpoint export-hf step_00000000 --like hub --out out --json"

FILES: Files = {
    "hub/config.json": ([objects, objects, raw], (_IMPORT, _EXPORT)),
    "hub/model.safetensors.index.json": ([objects, raw], (_IMPORT, _EXPORT)),
    "hub/model-00001-of-00002.safetensors": ([weights, weights, raw], (_IMPORT, _EXPORT)),
    "hub/model-00002-of-00002.safetensors": ([weights, raw], (_IMPORT,)),
    "hub/tokenizer.json": ([objects, raw], (_EXPORT,)),
    "hub/tokenizer_config.json": ([objects, raw], (_EXPORT,)),
    "hub/generation_config.json": ([objects, raw], (_IMPORT, _EXPORT)),
    "step_00000000/.metadata": ([pickles, raw], (_EXPORT,)),
    "step_00000000/common.pt": ([pickles, raw], (_EXPORT,)),
    "step_00000000/metadata.json": ([objects, raw], (_EXPORT,)),
    "step_00000000/checksums.json": ([objects, raw], (_EXPORT,)),
    "step_00000000/__0_0.distcp": ([raw], (_EXPORT,)),
}
"""What is damaged, how, and the commands that read it."""


def hub_tries(folder: Path, count: int, seed: int, *, limit_s: float) -> Iterator[Try]:
    """Yield `count` tries, as `tests.damage.tries.tries` does."""
    numbers = itertools.count()

    def call(words: str, limit_s: float) -> Answer:
        """Call a command, and let it say which tensors it has written."""
        hub = Path(f"hub_{next(numbers)}")  # Bridge remembers what a folder had.
        Path("hub").rename(hub)
        try:
            status, out, said, seconds = call_command(words.replace(" hub", f" {hub}"), limit_s)
        finally:
            hub.rename("hub")
        if status == 0 and words == _IMPORT:
            try:
                load_config(["data.path=x"], "out", "recipe", needs_data=False)
            except ConfigError as error:
                return None, "", f"wrong recipe: {error}", seconds
        for kind in ("*.distcp", "*.safetensors"):
            for file in sorted(Path("out").rglob(kind)):
                out += f"{file} {hashlib.sha256(file.read_bytes()).hexdigest()}\n"
        return status, out, said, seconds

    yield from tries(folder, count, seed, limit_s=limit_s, files=FILES, make=_make, call=call)


def _make(folder: Path) -> None:
    from tests.trainer.hugging_face.conversions import make

    make("qwen3_moe_bf16", folder)
    assert main(_IMPORT.split()) == 0
    (folder / "out" / "checkpoints" / "step_00000000").rename(folder / "step_00000000")
