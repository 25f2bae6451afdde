"""Tools for Megatron checkpoints: look inside, check, move experts; without GPU or processes.

Their `path` is a checkpoint, a folder of checkpoints, or a run directory. From a folder the newest
checkpoint is taken. Without one they raise `FileNotFoundError`.
"""

from checkpoints_tools.compare import Comparison, compare
from checkpoints_tools.contents import CheckpointContents, Entry, find_problems, read_contents
from checkpoints_tools.folder import Verdict, verify
from checkpoints_tools.norms import expert_norms
from checkpoints_tools.relayout import Relayout, prepare_relayout, relayout

__all__ = [
    "CheckpointContents",
    "Comparison",
    "Entry",
    "Relayout",
    "Verdict",
    "compare",
    "expert_norms",
    "find_problems",
    "prepare_relayout",
    "read_contents",
    "relayout",
    "verify",
]
