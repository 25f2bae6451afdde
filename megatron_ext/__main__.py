"""`python -m megatron_ext`: the `megatron-ext` command."""

import sys

from megatron_ext.cli import main

# Checkpoint writers are spawned and import this file again.
if __name__ == "__main__":
    sys.exit(main())
