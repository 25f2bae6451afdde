"""`data`: what is built, gathered and shown, and what is said of input that is wrong."""

import io
import json
import os
import re
import sys

import pytest

from megatron_ext.cli import main
from tests.cli.command import run


def test_build_and_info(texts, capsys):
    out = texts / "out"
    status, stdout, stderr = run(capsys, "data", "build", texts / "code", "--out", out)
    assert status == 0
    assert "code" in stdout
    assert f"skipped 1 file: {texts}/code/b.bin (it holds NUL bytes)" in stderr

    status, stdout, _ = run(capsys, "data", "info", out, "--json")
    assert status == 0
    assert json.loads(stdout) == {
        "folder": str(out),
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eod": 256,
        "eod_token": "<eod>",
        "domains": {"code": {"prefix": "code", "documents": 1, "tokens": 7, "text_bytes": 6}},
    }

    status, stdout, stderr = run(capsys, "data", "build", texts / "code", "--out", out)
    assert (status, stdout) == (2, "")
    assert re.fullmatch(f"megatron-ext data build: error: {out} .*--overwrite\n", stderr)
    command = ["data", "build", texts / "code", "--out", out, "--overwrite"]
    assert run(capsys, *command)[0] == 0
    assert run(capsys, *command, "--strict")[0] == 2

    status, stdout, _ = run(capsys, *command, "--json")
    assert status == 0
    assert json.loads(stdout)["skipped"] == [
        {"path": f"{texts}/code/b.bin", "reason": "it holds NUL bytes"}
    ]


def test_a_folder_whose_name_is_no_text(texts, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
    monkeypatch.setattr(sys, "stdout", written)
    folder = os.fsdecode(bytes(texts / "out") + b"\xff")
    assert main(["data", "build", str(texts / "code"), "--out", folder]) == 0
    written.flush()
    assert rb"out\udcff" in written.buffer.getvalue()


def test_info_notices_a_cut_file(texts, capsys):
    out = texts / "out"
    run(capsys, "data", "build", texts / "code" / "a.py", "--out", out)
    (out / "a.bin").write_bytes(b"\0\0")
    status, stdout, stderr = run(capsys, "data", "info", out)
    assert (status, stdout) == (2, "")
    assert "was changed or cut off" in stderr


def test_build_makes_no_folder_of_the_root(texts, capsys):
    words = ["data", "build", texts / "code", "--out", "/absent_disk/data"]
    status, _, stderr = run(capsys, *words)
    rule = "/absent_disk/data .*there is no /absent_disk;.*"
    assert status == 2
    assert re.fullmatch(f"megatron-ext data build: error: {rule}\n", stderr)


def test_a_tokenizer_that_is_none(texts, capsys):
    pytest.importorskip("tokenizers")
    status, _, stderr = run(
        capsys,
        *("data", "build", texts / "code"),
        *("--out", texts / "out", "--tokenizer", texts / "code" / "a.py"),
    )
    assert status == 2
    assert "is not a Hugging Face tokenizer.json" in stderr
    assert stderr.count("\n") == 1

    status, _, stderr = run(
        capsys, "data", "build", texts / "code", "--out", texts / "out", "--eod", "x"
    )
    assert status == 2
    assert "--eod names a token of the --tokenizer" in stderr


def test_corpus(tmp_path, capsys, monkeypatch):
    from megatron_ext.data import corpus

    def texts_of(name):
        def candidates():
            return [
                corpus.Candidate(f"{i}.txt", lambda i=i: f"{name} {i} ".ljust(20_000, "x"))
                for i in range(10)
            ]

        return candidates

    domains = {name: texts_of(name) for name in ("a", "b", "c")} | {"d": list}
    monkeypatch.setattr(corpus, "DOMAINS", domains)
    status, stdout, stderr = run(
        capsys, "data", "corpus", "--out", tmp_path / "out", "--limit-mb", 1, "--json"
    )
    assert status == 0
    assert json.loads(stdout) == {
        "path": str(tmp_path / "out"),
        "domains": {name: {"documents": 10, "text_bytes": 200_000} for name in ("a", "b", "c")},
        "missing": ["d"],
    }
    assert "no text for d" in stderr

    del domains["a"]
    status, stdout, stderr = run(capsys, "data", "corpus", "--out", tmp_path / "less")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("megatron-ext data corpus: error: this machine has text for 2 domains")
    assert stderr.count("\n") == 1
