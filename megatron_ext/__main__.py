"""The `megatron-ext` command, also as `python -m megatron_ext`."""

import sys


def main() -> int:
    """Run the command of the process's words.

    Returns:
        The exit status.
    """
    try:
        # Ctrl-C may come while this imports, too.
        from megatron_ext.cli import main as run

        return run()
    except KeyboardInterrupt:  # In a training before there are ranks, whose launcher deals with it.
        import signal

        from megatron_ext.trainer.ranks.signals import exit_status

        return exit_status(signal.SIGINT)


# Checkpoint writers are spawned and import this file again.
if __name__ == "__main__":
    sys.exit(main())
