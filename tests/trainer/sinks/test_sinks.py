"""What W&B and TensorBoard are given of a run, read back and compared with the run's own files."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.telemetry.names import METRICS
from megatron_ext.telemetry.profile import PROFILE_FILE
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.run_log import RunLog, read_metrics
from megatron_ext.trainer.ranks.signals import Stopped
from megatron_ext.trainer.sinks import panels, pictures
from megatron_ext.trainer.sinks.wandb import keep_comparison
from tests.boards import tensorboard_events, wandb_records, written_for_wandb

LAYERS, RANKS, EXPERTS, STEPS, EVERY = 3, 4, 8, 5, 2


def config_of(run_dir: Path) -> TrainConfig:
    config = TrainConfig(run_dir=str(run_dir))
    config.data.path = "somewhere"
    config.logging.wandb = "offline"
    config.logging.tensorboard = True
    config.logging.tier = "detailed"
    config.logging.wandb_group = "compared"
    config.logging.wandb_tags = ["h200"]
    return config


def lines_of(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lines of a step as a run writes them, from made-up loads."""
    loads = np.random.default_rng(step).integers(0, 50, (LAYERS, EXPERTS))
    ranks = loads.reshape(LAYERS, RANKS, -1).sum(2)
    imbalances = (ranks.max(1) / ranks.mean(1)).tolist()
    metrics = {
        **{"step": step, "loss": 3.0 / step, "step_ms": 10.0 + step, "plan_ms": 0.25 * step},
        **{"imbalance_before": max(imbalances), "imbalance_after": 1.0, "replicas": 2.5},
    }
    layers = {
        "step": step,
        "layer": [2, 3, 4],
        "imbalance_before": imbalances,
        "imbalance_after": [1.0] * LAYERS,
        "replicas": [2.5] * LAYERS,
        "rank_loads_before": ranks.tolist(),
        "rank_loads_after": [[int(of_layer.mean())] * RANKS for of_layer in ranks],
    }
    return metrics, layers | ({"expert_loads": loads.tolist()} if step % EVERY == 0 else {})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of five steps, the last two made a second time."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    config = config_of(run_dir)
    run_dir.mkdir()
    (run_dir / PROFILE_FILE).write_bytes(b"profile")
    with RunLog(config, start_step=0, settled={"transport": "shared_memory"}) as log:
        for step in range(1, STEPS + 1):
            log.write(*lines_of(step))
    config.logging.wandb = "off"
    with RunLog(config, start_step=3) as log:
        for step in (4, 5):
            log.write(*lines_of(step))
    return run_dir


def expected_scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    """By name in W&B and TensorBoard, and step."""
    sections = {
        **{"loss": "train", "step_ms": "system", "plan_ms": "cost"},
        **{"imbalance_before": "balance", "imbalance_after": "balance", "replicas": "balance"},
    }
    lines = read_metrics(run_dir)
    scalars = {
        f"{section}/{name}": {line["step"]: line[name] for line in lines}
        for name, section in sections.items()
    }
    scalars["balance/imbalance_before_layer_3"] = {
        step: lines_of(step)[1]["imbalance_before"][1] for step in range(1, STEPS + 1)
    }
    scalars["moe/avg_overload_factor_routed"] = scalars["balance/imbalance_before"]
    return scalars


def test_tensorboard_says_what_the_metrics_say(written: Path) -> None:
    events = tensorboard_events(written / "tensorboard")
    for name, values in expected_scalars(written).items():
        read = {event.step: event.value for event in events.Scalars(name)}
        assert read == pytest.approx(values, rel=1e-6), name
        assert len(events.Scalars(name)) == STEPS  # Steps that were made again are there once.
    for name in (pictures.RANKS_BEFORE, pictures.RANKS_AFTER):
        histograms = events.Histograms(name)
        assert [event.step for event in histograms] == [2, 4]
        assert {event.histogram_value.num for event in histograms} == {LAYERS * RANKS}
    assert [event.step for event in events.Images(pictures.RANKS_MAP)] == [2, 4]
    assert [event.step for event in events.Images(pictures.EXPERTS_MAP)] == [2, 4]

    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    (tensor,) = events.Tensors("custom_scalars__config__")[:1]
    layout = Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(panels.SECTIONS)
    patterns = {
        tag for each in layout.category for chart in each.chart for tag in chart.multiline.tag
    }
    names = {f"{panels.section_of(name)}/{name}" for name in METRICS}
    written_names = names | set(events.Tags()["scalars"])
    assert "balance/imbalance_before_layer_3" in written_names
    # Each draws one metric, and no other metric whose name is longer.
    assert sorted(name for of in patterns for name in written_names if re.search(of, name)) == (
        sorted(names)
    )
    (said,) = events.Tensors("layers/text_summary")[:1]
    assert b"count layers from 1" in said.tensor_proto.string_val[0]


