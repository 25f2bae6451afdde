"""Calls ops and `Exchange` with arguments that are usual, odd or wrong.

    python tests/ops/fuzz.py [--tries N] [--seed N] [--sanitize]

A try makes the arguments of a valid call, and in most tries changes some of them: their values,
shapes, types, strides, devices and lengths. What is not changed must be accepted. What is changed
must be accepted or refused by an error that Python sees; after an exchange has refused a call, the
valid call must be accepted. Tries run one after the other in a child process. A defect is a child
that ends by itself (also by a report of a sanitizer), has no progress for `PATIENCE_S`, or finds
that the above does not hold.

`--sanitize` builds the host part with AddressSanitizer and UndefinedBehaviorSanitizer into
build/sanitized, and calls that.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ext import ops
from tests.ops import sanitizers

PATIENCE_S = 60.0
MOST_MEMORY = 4 << 30
"""Bytes that a child may have more than at its start. Sanitizers need all addresses."""

NUMBERS = (0, 1, 2, 3, 255, 256, 1000, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)
TYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
TYPES += [torch.bfloat16, torch.float32, torch.float64, torch.complex64]
REFUSALS = (ValueError, IndexError, RuntimeError, TypeError)
"""NotImplementedError, for a device without the op, is a RuntimeError."""

Arguments = Sequence[object]


def number(r: random.Random) -> int:
    return r.choice((1, -1)) * r.choice(NUMBERS)


def strange_tensor(r: random.Random, tensor: Tensor) -> Tensor:
    """Return the tensor with another value, shape, type, stride, layout or device."""
    if tensor.is_meta or tensor.is_sparse:
        return tensor
    way = r.choice(("value", "value", "value", "all", "type", "shape", "shape", "stride", "where"))
    if way in ("value", "all") and tensor.numel():
        changed = tensor.clone(memory_format=torch.contiguous_format)
        values = (
            changed.view(-1)
            if way == "all"
            else changed.view(-1)[r.randrange(tensor.numel()) :][:1]
        )
        if tensor.dtype == torch.bool:
            values.logical_not_()
        elif tensor.is_floating_point() or tensor.is_complex():
            values.fill_(r.choice((float("nan"), float("inf"), -1e30)))
        else:
            limits = torch.iinfo(tensor.dtype)
            values.fill_(min(max(number(r), limits.min), limits.max))
        return changed
    if way == "type":
        return tensor.to(r.choice(TYPES))
    if not tensor.dim():
        return tensor[None]
    if way == "where":
        return r.choice((tensor.to("meta"), tensor.to_sparse()))
    if way == "stride":
        same_values = torch.stack((tensor, tensor), -1)[..., 0]
        return r.choice((same_values, tensor.transpose(0, -1), tensor[:1].expand_as(tensor)))
    shapes = [tensor[:0], tensor[..., :0], tensor[:-1], tensor[..., 1:], tensor[None]]
    shapes += [tensor.flatten(), torch.cat((tensor, tensor), -1), torch.cat((tensor, tensor[-1:]))]
    return r.choice(shapes)


def strange(r: random.Random, value: object) -> object:
    """Return something else in the place of an argument."""
    if isinstance(value, Tensor):
        return strange_tensor(r, value)
    if isinstance(value, list):
        ways = [value[:-1], [*value, *value[-1:]], [], value * r.choice((2, 40))]
        if value:
            place = r.randrange(len(value))
            other = strange(r, value[place])
            ways += [[*value[:place], other, *value[place + 1 :]]] * 4
        return r.choice(ways)
    if isinstance(value, float):
        return r.choice((float("nan"), float("inf"), -value, 0.0, 1e300))
    if isinstance(value, int):
        return r.choice((number(r), number(r), value + r.choice((1, -1))))
    return torch.zeros(1, dtype=torch.int64) if value is None else value


class Defect(Exception):
    """What does not hold."""


class Calls:
    """Makes the calls of a try, with changed arguments or without, and counts the outcomes."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.changes = r.choice((0.0, 0.3, 0.3, 1.0))  # how often something is changed
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.are_independent = False
        """Whether no call changes what another one finds."""
        self.is_as_usual = True
        """Whether no call with changed arguments has had an effect."""

    def __call__(self, name: str, function: Callable[..., object], *usual: object) -> object:
        """Call; where changed arguments are refused, call again as usual."""
        if usual and self.r.random() < self.changes:
            changed = list(usual)
            for _ in range(self.r.choice((1, 1, 1, 2))):
                place = self.r.randrange(len(usual))
                changed[place] = strange(self.r, changed[place])
            try:
                result = function(*changed)
            except REFUSALS as error:
                self._check(error)
                self.outcomes[name, type(error).__name__] += 1
            else:
                self.outcomes[name, "accepted changed"] += 1
                self.is_as_usual = self.are_independent
                return result
        try:
            result = function(*usual)
        except Exception as error:
            if self.is_as_usual:
                raise Defect(f"{name} refuses a valid call: {error}") from error
            self.outcomes[name, "refused after changes"] += 1
            raise Stop from None
        self.outcomes[name, "accepted"] += 1
        return result

    def _check(self, error: Exception) -> None:
        message = str(error)
        if not message or "allocate memory" in message:
            raise Defect(f"{type(error).__name__} says {message!r}")
        if type(error) in (ValueError, IndexError) and "\n" in message:
            raise Defect(f"an error of several lines: {message}")


