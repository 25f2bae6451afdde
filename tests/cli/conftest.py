"""Inputs of commands."""

import pytest

from tests.cli.command import run


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "code" / "b.bin").write_bytes(b"\0\1")
    return tmp_path


@pytest.fixture
def loads(tmp_path, capsys):
    path = tmp_path / "loads.npz"
    words = [
        "zipf",
        "--ranks",
        "8",
        "--experts",
        "32",
        "--tokens",
        "1024",
        "--top-k",
        "4",
        "--batch",
        "3",
        "--imbalance",
        "1.5",
    ]
    assert run(capsys, "synth", *words, "--out", path)[0] == 0
    return path


@pytest.fixture
def routes(tmp_path):
    from megatron_ext.files.routes import write_routes
    from tests import workloads

    path = tmp_path / "routes.npz"
    sizes = dict(samples=64, topics=4, layers=3, experts=16, top_k=2, fidelity=0.8)
    write_routes(path, workloads.topical_routes(**sizes))
    return path
