"""Finds accesses to the slots that no stream has put in order, by vector clocks on CPU ranks.

On the CPU every operation is done when it is issued, in one order. On a GPU only what a stream has
waited for is done. Here each stream counts its operations, and knows how many of each other stream
are done for sure: of those that it waited for. `Watch` sees every operation of PyTorch on the
slots' memory, and every push and pull, and holds it against what its stream knows. It also sees
which stream takes memory that it has freed while another stream still uses it. `WatchAll` sees
every operation of PyTorch on any memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tick = tuple[str, int]
"""An operation: its stream and its number there."""


class Stream:
    """Of `torch.cuda`: counts its operations, and knows those of others that are done."""

    current: Stream

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.name = name or f"stream {id(self)}"
        self.clock: dict[str, int] = {}
        self.device = torch.device("cpu")

    def tick(self) -> Tick:
        """Count an operation."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def knows(self, tick: Tick) -> bool:
        """Whether an operation is done before the next one of this stream."""
        return self.clock.get(tick[0], 0) >= tick[1]

    def learn(self, clock: dict[str, int]) -> None:
        """Wait for what another stream, or an event, knew."""
        for name, number in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), number)

    def wait_stream(self, other: Any) -> None:
        # Megatron keeps a stream for all layers, which may be older or live longer than the block.
        self.learn(getattr(other, "clock", {}))

    def wait_event(self, event: Any) -> None:
        self.learn(getattr(event, "clock", {}))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...


class Event:
    """Of `torch.cuda`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        stream.tick()
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.current).learn(self.clock)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    before = Stream.current
    if stream is not None:
        Stream.current = stream if isinstance(stream, Stream) else Stream()
    try:
        yield
    finally:
        Stream.current = before


@contextmanager
def clocked_streams() -> Iterator[None]:
    """Let `torch.cuda` have such streams and events, and Megatron's schedule make new ones."""
    from megatron.core.pipeline_parallel import utils

    Stream.current = Stream(name="compute")
    values = dict(
        Stream=Stream, Event=Event, stream=_on, current_stream=lambda device=None: Stream.current
    )
    with (
        mock.patch.multiple(torch.cuda, **values),
        mock.patch.multiple(utils, _COMP_STREAM=None, _COMM_STREAM=None),
    ):
        yield


@dataclass
class Memory:
    """Some memory, and the operations on it since its last write."""

    name: str
    written: tuple[Tick, str] | None = None
    read: list[tuple[Tick, str]] = field(default_factory=list)


@dataclass
class Block:
    """Memory that an operation has allocated, and the last use of it by each stream."""

    allocated: str
    used: dict[str, tuple[int, str]] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class Freed:
    """Memory as PyTorch's allocator for GPUs has it: freed, it is its stream's again at once.

    Attributes:
        num_freed: Blocks that another stream than their own has used.
        errors: What a stream may overwrite though another stream still uses it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._freed: dict[str, list[Block]] = {}
        self.num_freed = 0
        self.errors: list[str] = []

    def allocate(self, tensors: Iterable[Tensor], stream: Stream, what: str) -> None:
        """Note memory that an operation of a stream has made, if it is new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._blocks:
                continue
            for block in self._freed.pop(stream.name, []):
                self.errors += [
                    f"what {block.allocated} allocated is memory for {what} while {use} reads it"
                    for other, (number, use) in block.used.items()
                    if not stream.knows((other, number))
                ]
            block = self._blocks[storage._cdata] = Block(f"{what} on {stream.name}")
            weakref.finalize(storage, self._free, storage._cdata, stream.name)

    def use(self, tensors: Iterable[Tensor], tick: Tick, what: str) -> None:
        """Note a use of some memory, if it was allocated here."""
        for tensor in tensors:
            if block := self._blocks.get(tensor.untyped_storage()._cdata):
                block.used[tick[0]] = (tick[1], what)

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Let memory wait for a stream's uses of it: `Tensor.record_stream`."""
        if block := self._blocks.get(tensor.untyped_storage()._cdata):
            block.recorded.add(stream.name)

    def _free(self, address: int, stream: str) -> None:
        block = self._blocks.pop(address)
        for each in (stream, *block.recorded):
            block.used.pop(each, None)
        self.num_freed += bool(block.used)
        self._freed.setdefault(stream, []).append(block)


