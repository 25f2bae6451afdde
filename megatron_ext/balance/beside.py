"""Runs on a stream of its own what shared experts need not wait for: plan and push.

A plan takes one multiprocessor of a GPU, a push a few, and the shared experts have the others. The
stream first waits for all that the current stream has been given, and the current stream later
waits for it. So its tensors need no `record_stream`: only later work of the stream gets their
memory, and that work waits for every read on the current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run GPU work beside what the current stream gets until `rejoin`; other devices have one."""
    if not has_streams(device):
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def rejoin(device: torch.device) -> None:
    """Make the current stream wait for what was started beside it."""
    if has_streams(device):
        torch.cuda.current_stream(device).wait_stream(_stream(device))


def has_streams(device: torch.device) -> bool:
    """Whether work on the device has an order within its stream only."""
    return device.type == "cuda"


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # Its kernels come first where blocks of both wait: they are small, and others wait for them.
    return torch.cuda.Stream(device, priority=-1)
