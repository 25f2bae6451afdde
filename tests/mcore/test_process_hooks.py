"""What balancing does to the whole process: `balance_spec` does it, `check` does not, and tests can
take it back.

A part runs on two gloo ranks: a count of failed waits is a collective that both must begin.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: enables the CPU platform
from tests.ranks import run_ranks

from megatron.core import utils  # isort: skip
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from torch.nn.modules import module as torch_module  # isort: skip
from torch.optim import optimizer as torch_optimizer  # isort: skip

from megatron_ext.balance import ranges  # isort: skip
from megatron_ext.mcore import process_hooks  # isort: skip
from megatron_ext.mcore.check import check  # isort: skip
from megatron_ext.mcore.models import balance_models  # isort: skip
from megatron_ext.mcore.spec import balance_spec, name_stages  # isort: skip


def state_of_the_process() -> list[Any]:
    return [
        DistributedDataParallel.finish_grad_sync,
        DistributedDataParallel.zero_grad_buffer,
        GPTModel.__init__,
        list(torch_optimizer._global_optimizer_pre_hooks.values()),
        list(torch_module._global_module_registration_hooks.values()),
        list(torch_module._global_parameter_registration_hooks.values()),
        list(torch_module._global_buffer_registration_hooks.values()),
        ranges._wants_nvtx,
    ]


def moe_spec() -> Any:
    return get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)


def moe_config() -> TransformerConfig:
    sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4)
    return TransformerConfig(**sizes, add_bias_linear=False, moe_token_dispatcher_type="alltoall")


def test_check_changes_nothing() -> None:
    before = state_of_the_process()
    check(moe_config(), BalanceConfig(), moe_spec())
    assert state_of_the_process() == before


def _checked_by_one(rank: int) -> float:
    # Where both ranks have the hooks already, a check that installed them would go unnoticed.
    assert process_hooks._undo is None
    if rank == 0:
        check(moe_config(), BalanceConfig(), moe_spec())
    gpt = build_gpt(num_layers=1)
    return gpt.train_step(0)


def test_one_rank_may_check() -> None:
    """Each rank of a training that checked would otherwise have one collective more."""
    assert all(loss > 0 for loss in run_ranks(_checked_by_one, 2, timeout_s=60))


def test_what_is_installed_is_taken_back() -> None:
    before = state_of_the_process()
    balance_spec(moe_spec(), BalanceConfig())
    installed = state_of_the_process()
    constructor = before[2]
    assert installed[2] is constructor
    assert all(
        now != then for now, then in zip(installed, before, strict=True) if then is not constructor
    )
    balance_spec(moe_spec(), BalanceConfig())
    assert state_of_the_process() == installed, "once"
    balance_models(BalanceConfig(), lambda layer: None)
    assert state_of_the_process() == [*installed[:2], GPTModel.__init__, *installed[3:]]
    assert GPTModel.__init__ is not constructor
    utils.configure_nvtx_profiling(True)
    try:
        assert ranges._wants_nvtx()
        process_hooks.uninstall()
        assert not ranges._wants_nvtx()
    finally:
        utils.configure_nvtx_profiling(False)
    assert state_of_the_process() == before


def test_names_of_stages_are_taken_back() -> None:
    """Also where nothing is balanced."""
    before = state_of_the_process()
    name_stages(moe_spec())
    assert state_of_the_process() != before
    process_hooks.uninstall()
    assert state_of_the_process() == before


def test_layers_that_stay_megatrons_leave_the_process_alone() -> None:
    before = state_of_the_process()
    spec = moe_spec()
    assert balance_spec(spec, BalanceConfig(strategy="none")) is spec
    assert state_of_the_process() == before
