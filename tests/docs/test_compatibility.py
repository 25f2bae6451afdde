"""The page of what works says what its record says, and the record names tests that there are."""

from __future__ import annotations

import json

import pytest

from tests.compatibility import OPTIONS, PAGE, README, RECORD, VERSIONS, page, readme

RECORDED = json.loads(RECORD.read_text())


def test_page_is_that_of_the_record():
    assert PAGE.read_text() == page(RECORDED)
    assert README.read_text() == readme(README.read_text(), RECORDED)


def test_every_option_was_shown():
    assert {name for each in VERSIONS for name in RECORDED[each]} == set(OPTIONS)


def test_nothing_failed():
    outcomes = [o for each in VERSIONS for tests in RECORDED[each].values() for o in tests.values()]
    assert set(outcomes) <= {"passed", "skipped"}


def test_marked_tests_are_in_the_record(request: pytest.FixtureRequest):
    """Those of this run; a run of all tests collects all but those of Transformer Engine."""
    recorded = {
        (name, test)
        for each in VERSIONS
        for name in RECORDED[each]
        for test in RECORDED[each][name]
    }
    here = {
        (marker.args[0], item.nodeid.partition("[")[0])
        for item in request.session.items
        for marker in item.iter_markers("option")
    }
    assert here <= recorded, "run all tests with both versions, then python -m tests.compatibility"
