"""Kinds of damage to a file's bytes, each chosen by a seed.

A kind returns its name and the damaged bytes. `ALWAYS_WRONG` names damage that no command may take
for good: it refuses the file, or gives the result of the good one where it does not read that part.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Kind = Callable[[bytes, random.Random], tuple[str, bytes]]

EXECUTED = Path(tempfile.gettempdir(), f"megatron_ext_damage_{os.getpid()}")
"""Exists if something in a damaged file was run."""


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {EXECUTED}",)


def raw(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Damage bytes, whatever they are."""
    place = chooser.randrange(len(data))
    match kind := chooser.choice(
        ["cut", "cut", "flip", "flip", "flips", "zeros", "empty", "noise", "append", "newlines"]
    ):
        case "cut":
            return kind, data[:place]
        case "flip" | "flips":
            changed = bytearray(data)
            for _ in range(1 if kind == "flip" else 20):
                changed[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
            return kind, bytes(changed)
        case "zeros":
            return kind, data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :]
        case "empty":
            return kind, b""
        case "noise":
            return kind, chooser.randbytes(300)
        case "append":
            return kind, data + chooser.randbytes(50)
    return kind, b"\n" * 5 + data


_ALTERED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float": lambda a: a.astype(np.float64) + 0.5,
    "nan": lambda a: np.full(a.shape, np.nan),
    "bool": lambda a: a.astype(bool),
    "complex": lambda a: a.astype(np.complex64),
    "text": lambda a: a.astype(str),
    "pairs": lambda a: np.zeros(a.shape, dtype=[("x", "i4"), ("y", "f8")]),
    "dates": lambda a: a.astype("datetime64[s]"),
    "objects": lambda a: a.astype(object),
    "unsigned": lambda a: a.astype(np.uint64) | np.uint64(1 << 63),
    "lowest": lambda a: np.full(a.shape, np.iinfo(np.int64).min),
    "negative": lambda a: (-2 - np.abs(a.astype(np.int64))).astype(a.dtype),
    "nothing": lambda a: a[:0],
    "one more axis": lambda a: a[None, None],
    "flat": lambda a: a.reshape(-1),
    "fewer columns": lambda a: a[..., : a.shape[-1] - 1],
    "swapped bytes": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "turned": lambda a: a.T,
    "by columns": lambda a: np.asfortranarray(a),
    "more rows": lambda a: np.concatenate([a, a]),
    "first row": lambda a: a[:1],
    "bigger": lambda a: (a.astype(np.int64) + 1000).astype(a.dtype),
    "huge": lambda a: np.full(a.shape, 2**62),
    "bomb": lambda a: np.zeros((2, 2, 1 << 23), dtype=np.int64),
}
_HEADERS = {
    "header of brackets": "(" * 5000,
    "header of 2^62": "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }",
    "header of -2": "{'descr': '<i8', 'fortran_order': False, 'shape': (-2,), }",
    "header of nothing": "{}",
}