def rows_of(record: Any) -> dict[str, Any]:
    """What was logged at once; what is more than a number is a mapping."""
    row: dict[str, Any] = {}
    for item in record.history.item:
        name, *inside = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if inside:
            row.setdefault(name, {})[".".join(inside)] = value
        else:
            row[name] = value
    return row


def test_wandb_says_what_the_metrics_say(written: Path) -> None:
    records = wandb_records(written)
    history = [rows_of(record) for record in records if record.HasField("history")]
    assert [row["train/step"] for row in history] == list(range(1, STEPS + 1))
    for name, values in expected_scalars(written).items():
        assert {row["train/step"]: row[name] for row in history} == values, name
    for picture in (pictures.RANKS_MAP, pictures.EXPERTS_MAP):
        kept = {row["train/step"]: row[picture] for row in history if picture in row}
        assert list(kept) == [2, 4]
        (folder,) = written.glob("wandb/offline-run-*/files")
        assert all((folder / image["path"]).is_file() for image in kept.values())
    histogram = history[1][pictures.RANKS_BEFORE]
    assert sum(histogram["values"]) == LAYERS * RANKS

    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.run_group, sorted(run.tags)) == ("compared", ["h200", "quota"])
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["balance"]["slots"] == 2
    assert settings["facts"]["transport"] == "shared_memory"
    assert settings["facts"]["versions"].keys() >= {"python", "torch", "megatron-core"}
    assert "commit" in settings["facts"]

    metrics = {record.metric.name or record.metric.glob_name: record.metric for record in records}
    assert all(
        metrics[name].step_metric == "train/step" for name in ("train/loss", "balance/*", "moe/*")
    )
    summary = metrics["system/tokens_per_s"].summary
    assert (summary.min, summary.max, summary.mean, summary.last) == (True,) * 4
    artifacts = [r.request.log_artifact.artifact for r in records if r.HasField("request")]
    artifacts += [record.artifact for record in records if record.HasField("artifact")]
    assert [each.type for each in artifacts if each.type] == ["profile"]


def test_wandb_keeps_steps_that_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B has five steps of a lost attempt, and would drop steps up to the last of these."""
    monkeypatch.setattr("wandb.sdk.wandb_run.Run.starting_step", STEPS + 1)
    with RunLog(config_of(tmp_path), start_step=3) as log:
        for step in (4, 5):
            log.write(*lines_of(step))
    history = [each.history for each in wandb_records(tmp_path) if each.HasField("history")]
    assert [each.step.num for each in history] == [STEPS + 1, STEPS + 2]
    assert written_for_wandb(tmp_path, panels.STEP) == [4, 5]


def test_a_comparison_is_kept_beside_its_runs(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<p>")
    (tmp_path / "link.html").symlink_to(__file__)  # To what is not to be sent.
    keep_comparison(config_of(tmp_path / "run"), tmp_path)
    records = wandb_records(tmp_path)
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.run_group, run.job_type) == ("compared", "comparison")
    (artifact,) = (record.artifact for record in records if record.HasField("artifact"))
    assert [entry.path for entry in artifact.manifest.contents] == ["report.html"]


def said_online(run_dir: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Write a step to W&B's server, and return the only warning."""
    config = config_of(run_dir)
    config.logging.wandb = "online"
    with RunLog(config, start_step=0) as log:
        log.write(*lines_of(1))
    (said,) = (each.getMessage() for each in caplog.records if each.name.startswith("megatron_ext"))
    return said


def test_without_a_login_it_is_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = said_online(tmp_path / "run", caplog)
    assert re.match(r"warning: W&B has no login here .*run/wandb only: `wandb sync`", said)
    assert [record.history for record in wandb_records(tmp_path / "run") if record.history.item]


