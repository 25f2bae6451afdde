"""`data corpus`: what was gathered from this machine, and from a machine that has little."""

import json
import sys
from pathlib import Path

import pytest

from megatron_ext.data import corpus
from megatron_ext.data.corpus import MIN_DOMAIN_BYTES, Candidate, gather_corpus

LIMIT = 1 << 20


def gather(out, **settings):
    defaults = dict(limit_bytes=LIMIT, overwrite=False, on_bytes=lambda n: None)
    return gather_corpus(out, **(defaults | settings))


def tree(folder):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_this_machine(tmp_path):
    seen = []
    result = gather(tmp_path / "one", on_bytes=seen.append)
    assert len(result) >= 3
    assert {"python", "prose"} <= set(result)
    files = tree(tmp_path / "one")
    assert json.loads(files.pop(Path(corpus.MARKER))).keys() == result.keys()
    assert len(set(files.values())) == len(files)
    for name, size in result.items():
        contents = [content for file, content in files.items() if file.parts[0] == name]
        assert len(contents) == size.documents
        assert sum(map(len, contents)) == size.text_bytes
        assert MIN_DOMAIN_BYTES <= size.text_bytes <= LIMIT
        for content in contents:
            content.decode()
    assert sum(seen) == sum(map(len, files.values()))


@pytest.fixture
def machine(monkeypatch):
    """A machine whose domains are given as `{domain: [texts]}`."""

    def make(texts):
        domains = {
            name: [
                Candidate(f"made/{number}.txt", text if callable(text) else lambda text=text: text)
                for number, text in enumerate(texts.get(name, []))
            ]
            for name in corpus.DOMAINS
        }
        monkeypatch.setattr(
            corpus,
            "DOMAINS",
            {name: lambda found=found: found for name, found in domains.items()},
        )

    return make


def lines(word, number=40, num_bytes=8192):
    """`number` different texts."""
    return [f"{word} {i}\n".ljust(num_bytes - 1, "x") + "\n" for i in range(number)]


def test_order_of_the_file_system_does_not_matter(tmp_path):
    candidates = [
        Candidate(f"{i}.txt", lambda text=text: text) for i, text in enumerate(lines("a"))
    ]
    for out, order in (("one", candidates), ("two", candidates[::-1])):
        # Half of it fits, so that the order decides what.
        size = corpus._gather(tmp_path / out, order, 20 * 8192, set(), lambda n: None)
        assert size.documents == 20
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_one_domain_missing_is_reported(machine, tmp_path):
    machine({"licenses": lines("a"), "python": lines("b"), "prose": lines("c")})
    assert sorted(gather(tmp_path / "out")) == ["licenses", "prose", "python"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        corpus.MARKER,
        "licenses",
        "prose",
        "python",
    ]


def test_two_domains_missing_is_an_error(machine, tmp_path):
    # A little text is as good as none.
    machine({"licenses": lines("a"), "python": lines("b"), "prose": lines("c", 2)})
    with pytest.raises(RuntimeError, match=r"2 .*\(licenses, python\), .* c_headers, prose; 3 "):
        gather(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_each_text_once_and_not_over_the_limit(machine, tmp_path):
    same_but_for_spaces = [text.replace(" ", "\n\t") for text in lines("a")]
    machine(
        {
            "licenses": lines("a") + same_but_for_spaces,
            "python": lines("a") + lines("b", 100),
            "c_headers": lines("c", 200),
            "prose": lines("d"),
        }
    )
    result = gather(tmp_path / "out", limit_bytes=100 * 8192)
    assert {name: size.documents for name, size in result.items()} == {
        "licenses": 40,
        "python": 100,
        "c_headers": 100,
        "prose": 40,
    }


def test_what_is_no_document_is_left_out(machine, tmp_path):
    def unreadable():
        raise PermissionError

    def binary():
        raise ValueError

    huge = "x" * (LIMIT // 8)
    machine(
        {
            "licenses": [*lines("a"), "short", huge, unreadable, binary],
            "c_headers": lines("b"),
            "prose": lines("c"),
        }
    )
    assert gather(tmp_path / "out")["licenses"].documents == 40


def test_overwrite_only_a_corpus(machine, tmp_path):
    machine({"licenses": lines("a"), "c_headers": lines("b"), "prose": lines("c")})
    gather(tmp_path / "out")
    with pytest.raises(FileExistsError, match="--overwrite"):
        gather(tmp_path / "out")
    gather(tmp_path / "out", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match=f"{tmp_path}/home .*not an earlier output"):
        gather(tmp_path / "home", overwrite=True)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    for name, content in {
        "tool/README.md": "The tool does what tools do.",
        "tool/LICENSE.txt": "Do as you like.",
        "tool/table.txt": "1 2 3 4 5 6 7 8 9",
        "tool/top_level.txt": "tool",
        "tool/include/tool.h": "int tool();",
        "tool-1.0.dist-info/METADATA": "Name: tool\nVersion: 1.0\n\nTools, explained.\n",
        "tool-1.0.dist-info/licenses/COPYING": "Copy it.",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path / "absent" / "site-packages")])
    return folder


def texts_of(candidates):
    """Candidates of installed packages that can be read, by name."""
    found = {}
    for candidate in candidates:
        if candidate.name.startswith("packages/"):
            try:
                found[candidate.name.removeprefix("packages/")] = candidate.read()
            except ValueError:
                continue
    return found


def test_what_packages_give_to_which_domain(packages):
    assert texts_of(corpus._prose()) == {
        "tool/README.md": "The tool does what tools do.",
        "tool-1.0.dist-info/METADATA": "Tools, explained.\n",
    }
    assert texts_of(corpus._licenses()) == {
        "tool/LICENSE.txt": "Do as you like.",
        "tool-1.0.dist-info/licenses/COPYING": "Copy it.",
    }
    assert texts_of(corpus._c_headers()) == {"tool/include/tool.h": "int tool();"}


def test_docstrings(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self): "Method."\nx = "no"'
    )
    assert corpus._docstrings(file) == "Module.\n\nClass.\n\nMethod."
    file.write_text("def broken(")
    with pytest.raises(ValueError, match="never closed"):
        corpus._docstrings(file)
