"""`dashboards`: what W&B would be sent, compared with what runs write. No server is asked."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces.internal import View

from megatron_ext.cli import dashboards as command
from megatron_ext.telemetry.names import (
    LAYER_METRICS,
    MEGATRON_NAMES,
    METRICS,
    SECTIONS,
    section_of,
)
from megatron_ext.trainer.sinks import dashboards, pictures
from megatron_ext.trainer.sinks.panels import COUNT_OF_LAYERS
from tests.cli.command import run


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def values_of(spec, key):
    """All values under a key, however deep."""
    if isinstance(spec, dict):
        for name, inside in spec.items():
            if name == key:
                yield inside
            yield from values_of(inside, key)
    elif isinstance(spec, list):
        for inside in spec:
            yield from values_of(inside, key)


def test_panels_show_what_runs_write(no_login, capsys):
    status, out, _ = run(capsys, "dashboards", "--project", "p", "--dry-run", "--json")
    assert status == 0
    made = json.loads(out)
    bank = made["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in bank] == [*SECTIONS, "balance by layer", "moe"]
    written = {f"{section_of(name)}/{name}" for name in METRICS} | {*MEGATRON_NAMES.values()}
    histograms = {pictures.RANKS_BEFORE, pictures.RANKS_AFTER, pictures.EXPERTS}
    shown = {name for names in values_of(bank, "metrics") for name in names}
    assert shown == written | histograms
    said = {
        section["name"]
        for section in bank
        for each in values_of(section, "value")
        if each == COUNT_OF_LAYERS
    }
    assert said == {"balance by layer", "moe"}
    patterns = list(values_of(bank, "metricRegex"))
    assert len(patterns) == len(LAYER_METRICS)
    names = {f"balance/{name}_layer_3" for name in LAYER_METRICS} | written
    assert {name for of in patterns for name in names if re.search(of, name)} == names - written
    (media,) = values_of(bank, "mediaKeys")
    assert media == [pictures.RANKS_MAP, pictures.EXPERTS_MAP]
    curves = [each for each in values_of(bank, "config") if "metrics" in each]
    assert {each["xAxis"] for each in curves} == {"train/step"}
    # Of the report, too: W&B's own names for them are behind the metric's.
    asked = {name for names in values_of(made["report"], "metrics") for name in names}
    assert {
        name.removeprefix("summary_metrics.").removesuffix(".mean") for name in asked
    } <= written
    groups = [key for each in values_of(made["report"], "grouping") for key in each]
    assert {each["name"] for each in groups} == {"balance.value.strategy"}


def test_what_is_sent_is_what_is_read_back(no_login):
    workspace = dashboards.workspace("e", "p")
    made = dashboards.serialised("e", "p")["workspace"]
    again = ws.Workspace._from_model(View.model_validate(made))
    assert [section.name for section in again.sections] == [
        section.name for section in workspace.sections
    ]
    titles, sent = (
        [getattr(panel, "title", None) for section in of.sections for panel in section.panels]
        for of in (again, workspace)
    )
    assert titles == sent
    assert (again.entity, again.project, again.settings.x_axis) == ("e", "p", "train/step")


def test_a_dry_run_says_what_there_would_be(no_login, capsys):
    status, out, _ = run(capsys, "dashboards", "--project", "p", "--dry-run")
    assert status == 0
    assert "  system: Tokens per second; Time of a step (ms)" in out
    assert "report 'Is balancing worth it?'" in out


def test_without_a_login_a_line_says_so(no_login, capsys):
    status, out, err = run(capsys, "dashboards", "--project", "p")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "megatron-ext dashboards: error: W&B has no login here: `wandb login` makes one; --dry-run "
        "needs none and shows what would be made"
    ]


def test_with_a_login_both_are_saved_for_its_owner(monkeypatch, capsys):
    saved = []

    def save(self):
        saved.append((self.entity, self.project))
        return SimpleNamespace(url=f"https://{type(self).__name__}")

    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "Api", lambda: mock.Mock(default_entity="me"))
    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(wr.Report, "save", save)
    status, out, _ = run(capsys, "dashboards", "--project", "p")
    assert (status, saved) == (0, [("me", "p")] * 2)
    assert out == "workspace: https://Workspace\nreport: https://Report\n"


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    status, _, err = run(capsys, "dashboards", "--project", "p", "--dry-run")
    assert status == 2
    assert "pip install 'megatron-ext[dashboards]'" in err
