"""Files of loads and plans: what was written is read, and every wrong file is named."""

import numpy as np
import pytest
import torch

from megatron_ext.balance.plan import check_plan, check_split, solve
from megatron_ext.offline.loads import Loads, read_loads, write_loads, write_plans
from tests import workloads


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
        ({"load": np.zeros((2, 4))}, "load must be int64, got float64"),
        ({"load": np.zeros((2, 4), np.int32)}, "load must be int64, got int32"),
        ({"load": np.zeros(4, np.int64)}, r"load must be \[B, R, E\] or \[R, E\]"),
        ({"load": np.zeros((0, 2, 4), np.int64)}, "and not empty"),
        ({"load": np.zeros((4, 2), np.int64)}, r"experts \(2\) must be a multiple of ranks \(4\)"),
        ({"load": np.full((2, 4), -3, np.int64)}, r"load has a negative entry \(-3\)"),
        (
            {"load": np.zeros((2, 2, 4), np.int64), "step": np.zeros(3, np.int64)},
            r"step must be integers \[2\], got int64 \(3,\)",
        ),
        (
            {"load": np.zeros((2, 2, 4), np.int64), "layer": np.zeros(2)},
            r"layer must be integers \[2\], got float64",
        ),
        ({"load": np.array([[None]])}, "no .npz file of plain arrays"),
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
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_loads(tmp_path)
    (tmp_path / "text.npz").write_text("load")
    with pytest.raises(ValueError, match=r"text.npz is no .npz file"):
        read_loads(tmp_path / "text.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty.npz is no .npz file"):
        read_loads(tmp_path / "empty.npz")
    np.save(tmp_path / "array.npy", np.zeros((2, 4), np.int64))
    with pytest.raises(ValueError, match="holds one array, not an archive"):
        read_loads(tmp_path / "array.npy")


def test_plans(tmp_path):
    load = torch.stack([workloads.zipf(4, 8, 100, 1.0, seed) for seed in range(3)])
    plans = [solve(one, ep_size=4, slots=2) for one in load]
    write_plans(tmp_path / "plans.npz", load, plans, with_split=True)
    with np.load(tmp_path / "plans.npz") as archive:
        quota, slots, split = (torch.from_numpy(archive[n]) for n in ("quota", "slots", "split"))
    assert (quota.dtype, slots.dtype, split.dtype) == (torch.int64, torch.int32, torch.int64)
    assert (quota.shape, slots.shape, split.shape) == ((3, 8, 4), (3, 4, 2), (3, 4, 8, 4))
    for b, plan in enumerate(plans):
        assert torch.equal(quota[b], plan.quota)
        assert torch.equal(slots[b], plan.slots)
        check_plan(load[b], plan)
        check_split(load[b], plan, split[b])


def test_nothing_is_replaced_unless_asked(tmp_path):
    path = tmp_path / "loads.npz"
    loads = Loads(torch.zeros(1, 2, 4, dtype=torch.int64))
    write_loads(path, loads)
    with pytest.raises(FileExistsError, match=r"exists already: replace it with --overwrite"):
        write_loads(path, loads)
    write_loads(path, loads, overwrite=True)
    with pytest.raises(FileExistsError, match="is a folder"):
        write_loads(tmp_path, loads, overwrite=True)
