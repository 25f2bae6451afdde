"""`data build`: what is on disk is compared with the input files, read by Megatron's own reader."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.build import build_dataset, parse_sources
from megatron_ext.data.files import fair_order
from megatron_ext.data.manifest import Manifest
from megatron_ext.data.tokenizer import HuggingFaceTokenizer


def build(domains, out, **settings):
    defaults = dict(
        tokenizer_file=None, eod_token=None, strict=False, overwrite=False, on_bytes=lambda n: None
    )
    return build_dataset(domains, out, **(defaults | settings))


@pytest.fixture
def texts(tmp_path):
    """Three kinds of files in two folders; `bad` holds what is not text."""
    root = tmp_path / "texts"
    for name, content in {
        "code/a.py": b"x = 1\n",
        "code/deep/b.py": "y = 'gr\u00fc\u00df'\r\n".encode(),
        "code/.hidden.py": b"secret",
        "code/__pycache__/a.pyc": b"\0",
        "prose/c.txt": b"It was a dark and stormy night.\n",
        "bad/latin1.txt": "gr\u00fc\u00df".encode("latin-1"),
        "bad/picture.png": b"\x89PNG\0\0",
        "bad/empty.txt": b" \n",
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return root


def test_documents_are_the_files_bytes_and_an_eod(texts, tmp_path):
    sources = parse_sources([f"{texts}/code", f"words={texts}/prose"])
    built, skipped = build(sources, tmp_path / "out")

    assert skipped == {}
    manifest = Manifest.load(tmp_path / "out")
    assert manifest == built
    assert (manifest.vocab_size, manifest.eod) == (257, 256)
    assert list(manifest.domains) == ["code", "words"]
    for name, folder in (("code", "code"), ("words", "prose")):
        files = [f for f in (texts / folder).rglob("*.[pt]*") if ".hidden" not in f.name]
        files = [f for f in files if f.suffix != ".pyc"]
        files.sort(key=lambda f: fair_order(f.relative_to(texts / folder).as_posix()))
        dataset = IndexedDataset(manifest.prefix(name))
        assert dataset.index.dtype == np.uint16
        assert dataset.document_indices.tolist() == list(range(len(files) + 1))
        assert [d.tolist() for d in dataset[0 : len(files)]] == [
            [*f.read_bytes(), 256] for f in files
        ]
        domain = manifest.domains[name]
        assert domain.documents == len(files)
        assert domain.text_bytes == sum(f.stat().st_size for f in files)
        assert domain.tokens == domain.text_bytes + domain.documents


def test_build_twice_gives_equal_bytes(texts, tmp_path):
    for name in ("one", "two"):
        build(parse_sources([f"{texts}/code"]), tmp_path / name)
    for name in ("code.bin", "code.idx", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_is_not_text_is_skipped_and_named(texts, tmp_path):
    seen = []
    sources = parse_sources([f"all={texts}/code", f"all={texts}/bad"])
    manifest, skipped = build(sources, tmp_path / "out", on_bytes=seen.append)
    assert {path.name: reason for path, reason in skipped.items()} == {
        "latin1.txt": "byte 2 is not UTF-8",
        "picture.png": "it holds NUL bytes",
        "empty.txt": "it is empty",
    }
    assert manifest.domains["all"].documents == 2
    assert sum(seen) == sum(f.stat().st_size for f in sources["all"])


def test_a_pipe_and_a_dead_link_are_no_files(texts):
    os.mkfifo(texts / "prose" / "pipe.txt")
    (texts / "prose" / "link.txt").symlink_to(texts / "gone.txt")
    assert [file.name for file in parse_sources([f"{texts}/prose"])["prose"]] == ["c.txt"]


def test_strict_fails_and_leaves_nothing(texts, tmp_path):
    sources = parse_sources([f"{texts}/code", f"{texts}/bad"])
    with pytest.raises(ValueError, match=r"bad/.* is not text"):
        build(sources, tmp_path / "out", strict=True)
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


def test_domain_without_text(texts, tmp_path):
    with pytest.raises(ValueError, match="domain bad has no text"):
        build(parse_sources([f"{texts}/bad"]), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


def test_output_exists(texts, tmp_path):
    sources = parse_sources([f"{texts}/prose"])
    out = tmp_path / "out"
    build(sources, out)
    with pytest.raises(FileExistsError, match="--overwrite"):
        build(sources, out)

    # A failed overwrite keeps the earlier dataset.
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ValueError, match="domain bad"):
        build(parse_sources([f"{texts}/bad"]), out, overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before

    build(parse_sources([f"{texts}/code"]), out, overwrite=True)
    assert list(Manifest.load(out).domains) == ["code"]
    assert sorted(p.name for p in out.iterdir()) == ["code.bin", "code.idx", "manifest.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "texts"]


def test_what_another_process_made_meanwhile_is_not_replaced(texts, tmp_path):
    out = tmp_path / "out"

    def make_another(num_bytes):
        out.mkdir(exist_ok=True)
        (out / "other").touch()

    with pytest.raises(OSError, match="not empty"):
        build_dataset(parse_sources([f"{texts}/prose"]), out, on_bytes=make_another)
    assert [path.name for path in out.iterdir()] == ["other"]


def test_the_earlier_dataset_comes_back_where_the_new_one_cannot_be_put(
    texts, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    build(parse_sources([f"{texts}/prose"]), out)
    rename = Path.rename

    def stop(path, target):
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        build(parse_sources([f"{texts}/code"]), out, overwrite=True)
    assert list(Manifest.load(out).domains) == ["prose"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_overwrite_spares_a_folder_that_is_no_dataset(texts, tmp_path):
    with pytest.raises(FileExistsError, match=r"no manifest\.json"):
        build(parse_sources([f"{texts}/prose"]), texts, overwrite=True)
    assert (texts / "code" / "a.py").exists()
    # An empty folder may be filled.
    (tmp_path / "empty").mkdir()
    build(parse_sources([f"{texts}/prose"]), tmp_path / "empty")
    assert (tmp_path / "empty" / "manifest.json").exists()


class TestSources:
    def test_patterns_and_files(self, texts, monkeypatch):
        monkeypatch.chdir(texts)
        sources = parse_sources(["py=**/*.py", "prose/c.txt", "py=code/a.py"])
        assert sorted(str(f) for f in sources["py"]) == ["code/a.py", "code/deep/b.py"]
        assert [str(f) for f in sources["c"]] == ["prose/c.txt"]

    def test_order_does_not_depend_on_where_the_tree_is(self, texts, tmp_path, monkeypatch):
        def names(source):
            (files,) = parse_sources([source]).values()
            return [f.name for f in files]

        monkeypatch.chdir(tmp_path)
        by_folder = names(f"x={texts}/code")
        assert by_folder == names("x=texts/code")
        assert by_folder == names(f"x={texts}/code/**/*.py") == names("x=texts/code/**/*.py")

    @pytest.mark.parametrize(
        ("source", "error", "message"),
        [
            ("absent", FileNotFoundError, "absent does not exist"),
            ("x=absent/*.txt", ValueError, r"absent/\*\.txt has no files"),
            ("hollow", ValueError, "hollow has no files"),
            ("*/*.txt", ValueError, "NAME="),
            ("a b=prose", ValueError, "^a b=prose: .*letters, digits"),
            ("-x=prose", ValueError, "^-x=prose: .*letters, digits"),
        ],
    )
    def test_errors(self, texts, monkeypatch, source, error, message):
        monkeypatch.chdir(texts)
        (texts / "hollow").mkdir()
        with pytest.raises(error, match=message):
            parse_sources([source])

    def test_one_domain_of_two_paths(self, texts, monkeypatch, caplog):
        monkeypatch.chdir(texts)
        both = parse_sources(["all=code", "all=prose"])
        assert sorted(file.name for file in both["all"]) == ["a.py", "b.py", "c.txt"]
        assert caplog.messages == ["domain all is made of all=code and all=prose"]
        for first, second in (("prose", "./prose"), ("prose/c.txt", "c=code"), ("c=code", "c.txt")):
            with pytest.raises(ValueError, match="would both be domain") as error:
                parse_sources([first, second.replace("c.txt", "prose/c.txt")])
            assert f"{first} and " in str(error.value)

    def test_no_file_in_two_domains(self, texts):
        with pytest.raises(ValueError, match=r"a\.py is in two domains, x and y"):
            parse_sources([f"x={texts}/code", f"y={texts}/code/a.py"])


class TestManifest:
    def test_values_of_another_type(self, texts, tmp_path):
        build(parse_sources([f"{texts}/prose"]), tmp_path / "out")
        file = tmp_path / "out" / "manifest.json"
        content = json.loads(file.read_text())
        content["vocab_size"] = "257"
        content["domains"]["prose"]["tokens"] = 2.5
        content["domains"]["prose"]["text_bytes"] = -1
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"^{file}: vocab_size") as error:
            Manifest.load(tmp_path / "out")
        assert str(error.value).endswith(
            "vocab_size ('257') must be a whole number >= 1; tokens (2.5) must be a whole number "
            ">= 0; text_bytes (-1) must be >= 0"
        )

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="data build"):
            Manifest.load(tmp_path)

    @pytest.mark.parametrize(
        "content",
        ['{"domains": 1}', '{"domains": {"a": {"prefix": "a"}}}', '{"domains": {}}'],
    )
    def test_not_a_manifest(self, tmp_path, content):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/manifest\.json is not the manifest"):
            Manifest.load(tmp_path)

    def test_absolute_prefix(self, texts, tmp_path):
        manifest, _ = build(parse_sources([f"{texts}/prose"]), tmp_path / "out")
        content = json.loads((tmp_path / "out" / "manifest.json").read_text())
        content["domains"]["prose"]["prefix"] = str(tmp_path / "out" / "prose")
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        assert Manifest.load(tmp_path).prefix("prose") == manifest.prefix("prose")


def word_tokenizer(*special):
    """A small real tokenizer: words and the given special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "x": 1, "=": 2, "1": 3, "dark": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if special:
        # A template that would add tokens of its own, and settings that would cut and fill.
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 5)]
        )
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=9)
    return tokenizer


