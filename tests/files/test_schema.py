"""What a format declares is what its files are held to."""

import io
import zipfile

import numpy as np
import pytest

from megatron_ext.files.schema import Array, Schema

SCHEMA = Schema(
    arrays={
        "main": Array(dtype=np.int64, axes="L E"),
        "held": Array(dtype=np.int32, axes="L R S", least=-1, limit="E"),
        "number": Array(dtype=np.integer, axes="L", all_differ=True, least=0),
        "share": Array(dtype=np.float32, axes="L-1 R", required=False, least=0),
        "sizes": Array(dtype=np.int64, axes="2", entries="V K"),
        "token": Array(dtype=np.int64, axes="B? N", required=False, least=0, limit="V"),
    },
    multiple=("E", "R"),
)
RIGHT = {
    "main": np.zeros((3, 4), np.int64),
    "held": np.full((3, 2, 1), -1, np.int32),
    "number": np.array([1, 2, 5], np.int16),
    "sizes": np.array([10, 2]),
}


def read(tmp_path, **changed):
    np.savez(tmp_path / "file.npz", **RIGHT | changed)
    return SCHEMA.read(tmp_path / "file.npz")


def test_what_fits_is_read(tmp_path):
    assert read(tmp_path).keys() == RIGHT.keys()
    assert read(tmp_path, held=np.zeros((3, 2, 0), np.int32))["held"].shape == (3, 2, 0)
    assert read(tmp_path, share=np.ones((2, 2), np.float32))["share"].shape == (2, 2)
    assert read(tmp_path, token=np.arange(10))["token"].shape == (1, 10)
    assert read(tmp_path, token=np.zeros((3, 4), np.int64))["token"].shape == (3, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"main": np.zeros((3, 4))}, r"main must be int64, got float64: convert it with main\.as"),
        ({"main": np.zeros((0, 4), np.int64)}, r"main must be \[L, E\] and not empty, got shape"),
        ({"main": np.zeros(4, np.int64)}, r"main must be \[L, E\] and not empty, got shape \[4\]"),
        (
            {"held": np.zeros((3, 0, 1), np.int32)},
            r"held must be \[3, R, S\] beside main of \[3, 4\], got shape \[3, 0, 1\]",
        ),
        ({"held": np.full((3, 2, 1), 4, np.int32)}, "held must be from -1 to 3, is from 4 to 4"),
        ({"held": np.full((3, 2, 1), -2, np.int32)}, "held must be from -1 to 3, is from -2 to"),
        ({"held": np.zeros((3, 3, 1), np.int32)}, r"experts \(4\) must be a multiple of ranks \(3"),
        ({"number": np.array([1, 2, 2])}, r"numbers must differ, got \[1, 2, 2\]"),
        ({"number": np.full(3, 2**63, np.uint64) + np.arange(3, dtype=np.uint64)}, "beyond int64"),
        ({"number": np.ones(3)}, "number must be integers, got float64"),
        ({"share": np.ones((3, 2), np.float32)}, r"share must be \[2, 2\] beside main"),
        ({"share": np.full((2, 2), -1, np.float32)}, "share must be finite and >= 0"),
        ({"share": np.full((2, 2), np.inf, np.float32)}, "share must be finite and >= 0"),
        ({"sizes": np.array([1, 2, 3])}, r"sizes must be \[2\] beside main"),
        ({"token": np.arange(11)}, "token must be from 0 to 9, is from 0 to 10"),
        ({"token": np.array(1)}, r"token must be \[B, N\] or \[N\] and not empty"),
    ],
)
def test_what_breaks_a_rule_is_named(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, **changed)
    assert str(caught.value).startswith(f"{tmp_path / 'file.npz'}: ")


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path):
    """Files of a few kilobytes, which unpacked would take gigabytes and hours."""
    for shape, message in (
        ((1, 2**17), r"experts \(131072\) must be <= 65536"),
        ((2**17, 2**16), r"main cannot be read \(\[131072, 65536\] of int64 are more than"),
    ):
        header = io.BytesIO()
        fields = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        path = tmp_path / "crafted.npz"
        others = {**RIGHT, "held": np.full((shape[0], 2, 1), -1, np.int32)}
        others["number"] = np.arange(shape[0])
        np.savez_compressed(path, **{name: others[name] for name in others if name != "main"})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("main.npy", header.getvalue())  # Without values: they are not read.
        with pytest.raises(ValueError, match=message):
            SCHEMA.read(path)


def test_a_header_of_brackets(tmp_path):
    header = b"(" * 5000 + b"\n"
    with zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
        size = len(header).to_bytes(2, "little")
        archive.writestr("main.npy", b"\x93NUMPY\x01\0" + size + header)
    np.savez(tmp_path / "rest.npz", **{n: RIGHT[n] for n in ("held", "number", "sizes")})
    with (
        zipfile.ZipFile(tmp_path / "rest.npz") as rest,
        zipfile.ZipFile(tmp_path / "file.npz", "a") as archive,
    ):
        for name in rest.namelist():
            archive.writestr(name, rest.read(name))
    with pytest.raises(ValueError, match=r"file\.npz: main cannot be read"):
        SCHEMA.read(tmp_path / "file.npz")
