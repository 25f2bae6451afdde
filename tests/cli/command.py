"""What tests of the command share."""

from megatron_ext.cli import main

# What planning for time needs.
COSTS = "--expert-bytes 1000 balance.link_bandwidth=1e9 balance.assignment_time=1e-6"


def run(capsys, *words):
    """Run the command in this process. Returns its status, stdout and stderr."""
    try:
        status = main([str(word) for word in words])
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    return status, output.out, output.err