class Stop(Exception):
    """Nothing more is to be learned from a try."""


def loads(r: random.Random, ranks: int, experts: int, most: int | None = None) -> Tensor:
    """Return a load [R, E], from nothing at all to the most that fits."""
    limit = (2**63 - 1) // max(ranks * experts, 1)
    most = r.choice((0, 1, 50, 50, 4096, 2**40, limit)) if most is None else most
    load = torch.tensor(
        [[r.randint(0, min(most, limit)) for _ in range(experts)] for _ in range(ranks)]
    ).view(ranks, experts)
    if r.random() < 0.2:
        load[r.randrange(ranks)] = 0
    return load


def routing(r: random.Random, tokens: int, experts: int, top_k: int) -> Tensor:
    """Return a routing map [N, E] with at most so many choices of a token."""
    routed = torch.zeros(tokens, experts, dtype=torch.bool)
    for row in routed:
        row[r.sample(range(experts), r.randint(0, top_k))] = True
    return routed


def call_ops(r: random.Random, call: Calls) -> None:
    """Call ops one after the other, as a layer does or a study."""
    call.are_independent = True
    native = torch.ops.megatron_ext
    ranks, mains = r.choice((1, 2, 3, 4, 4, 8, 16, 33)), r.choice((1, 1, 2, 3))
    experts = ranks * mains
    slots = r.choice((0, 1, 2, 3, experts + 1))
    domain = r.choice([each for each in range(1, ranks + 1) if ranks % each == 0])
    min_quota = r.choice((1, 1, 7, 2**63 - 1))
    ppm = r.choice((0, 10_000, 10**12))
    ladder = sorted(
        r.sample((0, 1, 5000, 10_000, 10**9, 10**12), r.choice((1, 2, 6))), reverse=True
    )
    costs = [r.choice((0, 1, 1000, 2**63 - 1)) for _ in range(3)]
    load = loads(r, ranks, experts)
    batch = torch.stack([loads(r, ranks, experts) for _ in range(r.choice((1, 2)))])
    given = r.choice((load, load, batch, batch[:0]))

    where = given, slots, domain
    for name, more in r.sample(
        (
            ("solve_quota", (ppm, min_quota)),
            ("solve_ladder", (ladder, min_quota)),
            ("solve_fastest", (ladder, min_quota, *costs)),
            ("solve_paper", (ppm, min_quota)),
            ("solve_shipped", (ppm, min_quota, min_quota)),
            ("lower_bound", ()),
        ),
        2,
    ):
        call(name, getattr(native, name), *where, *more)

    # A plan's way through a layer.
    tokens, top_k = r.choice((0, 1, 33, 100)), r.randint(1, min(experts, 8))
    source = r.randrange(ranks)
    routed = routing(r, tokens, experts, top_k)
    tail = r.choice((None, torch.tensor([5])))
    call("count_load", native.count_load, routed, tail)
    load = loads(r, ranks, experts)
    load[source] = routed.sum(0)
    load.clamp_(max=(2**63 - 1) // (ranks * experts))
    quota, held = native.solve_quota(load, slots, domain, ppm, 1)
    call("split_quota", native.split_quota, load, quota, r.choice((None, source)))
    call("share_plan", native.share_plan, load, quota, held, source)
    rows = ranks * r.choice((1, 2))
    call(
        "share_and_seal",
        native.share_and_seal,
        *(load, quota, held, source),
        torch.randint(0, 2, (rows, r.choice((1, experts + 1)))),
        r.choice((0, 7, 2**40)),
        torch.zeros(2 + rows, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    split, index, lines, *_ = native.share_plan(load, quota, held, source)
    marks = native.count_load(routed)[1]
    logical, physical = native.assign(routed, split, index, top_k)
    kept = r.choice((None, marks)), r.choice((None, lines))
    call("assign", native.assign, routed, split, index, top_k, *kept)
    places = experts + ranks * slots
    dtype = r.choice((torch.float32, torch.float64, torch.bfloat16))
    call(
        "reroute",
        native.reroute,
        *(torch.rand(tokens, experts, dtype=dtype), routed, split, index, top_k, *kept),
        torch.empty(tokens, places, dtype=dtype),
        torch.zeros(tokens, places, dtype=torch.bool),
    )
    grad = torch.rand(tokens, places, dtype=dtype)
    call("place_back", native.place_back, grad, logical, physical, experts)
    grads = [
        torch.ones(r.choice(((3,), (2, 2), (0,))), dtype=dtype) for _ in range(r.choice((0, 1, 3)))
    ]
    of_experts = [r.randrange(experts) for _ in grads]
    call("set_aside", native.set_aside, grads, held, of_experts)


FLAGS_OF_A_SLOT = 256
"""Bytes."""


def call_exchange(r: random.Random, call: Calls) -> None:
    """Push and pull between two ends in this process; a third rank may be out of reach."""
    exchange = torch.classes.megatron_ext.Exchange
    often, call.changes = call.changes, call.changes / 10  # What begins otherwise ends soon.
    num_slots = r.choice((1, 2, 3))
    out_of_reach = r.choice((0, 0, 1))
    num_ranks = 2 + out_of_reach
    nothing = torch.zeros(0, dtype=torch.uint8)
    flags = [torch.zeros(num_slots * FLAGS_OF_A_SLOT, dtype=torch.uint8) for _ in range(2)]
    ends = [call("Exchange", exchange, rank, 0.5, r.choice((0, 0, 20))) for rank in range(2)]
    for end in ends:
        call("set_flags", end.set_flags, flags + [nothing] * out_of_reach)
    segments, buffers = [], []
    for _ in range(r.choice((1, 2))):
        shape = r.choice(((1,), (3, 4), (70_000,)))  # the last is copied by a thread
        dtype = r.choice((torch.float32, torch.float64, torch.bfloat16))
        by_rank = [torch.zeros(num_slots, *shape, dtype=dtype) for _ in range(2)]
        far = [torch.zeros(0, *shape, dtype=dtype)] * out_of_reach
        ids = [call("add_segment", end.add_segment, by_rank + far) for end in ends]
        segments.append(ids[0])
        buffers.append(by_rank[1])
        if not call.is_as_usual:
            return
    call.changes = often
    for _ in range(r.choice((1, 2, 3))):
        used = r.sample(range(num_slots), r.randint(0, num_slots))
        held = torch.full((num_ranks, num_slots), -1, dtype=torch.int32)
        held[1, used] = 0
        by_sender = [value for slot in used for value in (0, slot)]
        mains = [torch.ones_like(buffer[0]) for _ in used for buffer in buffers]
        if r.random() < 0.5:  # one main to each slot, or one to all
            copies = [value for slot in used for value in (-1, -1, 1, 1, slot)]
        else:
            to_all = [value for slot in used for value in (1, slot)]
            copies = [-1, -1, len(used), *to_all] if used else []
            mains = mains[: len(buffers)]
        offer = call("start_push", ends[1].start_push, segments, [], [], by_sender, held, "a")
        push = call("start_push", ends[0].start_push, segments, mains, copies, [], held, "a")
        call("finish_push", ends[0].finish_push, push)
        call("finish_push", ends[1].finish_push, offer)
        if not call.is_as_usual:
            return
        for slot in used:
            if any((buffer[slot] != 1).any() for buffer in buffers):
                raise Defect("a main has not arrived")

        asides = [r.choice((None, torch.ones_like(main))) for main in mains]
        sums = [value for slot in used for value in (1, 1, slot)]
        if len(mains) < len(used) * len(buffers):
            sums = [len(used), *(value for slot in used for value in (1, slot))]
        offer = call("start_pull", ends[1].start_pull, segments, [], [], [], by_sender, "b")
        pull = call("start_pull", ends[0].start_pull, segments, mains, asides, sums, [], "b")
        call("finish_pull", ends[0].finish_pull, pull)
        call("finish_pull", ends[1].finish_pull, offer)
        if not call.is_as_usual:
            return
        if r.random() < 0.3:
            highest = max(end.abort() for end in ends)
            for end in ends:
                call("restart", end.restart, highest)
    if not out_of_reach:
        call_gather(r, call, ends)
    for end in r.sample(ends, 2):
        call("close", end.close)


def call_gather(r: random.Random, call: Calls, ends: list[object]) -> None:
    """Gather rows of two ranks: one in a thread, as one waits for the other."""
    words = r.choice((1, 5, 1000))
    size = call("table_bytes", torch.classes.megatron_ext.Exchange.table_bytes, 2, words)
    if not call.is_as_usual:
        return
    tables = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for end in ends:
        call("set_table", end.set_table, tables, words)
    if not call.is_as_usual:
        return
    for _ in range(r.choice((1, 3))):
        row = torch.arange(r.randint(0, words))
        other = threading.Thread(target=lambda: _give(ends[1], row))  # noqa: B023
        other.start()
        into = r.choice((None, torch.zeros(2 * len(row), dtype=torch.int64)))
        try:
            rows = call("gather", ends[0].gather, row, "c", into)
        finally:
            other.join()
        if not call.is_as_usual:
            return
        if rows.view(2, -1).tolist() != [row.tolist()] * 2:
            raise Defect("rows have not arrived")


def _give(end: object, row: Tensor) -> None:
    # Without a peer that gathers, it waits in vain.
    with contextlib.suppress(RuntimeError):
        end.gather(row, "c", None)


def attempt(seed: str) -> collections.Counter[tuple[str, str]]:
    """Make a try; returns how often each call had which outcome."""
    r = random.Random(seed)
    torch.manual_seed(r.randrange(2**31))
    call = Calls(r)
    with contextlib.suppress(Stop):
        r.choice((call_ops, call_exchange))(r, call)
    return call.outcomes


def run(
    tries: int, seed: int, attempt: Callable[[str], collections.Counter[tuple[str, str]]] = attempt
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Make so many tries; returns the outcomes, and a text for each defect."""
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    defects: list[str] = []
    first = 0
    while first < tries:
        last = min(first + 100, tries)
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                _make_tries(range(first, last), seed, attempt, told.fileno())
            status = _wait(child, told.fileno())
            told.seek(0)
            lines = [json.loads(line) for line in told.read().splitlines()]
            errors.seek(0)
            report = errors.read().decode(errors="replace").strip()
        for line in lines:
            outcomes.update({(name, what): count for name, what, count in line["outcomes"]})
            if line["defect"]:
                defects.append(f"try {seed}-{line['try']}: {line['defect']}")
        first += len(lines)
        if status is not None:
            defects.append(f"try {seed}-{first} {status}\n{report[:4000]}")
            first += 1
    return outcomes, defects


def _make_tries(
    numbers: range,
    seed: int,
    attempt: Callable[[str], collections.Counter[tuple[str, str]]],
    told: int,
) -> None:
    """Make tries and tell of each in a line of JSON; does not return."""
    for i in numbers:
        line: dict[str, object] = {"try": i, "outcomes": [], "defect": ""}
        try:
            line["outcomes"] = [[*key, count] for key, count in attempt(f"{seed}-{i}").items()]
        except BaseException as error:
            line["defect"] = f"{type(error).__name__}: {error}"
        os.write(told, json.dumps(line).encode() + b"\n")
    os._exit(0)


def _wait(child: int, told: int) -> str | None:
    """Wait for the child as long as it tells of tries; returns what was wrong with its end."""
    size, since = 0, time.monotonic()
    while True:
        ended, status, _ = os.wait4(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                return None
            return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        now = time.monotonic()
        if (grown := os.fstat(told).st_size) != size:
            size, since = grown, now
        if now - since > PATIENCE_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"had no end in {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def main() -> None:
    """Make the tries, and print the outcomes; exits with 1 if there are defects."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true", help="call a build with sanitizers")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitize:
        again = [sys.executable, __file__, "--tries", str(options.tries)]
        again += ["--seed", str(options.seed), "--library"]
        again.append(str(sanitizers.build() / "libmegatron_ext.so"))
        os.execve(sys.executable, again, sanitizers.environment())
    torch.set_num_threads(1)
    if options.library:
        torch.ops.load_library(options.library)
    else:
        ops.load_library()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    start = time.monotonic()
    outcomes, defects = run(options.tries, options.seed)
    names = sorted({name for name, _ in outcomes})
    for name in names:
        print(f"{name:15}", {what: count for (of, what), count in outcomes.items() if of == name})
    took = time.monotonic() - start
    print(
        f"{options.tries} tries, {outcomes.total()} calls in {took:.1f} s; {len(defects)} defects"
    )
    print("\n".join(defects))
    sys.exit(bool(defects))


if __name__ == "__main__":
    main()