class Watch(TorchDispatchMode):
    """Watches slot buffers, and stands before their transport as a GPU's transport would.

    Pushes and pulls run on streams of their own, as `csrc/bindings/peer_exchange.cpp` has them.

    Attributes:
        num_checks: Pairs of operations whose order was looked at.
        errors: The pairs that a GPU may run in the other order.
        freed: The memory of what operations return.
    """

    def __init__(self, buffers: Any, *, waits_for_reads: bool = True) -> None:
        super().__init__()
        self._buffers = buffers
        self._transport, buffers.transport = buffers.transport, self
        self._waits_for_reads = waits_for_reads
        self._push_stream, self._pull_stream = Stream(name="push"), Stream(name="pull")
        self._reads = Event()
        self._weights, self._grads = Memory("slots"), Memory("slot gradients")
        self._by_address: dict[int, Memory] = {}
        """What pulls add to: `main_grad` of mains, parts of one memory."""
        self._by_storage = {
            buffer.untyped_storage().data_ptr(): memory
            for memory, of_segments in (
                (self._weights, buffers.weight_buffers),
                (self._grads, buffers.slot_grads),
            )
            for buffer in of_segments
            if buffer is not None
        }
        self.num_checks = 0
        self.errors: list[str] = []
        self.freed = Freed()
        self._recording = ExitStack()

    def __enter__(self) -> Watch:
        record = mock.patch.object(
            Tensor, "record_stream", lambda tensor, stream: self.freed.record(tensor, stream)
        )
        self._recording.enter_context(record)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recording.close()
        self._buffers.transport = self._transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def push(self, transfers: Any, mains: Any, slot_weights: Any, label: str = "") -> Any:
        """See `Transport.push`."""
        self._push_stream.learn(Stream.current.clock)
        if self._waits_for_reads:
            self._push_stream.learn(self._reads.clock)
        self._access(self._weights, self._push_stream, True, f"push of {label}")
        return self._ended_on(
            self._push_stream, self._transport.push(transfers, mains, slot_weights, label)
        )

    def note_reads(self) -> None:
        """See `Transport.note_reads`."""
        self._reads.wait()
        self._reads.record()

    def pull_add(
        self, transfers: Any, slot_grads: Any, totals: Any, aside: Any, label: str = ""
    ) -> Any:
        """See `Transport.pull_add`."""
        self._pull_stream.learn(Stream.current.clock)
        self._access(self._grads, self._pull_stream, True, f"pull of {label}")
        for total in (total for of_segment in totals for total in of_segment):
            if total.data_ptr() not in self._by_address:
                self._by_address[total.data_ptr()] = Memory("totals")
                # Then other tensors may have the address.
                freed = self._by_address.pop, total.data_ptr(), None
                weakref.finalize(total.untyped_storage(), *freed)
            memory = self._by_address[total.data_ptr()]
            self._access(memory, self._pull_stream, True, f"pull of {label}")
        # The transport keeps these until somebody has waited for the pull.
        used = _tensors((totals, aside))
        self.freed.use(used, self._pull_stream.tick(), f"pull of {label}")
        pending = self._transport.pull_add(transfers, slot_grads, totals, aside, label)
        return self._ended_on(self._pull_stream, pending, used)

    def _ended_on(self, stream: Stream, pending: Any, used: Sequence[Tensor] = ()) -> Any:
        ended, wait, kept = Event(), pending.wait, [used]
        ended.record(stream)

        def wait_for_stream() -> None:
            ended.wait()
            kept.clear()
            # The transport on the CPU copies by operations, which are no one's.
            with torch.utils._python_dispatch._disable_current_modes():
                wait()

        pending.wait = wait_for_stream
        return pending

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        arguments = dict(
            zip((each.name for each in function._schema.arguments), args, strict=False)
        )
        arguments |= kwargs or {}
        tick = Stream.current.tick()
        for schema in function._schema.arguments:
            self._see(_tensors(arguments.get(schema.name)), schema, tick, str(function))
        results = function(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _tensors(arguments)}
        made = (each for each in _tensors(results) if each.untyped_storage()._cdata not in given)
        self.freed.allocate(made, Stream.current, str(function))
        return results

    def _see(self, tensors: Sequence[Tensor], schema: Any, tick: Tick, what: str) -> None:
        alias = schema.alias_info
        if alias is not None and not alias.is_write:
            return  # A view reads nothing.
        self.freed.use(tensors, tick, what)
        for tensor in tensors:
            memory = self._by_storage.get(tensor.untyped_storage().data_ptr())
            memory = memory or self._by_address.get(tensor.data_ptr())
            if memory is not None:
                self._access(memory, Stream.current, alias is not None, what)

    def _access(self, memory: Memory, stream: Stream, writes: bool, what: str) -> None:
        self.num_checks += (memory.written is not None) + len(memory.read) * writes
        self.errors += accesses_out_of_order(memory, stream, writes, what)


def accesses_out_of_order(memory: Memory, stream: Stream, writes: bool, what: str) -> list[str]:
    """Add an operation of a stream; return earlier ones that it does not wait for, in words."""
    before = [memory.written] * (memory.written is not None) + memory.read * writes
    errors = [
        f"{memory.name}: {what} may come before {earlier}"
        for tick, earlier in before
        if not stream.knows(tick)
    ]
    entry = (stream.tick(), what)
    if writes:
        memory.written, memory.read = entry, []
    else:
        memory.read.append(entry)
    return errors


class WatchAll(TorchDispatchMode):
    """Watches all memory that operations of PyTorch write and read, each on the current stream.

    Attributes:
        errors: The pairs of operations that a GPU may run in the other order.
        streams: Names of the streams that had operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, Memory] = {}
        self.errors: list[str] = []
        self.streams: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        given = dict(zip((each.name for each in function._schema.arguments), args, strict=False))
        seen: dict[int, bool] = {}
        for schema in function._schema.arguments:
            writes = schema.alias_info is not None and schema.alias_info.is_write
            if writes or schema.alias_info is None:  # A view reads nothing.
                for address in _addresses((given | (kwargs or {})).get(schema.name)):
                    seen[address] = seen.get(address, False) or writes
        for address in _addresses(results):
            if address not in seen and all(r.alias_info is None for r in function._schema.returns):
                self._memories.pop(address, None)  # Who used the memory before does not matter.
                seen[address] = True
        for address, writes in seen.items():
            memory = self._memories.setdefault(address, Memory("memory"))
            self.streams.add(Stream.current.name)
            self.errors += accesses_out_of_order(memory, Stream.current, writes, str(function))
        return results


def _tensors(values: Any) -> list[Tensor]:
    """All tensors among some values that have elements."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.numel()]


def _addresses(values: Any) -> set[int]:
    """Of the memory of all tensors among some values."""
    return {each.untyped_storage().data_ptr() for each in _tensors(values)}
