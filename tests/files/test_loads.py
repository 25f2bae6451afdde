"""Files of loads and plans: what was written is read, and every wrong file is named."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.solve import solve
from megatron_ext.files.loads import Loads, read_loads, write_loads, write_plans
from tests import workloads
from tests.balance.rules import check_plan


def test_loads_come_back(tmp_path):
    load = torch.stack([workloads.zipf(4, 8, 100, 1.0, seed) for seed in range(3)])
    trace = {name: torch.arange(3) for name in ("step", "microbatch", "layer")}
    write_loads(tmp_path / "new" / "loads.npz", Loads(load, trace))
    read = read_loads(tmp_path / "new" / "loads.npz")
    assert torch.equal(read.load, load)
    assert len(read) == 3
    assert all(torch.equal(read.trace[name], trace[name]) for name in trace)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["loads.npz"]


def test_one_load_is_a_batch_of_one(tmp_path):
    load = workloads.zipf(4, 8, 100, 1.0)
    np.savez(tmp_path / "one.npz", load=load.numpy(), layer=np.array([3], np.int32))
    read = read_loads(tmp_path / "one.npz")
    assert torch.equal(read.load, load[None])
    assert read.trace["layer"].tolist() == [3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"loads": np.zeros((2, 4), np.int64)}, "has no array 'load'; it has loads"),
        (
            {"load": np.zeros((2, 4))},
            r"load must be int64, got float64: .*load\.astype\('int64'\)",
        ),
        ({"load": np.zeros((2, 4), np.int32)}, "load must be int64, got int32"),
        (
            {"load": np.full((2, 4), np.nan)},
            "got float64: convert .*, if its entries are whole numbers",
        ),
        ({"load": np.zeros(4, np.int64)}, r"load must be \[B, R, E\] or \[R, E\]"),
        ({"load": np.zeros((0, 2, 4), np.int64)}, "and not empty"),
        ({"load": np.zeros((4, 2), np.int64)}, r"experts \(2\) must be a multiple of ranks \(4\)"),
        ({"load": np.full((2, 4), -3, np.int64)}, r"load has a negative entry \(-3\)"),
        ({"load": np.full((2, 4), 2**61)}, r"wrong\.npz: load has an entry of 2305843009213693952"),
        (
            {"load": np.zeros((2, 2, 4), np.int64), "step": np.zeros(3, np.int64)},
            r"step must be \[2\] beside load of \[2, 2, 4\], got shape \[3\]",
        ),
        (
            {"load": np.zeros((2, 2, 4), np.int64), "layer": np.zeros(2)},
            "layer must be integers, got float64",
        ),
        ({"load": np.array([[None]])}, "load must be int64, got object"),
    ],
)
def test_wrong_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        read_loads(tmp_path / "wrong.npz")
    assert "wrong.npz" in str(caught.value)


def test_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.npz does not exist"):
        read_loads(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} is a folder without \.npz"):
        read_loads(tmp_path)
    with pytest.raises(FileNotFoundError, match="null is no file"):
        read_loads(Path(os.devnull))
    for name, content in {"text.npz": "load", "loads.csv": "1,2\n", "empty.npz": ""}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name} is no \.npz file.*numpy\.savez"):
            read_loads(tmp_path / name)
    np.save(tmp_path / "array.npy", np.zeros((2, 4), np.int64))
    with pytest.raises(ValueError, match=r"array\.npy holds one array"):
        read_loads(tmp_path / "array.npy")


def test_a_run_in_place_of_its_trace(tmp_path):
    (tmp_path / "run" / "trace").mkdir(parents=True)
    (tmp_path / "run" / "trace" / "step.npz").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/run .*\.npz.* {tmp_path}/run/trace$"):
        read_loads(tmp_path / "run")


def test_damaged_files(tmp_path):
    """Whatever byte is wrong, the file is named in a ValueError, or its check sums still hold."""
    whole = io.BytesIO()
    load = np.random.default_rng(0).integers(0, 1000, (2, 4, 8))
    np.savez_compressed(whole, load=load, step=np.arange(2))
    generator = np.random.default_rng(1)
    messages = []
    for trial in range(500):
        damaged = bytearray(whole.getvalue())
        for place in generator.integers(len(damaged), size=2):
            damaged[place] = generator.integers(256)
        if trial % 5 == 0:
            del damaged[generator.integers(len(damaged)) :]
        (tmp_path / "damaged.npz").write_bytes(damaged)
        try:
            read = read_loads(tmp_path / "damaged.npz")
        except ValueError as error:
            messages.append(str(error))
        else:
            assert torch.equal(read.load, torch.from_numpy(load))
    assert len(messages) > 250
    assert all("damaged.npz" in message for message in messages)


def test_what_is_no_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "bytes.npz", "w") as archive:
        archive.writestr("load.npy", b"load")
    with pytest.raises(ValueError, match=r"bytes\.npz: load cannot be read"):
        read_loads(tmp_path / "bytes.npz")

    header = io.BytesIO()
    shape = (2**20, 2**12, 2**12)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("load.npy", header.getvalue())
    with pytest.raises(ValueError, match=r"huge\.npz: load cannot be read"):
        read_loads(tmp_path / "huge.npz")


def test_the_array_that_is_read_is_the_one_that_was_checked(tmp_path):
    """NumPy prefers the member of an archive that has the bare name."""
    load, other = np.ones((1, 2, 4), dtype=np.int64), np.full((3, 3), 0.5)
    np.savez(tmp_path / "loads.npz", load=load)
    stored = io.BytesIO()
    np.lib.format.write_array(stored, other)
    with zipfile.ZipFile(tmp_path / "loads.npz", "a") as archive:
        archive.writestr("load", stored.getvalue())
    assert np.array_equal(np.load(tmp_path / "loads.npz")["load"], other)
    assert torch.equal(read_loads(tmp_path / "loads.npz").load, torch.from_numpy(load))


def test_predictions(tmp_path):
    """Written and read; a part of a folder that has none stands for nothing predicted."""
    load, none = torch.ones(2, 2, 4, dtype=torch.int64), -torch.ones(2, 2, 4, dtype=torch.int64)
    for step, predicted in ((1, None), (0, 3 * load)):
        trace = {"step": step, "microbatch": 0, "layer": torch.arange(2) + 1}
        trace = {name: torch.zeros(2, dtype=torch.int64) + value for name, value in trace.items()}
        write_loads(tmp_path / f"{step}.npz", Loads(load, trace, predicted))
    read = read_loads(tmp_path)
    assert torch.equal(read.predicted, torch.cat([3 * load, none]))
    assert torch.equal(read.prediction(1), 3 * load[0])
    assert read.prediction(2) is None
    np.savez(tmp_path / "one.npz", load=load[0], predicted=load[0])
    assert torch.equal(read_loads(tmp_path / "one.npz").prediction(0), load[0])


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (
            np.ones((3, 2, 4), np.int64),
            r"predicted must be \[2, 2, 4\] beside load of \[2, 2, 4\], got shape \[3, 2, 4\]",
        ),
        (np.full((2, 2, 4), -2), "predicted must be >= -1, is from -2 to -2"),
        (np.ones((2, 2, 4)), "predicted must be int64, got float64"),
        (
            np.stack([np.ones((2, 4), np.int64), np.eye(2, 4, dtype=np.int64) - 1]),
            "predicted of load 1 has entries of -1",
        ),
    ],
)
def test_wrong_predictions(tmp_path, predicted, message):
    np.savez(tmp_path / "wrong.npz", load=np.ones((2, 2, 4), np.int64), predicted=predicted)
    with pytest.raises(ValueError, match=message):
        read_loads(tmp_path / "wrong.npz")


def test_other_arrays_stay_unread(tmp_path):
    load = np.ones((2, 4), np.int64)
    np.savez(tmp_path / "more.npz", load=load, notes=np.array([None]))
    assert read_loads(tmp_path / "more.npz").load.tolist() == [load.tolist()]


@pytest.mark.parametrize("nvlink_domain", [4, 2])
@pytest.mark.parametrize("with_split", [False, True])
def test_plans_come_back(tmp_path, with_split, nvlink_domain):
    load = torch.stack([workloads.zipf(4, 8, 100, 1.0, seed) for seed in range(3)])
    plans = [solve(one, ep_size=4, slots=2, nvlink_domain=nvlink_domain) for one in load]
    write_plans(tmp_path / "plans.npz", load, plans, with_split=with_split)
    read = {name: torch.from_numpy(of) for name, of in np.load(tmp_path / "plans.npz").items()}
    assert (read["quota"].dtype, read["quota"].shape) == (torch.int64, (3, 8, 4))
    assert (read["slots"].dtype, read["slots"].shape) == (torch.int32, (3, 4, 2))
    for b, plan in enumerate(plans):
        assert torch.equal(read["quota"][b], plan.quota)
        assert torch.equal(read["slots"][b], plan.experts_in_slots)
        check_plan(load[b], BalancePlan(plan.layout, read["quota"][b], read["slots"][b]))
    if with_split:
        assert (read["split"].dtype, read["split"].shape) == (torch.int64, (3, 4, 8, 4))
        assert torch.equal(read["split"].sum(3), load)
        assert torch.equal(read["split"].sum(1), read["quota"])
    else:
        assert "split" not in read


def test_nothing_is_replaced_unless_asked(tmp_path):
    path = tmp_path / "loads.npz"
    loads = Loads(torch.zeros(1, 2, 4, dtype=torch.int64))
    write_loads(path, loads)
    with pytest.raises(FileExistsError, match=f"{path} exists already.*--overwrite"):
        write_loads(path, loads)
    write_loads(path, loads, overwrite=True)
    with pytest.raises(FileExistsError, match=f"{tmp_path} is a folder"):
        write_loads(tmp_path, loads, overwrite=True)
