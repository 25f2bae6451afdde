"""Importing the package is cheap and needs neither the compiled library nor a process group."""

import subprocess
import sys

CODE = """
import importlib.metadata

def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.distribution = not_installed
import torch
import megatron_ext
import megatron_ext.balance.load
import megatron_ext.balance.metrics
import megatron_ext.balance.plan
import megatron_ext.balance.reroute
import megatron_ext.balance.strategies
import megatron_ext.ops
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert not torch.ops.loaded_libraries
"""


def test_import_loads_nothing():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