@pytest.mark.parametrize("error", [Stopped(signal.SIGTERM, 1, None), RuntimeError("lost")])
def test_a_run_that_stops_as_asked_has_not_failed(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), RunLog(config_of(tmp_path), start_step=0):
        raise error
    (status,) = (each.exit.exit_code for each in wandb_records(tmp_path) if each.HasField("exit"))
    assert status == isinstance(error, RuntimeError)


def test_without_an_answer_it_is_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on machines without a way to other networks, whose users have logged in elsewhere."""
    import wandb

    init = wandb.init

    def reach(*, mode: str, **about: Any) -> Any:
        if mode == "online":
            raise wandb.errors.CommError("Timed out\nConsider increasing")
        return init(mode=mode, **about)

    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "init", reach)
    said = said_online(tmp_path / "run", caplog)
    assert re.match(r"warning: W&B does not take the run \(.*Timed out.*\), .*: `wandb sync`", said)
    assert written_for_wandb(tmp_path / "run", "train/loss") == [3.0]


def test_every_metric_has_a_panel_of_its_section() -> None:
    drawn = [name for names in panels.PANELS.values() for name in names]
    assert sorted(drawn) == sorted(METRICS)
    for names in panels.PANELS.values():
        assert len({panels.section_of(name) for name in names}) == 1


def test_pictures_show_the_loads() -> None:
    """Every cell is read back from the middle of its place."""
    import matplotlib as mpl

    _, layers = lines_of(2)
    loads = pictures.relative_loads(layers)
    home = np.array(layers["rank_loads_before"])
    assert loads[pictures.RANKS_BEFORE] == pytest.approx(home / home.mean(1, keepdims=True))
    drawn = pictures.heat_maps(layers)
    for name, shown in (
        (pictures.RANKS_MAP, (pictures.RANKS_BEFORE, pictures.RANKS_AFTER)),
        (pictures.EXPERTS_MAP, (pictures.EXPERTS,)),
    ):
        columns = loads[shown[0]].shape[1]
        _, boxes = pictures._frame(shown, (2, 3, 4), columns)
        for box, each in zip(boxes, shown, strict=True):
            area = drawn[name][box]
            rows = (np.arange(LAYERS) + 0.5) * area.shape[0] / LAYERS
            places = (np.arange(columns) + 0.5) * area.shape[1] / columns
            expected = mpl.colormaps["cividis"](np.minimum(loads[each] / 3, 1), bytes=True)[..., :3]
            assert np.array_equal(area[rows.astype(int)][:, places.astype(int)], expected)
    names = ("rank_loads_before", "rank_loads_after", "expert_loads")
    nothing = pictures.relative_loads({name: [[0, 0]] for name in names})
    assert all(of_layers.tolist() == [[0, 0]] for of_layers in nothing.values())


@pytest.mark.parametrize("columns", [2, 3, 4, 8, 64, 256])
def test_pictures_have_whole_ticks(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn: list[Any] = []
    draw = FigureCanvasAgg.draw
    monkeypatch.setattr(
        FigureCanvasAgg, "draw", lambda self: (drawn.append(self.figure), draw(self))
    )
    pictures._frame.__wrapped__((pictures.RANKS_BEFORE, pictures.RANKS_AFTER), (2, 3, 4), columns)
    for plot in drawn[0].axes[:2]:
        ticks = [text.get_text() for text in plot.get_xticklabels()]
        assert ticks
        assert all(tick.isdecimal() for tick in ticks if tick and not tick.startswith("\u2212"))
        assert all(float(tick).is_integer() for tick in plot.get_xticks())


def test_runs_of_one_process_are_runs_of_their_own(tmp_path: Path) -> None:
    """As those of a quickstart."""
    names = ("none", "quota")
    with ExitStack() as stack:
        logs = [
            stack.enter_context(RunLog(config_of(tmp_path / name), start_step=0)) for name in names
        ]
        for number, log in enumerate(logs):
            metrics, layers = lines_of(1)
            log.write(metrics | {"loss": float(number)}, layers)
    for number, name in enumerate(names):
        assert (tmp_path / name / "wandb_id").read_text()
        assert written_for_wandb(tmp_path / name, "train/loss") == [number]
