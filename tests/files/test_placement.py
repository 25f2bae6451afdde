"""Files of placements: written and read again, and what is said of files that are none."""

import numpy as np
import pytest
import torch

from megatron_ext.balance.placement import Placement
from megatron_ext.files.placement import read_placement, write_placement

RIGHT = {
    "layer": np.array([1, 4]),
    "slots": np.array([[[2], [-1]], [[-1], [0]]], dtype=np.int32),
    "expert_load": np.array([[9, 1, 2, 3], [4, 4, 4, 4]]),
}


def test_written_and_read(tmp_path):
    path = tmp_path / "placement.npz"
    placement = Placement(
        (1, 4), torch.from_numpy(RIGHT["slots"]), torch.from_numpy(RIGHT["expert_load"])
    )
    write_placement(path, placement)
    with np.load(path) as arrays:
        assert {name: (arrays[name].dtype.name, arrays[name].tolist()) for name in arrays} == {
            name: (array.dtype.name, array.tolist()) for name, array in RIGHT.items()
        }
    found = read_placement(path)
    assert found.layers == (1, 4)
    assert found.num_replicas() == {"1": 1, "4": 1}
    assert torch.equal(found.experts_in_slots, placement.experts_in_slots)
    assert torch.equal(found.expert_load, placement.expert_load)
    with pytest.raises(FileExistsError, match=f"{path} .*--overwrite"):
        write_placement(path, placement)
    write_placement(path, placement, overwrite=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": None}, "has no array 'slots'; it has expert_load, layer"),
        ({"slots": RIGHT["slots"].astype(np.int64)}, "slots must be int32, got int64"),
        ({"slots": RIGHT["slots"][0]}, r"slots must be \[L, R, S\], got shape \[2, 1\]"),
        (
            {"layer": np.array([1])},
            r"layer must be \[2\] beside slots of \[2, 2, 1\], got shape \[1\]",
        ),
        ({"layer": np.array([1, 1])}, r"layers must differ, got \[1, 1\]"),
        (
            {"expert_load": RIGHT["expert_load"][:, :3]},
            r"experts \(3\) must be a multiple of ranks \(2\)",
        ),
        ({"expert_load": RIGHT["expert_load"] - 2}, "expert_load must be >= 0, is from -1 to 7"),
        ({"layer": np.array([-1, 4])}, "layer must be >= 0, is from -1 to 4"),
        ({"slots": RIGHT["slots"] + np.int32(2)}, "layer 1, rank 0: no expert 4; there are 4"),
        ({"slots": RIGHT["slots"][:, ::-1]}, "layer 1, rank 1: expert 2 is there twice"),
        ({"slots": RIGHT["slots"].repeat(2, 2)}, "layer 1, rank 0: expert 2 is there twice"),
    ],
)
def test_other_files(tmp_path, changed, message):
    path = tmp_path / "placement.npz"
    np.savez(path, **{n: array for n, array in (RIGHT | changed).items() if array is not None})
    with pytest.raises(ValueError, match=message) as error:
        read_placement(path)
    assert str(path) in str(error.value)
