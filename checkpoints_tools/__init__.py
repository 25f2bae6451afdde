"""Tools for Megatron checkpoints: look inside, check, move experts; without GPU or processes."""

from checkpoints_tools.contents import CheckpointContents, Entry, find_problems, read_contents
from checkpoints_tools.relayout import relayout

__all__ = ["CheckpointContents", "Entry", "find_problems", "read_contents", "relayout"]