def arrays(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change an array of an `.npz` file, or its header."""
    with np.load(io.BytesIO(data)) as archive:
        values = {name: archive[name] for name in archive.files}
    name = chooser.choice(sorted(values))
    kind = chooser.choice([*_ALTERED, *_HEADERS, "pickle", "lost", "twice", "other name"])
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as changed:
        warnings.simplefilter("ignore")
        for each, array in values.items():
            member = io.BytesIO()
            if each != name or kind == "twice":
                np.lib.format.write_array(member, array)
            elif kind in _HEADERS:
                header = _HEADERS[kind].encode() + b"\n"
                member.write(b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header)
                member.write(bytes(800))
            elif kind == "pickle":
                member.write(pickle.dumps(_Evil()))
            elif kind in _ALTERED:
                np.lib.format.write_array(member, _ALTERED[kind](array), allow_pickle=True)
            if kind != "lost" or each != name:
                entry = f"../{each}" if (kind, each) == ("other name", name) else each
                changed.writestr(f"{entry}.npy", member.getvalue())
            if kind == "twice" and each == name:
                changed.writestr(f"{each}.npy", member.getvalue()[:50])
    return f"{kind} in {name}", out.getvalue()


_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**63, -(2**63), 10**30, 10**400, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "<script>", "\0", "\ud800", "\x1b[2J", "../../x", "1"),
    *("a" * 100_000, [], {}, [[]], [None], {"a": {"b": {}}}, [1, 2, 3], ["x"], "${oc.env:HOME}"),
    *(1.5, "9" * 5000),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items: Any = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        yield from _places(inside, (*path, key))


def _altered(content: Any, chooser: random.Random) -> tuple[str, Any]:
    """Put a strange value somewhere into what JSON or YAML held."""
    path = chooser.choice(list(_places(content)))
    owner = content
    for key in path[:-1]:
        owner = owner[key]
    key = path[-1]
    kind = chooser.choice(
        ["value", "value", "value", "lost", "added", "renamed", "negated", "list"]
    )
    if kind == "lost":
        del owner[key]
    elif kind == "added" and isinstance(owner, dict):
        owner["unknown"] = chooser.choice(_VALUES)
    elif kind == "renamed" and isinstance(owner, dict):
        owner[f"{key}x"] = owner.pop(key)
    elif kind == "negated" and type(owner[key]) in (int, float):
        owner[key] = -owner[key] - 1
    elif kind == "list":
        owner[key] = [owner[key]]
    else:
        kind, owner[key] = "value", chooser.choice(_VALUES)
    return f"{kind} at {'.'.join(map(str, path))[:60]}", content


def _json(value: Any) -> bytes:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def objects(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change a JSON file."""
    match chooser.randrange(20):
        case 0:
            return "brackets", b"[" * 200_000
        case 1:
            return "name twice", b'{"step": 1, ' + data.lstrip()[1:].replace(
                b"{", b'{"step": 2,', 1
            )
    kind, value = _altered(json.loads(data), chooser)
    return kind, _json(value)


def lines(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change a file with one JSON object a line."""
    found = data.splitlines()
    place = chooser.randrange(len(found))
    kind = chooser.choice(
        ["altered"] * 8 + ["lost", "twice", "turned", "brackets", "text", "scalar"]
    )
    match kind:
        case "altered":
            kind, value = _altered(json.loads(found[place]), chooser)
            found[place] = _json(value)
        case "lost":
            del found[place]
        case "twice":
            found.insert(place, found[place])
        case "turned":
            found.reverse()
        case "brackets":
            found[place] = b"[" * 100_000
        case "text":
            found[place] = b"hello"
        case "scalar":
            found[place] = chooser.choice([b"3", b"null", b'"x"', b"[]", b"NaN"])
    return kind, b"\n".join(found) + b"\n"


def _laughs(first: str, item: str, opened: str, closed: str) -> str:
    text = f"a0: &a0 {first}\n"
    for depth in range(1, 10):
        items = ", ".join(item.format(place=place, below=depth - 1) for place in range(9))
        text += f"a{depth}: &a{depth} {opened}{items}{closed}\n"
    return text


_ADDED = {
    "class of Python": f'evil: !!python/object/apply:os.system ["touch {EXECUTED}"]\n',
    "lists of lists": _laughs("[x, x, x]", "*a{below}", "[", "]"),
    "mappings of mappings": _laughs("{}", "k{place}: *a{below}", "{", "}"),
    "references": "".join(f"b{n}: ${{b{n + 1}}}${{b{n + 1}}}\n" for n in range(30)) + "b30: xx\n",
    "itself": "x: &x\n  y: *x\n",
    "settings of Hydra": "hydra: {searchpath: ['pkg://antigravity']}\n",
    "brackets": f"x: {'[' * 3000}\n",
    "tab": "\tx: 1\n",
    "no such name": "x: *nothing\n",
    "merged scalar": "<<: 3\n",
    "two documents": "---\nx: 1\n",
    "a list as a name": "? [1, 2]\n: 3\n",
    "5000 digits": f"x: 0x{'f' * 5000}\n",
}


def settings(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change a YAML file."""
    if chooser.random() < 0.5:
        kind, value = _altered(yaml.safe_load(data), chooser)
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            text = yaml.safe_dump(value, sort_keys=False)
        finally:
            sys.set_int_max_str_digits(limit)
        return kind, text.encode("utf-8", "surrogatepass")
    kind = chooser.choice([*_ADDED, "name twice", "one word", "a list", "no UTF-8"])
    name = chooser.choice([line for line in data.split(b"\n") if line[:1].isalpha()]).split(b":")[0]
    return kind, {
        "name twice": data + b"\n" + name + b": 1\n" + name + b": 2\n",
        "one word": b"hello\n",
        "a list": b"- 1\n- 2\n",
        "no UTF-8": data + b"\nx: \xff\xfe\n",
    }.get(kind, data + b"\n" + _ADDED.get(kind, "").encode())


def pickles(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Put another pickle in place of one."""
    choices = {
        "pickle that runs": pickle.dumps(_Evil()),
        "old pickle that runs": f"cos\nsystem\n(S'touch {EXECUTED}'\ntR.".encode(),
        "pickled number": pickle.dumps(3),
        "pickled brackets": b"(" * 100_000 + b".",
        "place 2^31 of the memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "bytes of 2^63": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "archive": b"PK\x03\x04" + bytes(60),
    }
    kind = chooser.choice(sorted(choices))
    return kind, choices[kind]


def index(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change a field of a `.idx` file."""
    fields = {
        "magic": (0, b"m"),
        "version": (9, struct.pack("<Q", chooser.choice([0, 2, 2**63]))),
        "dtype": (17, bytes([chooser.choice([0, 1, 2, 3, 5, 6, 7, 99, 255])])),
        "sequences": (18, struct.pack("<Q", chooser.choice([0, 1, 2**31, 2**62, 2**64 - 1]))),
        "documents": (26, struct.pack("<Q", chooser.choice([0, 1, 2**31, 2**62, 2**64 - 1]))),
        "lengths": (34, struct.pack("<i", chooser.choice([-1, 0, 2**31 - 1, 7]))),
    }
    kind = chooser.choice(sorted(fields))
    place, bad = fields[kind]
    return kind, data[:place] + bad + data[place + len(bad) :]


def weights(data: bytes, chooser: random.Random) -> tuple[str, bytes]:
    """Change the header of a `.safetensors` file, or its length."""
    length = struct.unpack_from("<Q", data)[0]
    header, values = data[8 : 8 + length], data[8 + length :]
    kind = chooser.choice(["length", "brackets", "pickle", "longer", "dtype", *["header"] * 5])
    if kind == "length":
        wrong = chooser.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1])
        return kind, struct.pack("<Q", wrong) + data[8:]
    if kind == "pickle":
        return kind, pickle.dumps(_Evil())
    if kind == "longer":
        return kind, data + bytes(8)
    if kind == "brackets":
        header = b"[" * 50_000
    elif kind == "dtype":
        content = json.loads(header)
        name = chooser.choice([name for name in content if name != "__metadata__"])
        content[name]["dtype"] = chooser.choice(["BF16", "F16", "I16", "F8_E4M3", "F64", "C64", ""])
        header = _json(content)
    else:
        kind, content = _altered(json.loads(header), chooser)
        header = _json(content)
    return kind, struct.pack("<Q", len(header)) + header + values


ALWAYS_WRONG: dict[Kind, set[str]] = {
    arrays: {
        *("float", "nan", "bool", "complex", "text", "pairs", "dates", "objects", "unsigned"),
        *("lowest", "negative", "nothing", "one more axis", "bomb", "pickle", "other name", "lost"),
        *_HEADERS,
    },
    objects: {"brackets"},
    lines: {"brackets", "text", "scalar"},
    settings: {*_ADDED, "name twice", "one word", "a list", "no UTF-8"},
    pickles: {
        *("pickle that runs", "old pickle that runs", "pickled number", "pickled brackets"),
        *("place 2^31 of the memo", "bytes of 2^63", "archive"),
    },
    weights: {"length", "brackets", "pickle", "longer"},
    index: {"magic", "version", "sequences", "documents", "lengths"},
}
"""Of files with checksums, all damage is."""
