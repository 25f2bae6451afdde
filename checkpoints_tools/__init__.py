"""Tools for Megatron checkpoints: look inside, check. Needs no GPU and no process group."""

from checkpoints_tools.contents import CheckpointContents, Entry, find_problems, read_contents

__all__ = ["CheckpointContents", "Entry", "find_problems", "read_contents"]
