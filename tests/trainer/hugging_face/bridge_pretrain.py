"""Trains with Megatron-Bridge's own `pretrain` on two CPU ranks, each a process of its own.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 python bridge_pretrain.py HUB FOLDER

HUB is a folder of a tiny Qwen3-MoE. Three runs, one after the other, in FOLDER: `first` trains
balanced and saves after step 2 of 3; `again` loads that and trains steps 3 and 4, balanced;
`stock` does the same without balancing. Each leaves `metrics.jsonl` in its folder. What `first`
saved at its end becomes a Hugging Face folder, `exported`.

What is Bridge's and Megatron's own: the model, its settings, the data, the optimizer, the loop,
saving and loading. What stands in for something else, as a CPU has it not: the names of packages
that Bridge imports and does not use here (`STAND_INS`), that CUDA must be there, and that
Megatron's helpers for datasets are compiled, which the wheel of megatron-core has compiled.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

STAND_INS = ("datasets", "megatron.energon", "modelopt", "nvidia_resiliency_ext")
"""Packages of which Bridge's training imports names.

It calls three of them in these runs, which in `modelopt` do nothing for models that it has not
changed: `get_tensor_shapes_adjust_fn_for_distillation`, `save_sharded_modelopt_state` and
`restore_modelopt_state`.
"""


class _Module(types.ModuleType):
    """A module in which every name is a class; to call it gives None."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := type(name, (), {"__new__": lambda *_, **__: None}))
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds such modules for the packages that are named."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{each}.") for each in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing: names are made when they are asked for."""


def main(hub: Path, folder: Path) -> None:
    import torch.distributed as dist

    import megatron_ext

    megatron_ext.enable_cpu_platform()
    from megatron_ext.trainer.hugging_face.bridge import open_bridge

    bridge = open_bridge(hub)
    sys.meta_path.append(_StandIns())
    from megatron.bridge.training import gpt_step, initialize, pretrain, setup
    from megatron.bridge.training.utils import checkpoint_utils

    initialize.compile_helpers = lambda: None
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    # Bridge would end a group of its own after the first run.
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    for name, steps in (("first", 3), ("again", 4), ("stock", 4)):
        checkpoint_utils.read_train_state.cache_clear()  # Else `stock` went on where `again` ended.
        config = _config(bridge, folder / "checkpoints", steps, loads=name != "first")
        if name != "stock":
            config.model.transformer_layer_spec = megatron_ext.balanced_provider_spec(
                config.model.transformer_layer_spec, megatron_ext.BalanceConfig(slots=2)
            )
        callback = megatron_ext.BridgeCallback(run_dir=folder / name)
        pretrain.pretrain(config, gpt_step.forward_step, callbacks=[callback])
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        bridge.export_ckpt(folder / "checkpoints", folder / "exported", show_progress=False)


def _config(bridge: Any, checkpoints: Path, steps: int, loads: bool) -> Any:
    """Return Bridge's settings for two CPU ranks."""
    import torch
    from megatron.bridge.training import config as settings
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    model = bridge.to_megatron_provider(load_weights=False)
    model.transformer_layer_spec = functools.partial(
        get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm"
    )
    for fusion in (
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "cross_entropy_loss_fusion",
    ):
        setattr(model, fusion, False)
    model.transformer_impl, model.use_cpu_initialization = "local", True
    model.expert_model_parallel_size, model.seq_length = 2, 64
    model.params_dtype, model.bf16 = torch.float32, False
    return settings.ConfigContainer(
        model=model,
        train=settings.TrainingConfig(train_iters=steps, global_batch_size=8, micro_batch_size=2),
        validation=settings.ValidationConfig(eval_iters=0, eval_interval=0),
        optimizer=settings.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-3, use_distributed_optimizer=True
        ),
        scheduler=settings.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=settings.MockGPTDatasetConfig(
            random_seed=1,
            dataloader_type="single",
            seq_length=64,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
        ),
        logger=settings.LoggerConfig(log_interval=1),
        tokenizer=settings.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=299),
        checkpoint=settings.CheckpointConfig(
            save=None if loads else str(checkpoints),
            save_interval=2,
            load=str(checkpoints) if loads else None,
            ckpt_step=2 if loads else None,
            load_optim=False,  # Megatron cannot on CPUs without Transformer Engine, balanced or not
            load_rng=False,
            async_save=False,
        ),
        dist=settings.DistributedInitConfig(distributed_backend="gloo"),
    )


if __name__ == "__main__":  # Bridge saves by a process that it spawns, which imports this file.
    main(*(Path(word) for word in sys.argv[1:]))
