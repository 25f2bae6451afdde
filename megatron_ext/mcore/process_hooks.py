"""Installs the changes of balancing to the whole process, beside the layers of a spec.

    finish_grad_sync of DDP and Megatron-FSDP  counts failed waits when it is done    failures.py
    zero_grad_buffer of DDP and Megatron-FSDP  looks at the counts before             failures.py
    DDP's buckets' register_grad_ready         waits for the replicas' part           held_back.py
    PagedStashRunner: a step, and its rerun    takes back what the first run counted  reruns.py
    RerunStateMachine: a step, and its rerun   the same                               reruns.py
    the step of every torch optimizer          looks at the counts before             failures.py
    FullCudaGraphWrapper: a step, or a replay  counts again, and looks at the counts  full_graphs.py
    a module put into a Megatron model         looks for layers left out              below
    a part put into any module                 lets experts be checked again          experts.py
    Megatron's switch of NVTX ranges           is asked by the stages' ranges         ranges.py
    NCCL EP's set-up, of all layers            must be for as many experts            dispatcher.py
    the constructors of Megatron's models      balance their specs                    models.py

`balance_spec` installs all but the constructors, which `balance_models` adds.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.rerun_state_machine import RerunState, RerunStateMachine
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_ext.balance import held_back, reruns
from megatron_ext.balance.ranges import show_in_nvtx
from megatron_ext.mcore import failures
from megatron_ext.mcore.dispatcher import SetUpForAll
from megatron_ext.mcore.experts import count_part
from megatron_ext.mcore.stages import ObservedMoELayer, number_predicting

_undo: ExitStack | None = None
"""Takes back what was installed; None if nothing is."""


def install() -> None:
    """Install all but the constructors, once.

    All ranks of a model call, also those of pipeline stages without MoE layers: the counts of
    failed waits are reduced over the whole model.
    """
    global _undo
    if _undo is not None:
        return
    _undo = ExitStack()
    try:
        for of_chunk in (DistributedDataParallel, MegatronFSDP):
            replace(of_chunk, "finish_grad_sync", _finish_and_count)
            replace(of_chunk, "zero_grad_buffer", _look_and_zero)
        replace(_ParamAndGradBucketGroup, "register_grad_ready", _register_when_complete)
        replace(FullCudaGraphWrapper, "__call__", _run_with_host)
        replace(RerunStateMachine, "should_run_forward_backward", _mark_or_take_back)
        # Megatron-Core before 0.19 has no stash.
        if importlib.util.find_spec("megatron.core.transformer.moe.paged_stash") is not None:
            from megatron.core.transformer.moe.paged_stash import PagedStashRunner

            replace(PagedStashRunner, "__call__", _mark_and_run)
            replace(PagedStashRunner, "prepare_for_rerun", _take_back_and_prepare)
        if hasattr(token_dispatcher, "_NCCLEPManager"):  # since Megatron-Core 0.19
            replace(token_dispatcher._NCCLEPManager, "_ensure_bootstrap", SetUpForAll())
        _undo.callback(register_optimizer_step_pre_hook(_look_before_step).remove)
        _undo.callback(register_module_module_registration_hook(_warn_of_layers_left_out).remove)
        for on_part in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
        ):
            _undo.callback(on_part(count_part).remove)
        show_stages_in_nvtx()
    except BaseException:
        uninstall()
        raise


def replace(owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Let calls of a class's method call `instead`, which gets the method first.

    `install` was called before.
    """
    assert _undo is not None
    method = getattr(owner, name)

    @functools.wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return instead(method, *args, **kwargs)

    setattr(owner, name, replaced)
    _undo.callback(setattr, owner, name, method)


def uninstall() -> None:
    """Take everything back: for tests."""
    global _undo
    show_in_nvtx(bool)  # `bool()` is False: no ranges.
    if _undo is not None:
        _undo.close()
        _undo = None
        failures.forget()


def show_stages_in_nvtx() -> None:
    """Let the stages of MoE layers be NVTX ranges where Megatron is told to make these."""
    # Megatron has no function that says whether `configure_nvtx_profiling` was called.
    show_in_nvtx(lambda: utils._nvtx_enabled)


def _finish_and_count(finish: Callable[..., None], ddp: Any, *args: Any, **kwargs: Any) -> None:
    held_back.require_complete()
    finish(ddp, *args, **kwargs)
    if not reruns.is_capturing:  # Else it is counted behind each replay.
        failures.start_count(ddp)


def _look_and_zero(zero: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    failures.look()
    held_back.forget()
    zero(*args, **kwargs)


def _register_when_complete(
    register: Callable[..., None], group: Any, main: Tensor, *args: Any, **kwargs: Any
) -> None:
    held_back.call_when_complete(main, functools.partial(register, group, main, *args, **kwargs))


def _mark_and_run(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    reruns.mark()
    return run(*args, **kwargs)


def _take_back_and_prepare(prepare: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    reruns.take_back()
    prepare(*args, **kwargs)


def _mark_or_take_back(
    should_run: Callable[..., bool], machine: Any, *args: Any, **kwargs: Any
) -> bool:
    if runs := should_run(machine, *args, **kwargs):
        is_again = machine.state is RerunState.RERUNNING_IN_PLACE
        (reruns.take_back if is_again else reruns.mark)()
    return runs


def _run_with_host(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Imported here, because few programs capture whole steps.
    from megatron_ext.mcore import full_graphs

    return full_graphs.run_with_host(run, *args, **kwargs)


def _look_before_step(*_: Any) -> None:
    # A captured step is not run yet.
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        failures.look()


class LayersLeftOutWarning(UserWarning):
    """Some MoE layers of a model are balanced and others are not.

    A program may make the spec of a part by itself, as that of multi-token prediction. Such a part
    trains as it should, but its load stays as uneven as it was.
    """


def _warn_of_layers_left_out(model: nn.Module, name: str, part: nn.Module | None) -> None:
    """Warn if a model with this new part has balanced and other MoE layers."""
    if not isinstance(model, LanguageModule) or part is None or not _moe_layers(part):
        return
    number_predicting(part)
    balanced, left_out = [], {}
    for part_name, each in {**dict(model.named_children()), name: part}.items():
        layers = _moe_layers(each)
        balanced += [layer for layer in layers if isinstance(layer, ObservedMoELayer)]
        if number := sum(not isinstance(layer, ObservedMoELayer) for layer in layers):
            left_out[part_name] = number
    if left_out and balanced and balanced[0].ep_group.rank() == 0:
        warnings.warn(
            f"{type(model).__name__} is balanced but for {sum(left_out.values())} MoE layer(s) of "
            f"{', '.join(left_out)}: make the spec of that part from the balanced block spec, or "
            "give it to megatron_ext.balance_spec too",
            LayersLeftOutWarning,
            stacklevel=2,
        )


def _moe_layers(part: nn.Module) -> list[MoELayer]:
    return [module for module in part.modules() if isinstance(module, MoELayer)]