def tokens_of(manifest, domain):
    # Held by a name: what it reads are views that die with it.
    dataset = IndexedDataset(manifest.prefix(domain))
    return [document.tolist() for document in dataset[0 : len(dataset)]]


class TestHuggingFace:
    def test_tokens_of_a_tokenizer_file(self, texts, tmp_path):
        word_tokenizer("</s>").save(str(tmp_path / "t.json"))
        manifest, _ = build(
            parse_sources([f"{texts}/code/a.py", f"{texts}/prose"]),
            tmp_path / "out",
            tokenizer_file=tmp_path / "t.json",
        )
        assert (manifest.vocab_size, manifest.eod, manifest.eod_token) == (6, 5, "</s>")
        assert tokens_of(manifest, "a") == [[1, 2, 3, 5]]
        # It _ was a dark ... : one known word of eight.
        assert tokens_of(manifest, "prose") == [[0, 0, 0, 4, 0, 0, 0, 0, 5]]
        # The dataset folder is enough to make more tokens, and to read these again.
        (tmp_path / "t.json").unlink()
        kept = HuggingFaceTokenizer(manifest.folder / manifest.tokenizer, manifest.eod_token)
        assert [ids.tolist() for ids in kept.encode(["x = 1"])] == [[1, 2, 3]]

    def test_eod_token_by_name(self, texts, tmp_path):
        word_tokenizer("<stop>").save(str(tmp_path / "t.json"))
        sources = parse_sources([f"{texts}/prose"])
        with pytest.raises(ValueError, match="--eod"):
            build(sources, tmp_path / "out", tokenizer_file=tmp_path / "t.json")
        manifest, _ = build(
            sources, tmp_path / "out", tokenizer_file=tmp_path / "t.json", eod_token="<stop>"
        )
        assert (manifest.eod, manifest.eod_token) == (5, "<stop>")

    def test_not_a_tokenizer(self, texts, tmp_path):
        pytest.importorskip("tokenizers")
        sources = parse_sources([f"{texts}/prose"])
        with pytest.raises(ValueError, match=r"a\.py is not a Hugging Face tokenizer\.json"):
            build(sources, tmp_path / "out", tokenizer_file=texts / "code" / "a.py")
        with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
            build(sources, tmp_path / "out", tokenizer_file=tmp_path / "none.json")
        assert not (tmp_path / "out").exists()

    def test_a_file_over_which_the_library_panics(self, texts, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")])
        tokenizer = json.loads(tokenizers.Tokenizer(model).to_str())
        tokenizer["model"]["continuing_subword_prefix"] = "longer than b"
        (tmp_path / "t.json").write_text(json.dumps(tokenizer))
        sources = parse_sources([f"{texts}/prose"])
        with pytest.raises(ValueError, match=r"t\.json is not a Hugging Face .*: byte index"):
            build(sources, tmp_path / "out", tokenizer_file=tmp_path / "t.json")

    def test_library_missing(self, texts, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'megatron-ext\[train\]'"):
            build(
                parse_sources([f"{texts}/prose"]),
                tmp_path / "out",
                tokenizer_file=tmp_path / "t.json",
            )
