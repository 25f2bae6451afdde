"""What a dry run forecasts is planned with all settings that the run would plan with."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config import BalanceConfig, LlepSettings
from megatron_ext.lab.forecast import Forecast, forecast
from megatron_ext.lab.hardware import read_hardware
from megatron_ext.trainer.config import ModelConfig, ParallelConfig, TrainConfig


def forecast_of(balance: BalanceConfig, *, shards: int = 1, **model: Any) -> Forecast:
    config = TrainConfig(
        balance=balance,
        model=ModelConfig(num_experts=16, **model),
        # The simulator, which has no model of tensor parallelism, is left out.
        parallel=ParallelConfig(ep_size=4, tp_size=2 // shards),
        megatron={"expert_tensor_parallel_size": shards},
    )
    stage = SimpleNamespace(expert_params=1 << 20, expert_bytes=2 << 20, expert_grad_bytes=4 << 20)
    dry_run: Any = SimpleNamespace(stages=[stage], tokens=4096)
    found = forecast(config, dry_run, imbalance=2.0, hardware=read_hardware("server_8_h100"))
    assert found.step is None
    return found


def test_a_strategys_own_settings_count() -> None:
    usual = forecast_of(BalanceConfig(strategy="llep", slots=2)).replication
    # No rank ever has a hundred times the mean.
    idle = LlepSettings(alpha=100)
    still = forecast_of(BalanceConfig(strategy="llep", slots=2, llep=idle)).replication
    assert usual is not None
    assert still is not None
    assert usual.replicas > 0
    assert still.replicas == 0
    assert still.imbalance_after == still.imbalance_before


@pytest.mark.parametrize("strategy", ["eplb", "lplb", "libra", "libra_paper"])
def test_loads_without_a_past_forecast_no_strategy_that_lives_by_it(strategy: str) -> None:
    """EPLB made no replica for the few loads, and Libra took the load before for a prediction."""
    known = forecast_of(BalanceConfig(strategy=strategy, slots=2))
    assert known.replication is None
    assert known.costs is not None


def test_shards_of_experts_compute_the_tokens_of_all() -> None:
    whole, sharded = (forecast_of(BalanceConfig(), shards=each).replication for each in (1, 2))
    assert whole is not None
    assert sharded is not None
    # The stages of both have experts of one size on a rank.
    assert sharded.experts_ms == pytest.approx(2 * whole.experts_ms, rel=0.01)
    assert sharded.experts_before_ms == pytest.approx(2 * whole.experts_before_ms, rel=0.01)


def test_tokens_cost_what_they_cost_in_the_run() -> None:
    by_precision = {"fp32": 4, "bf16": 2}
    for precision, element_bytes in by_precision.items():
        costs = forecast_of(BalanceConfig(), hidden_size=384, precision=precision).costs
        assert costs is not None
        assert costs.token_bytes == element_bytes * 384
