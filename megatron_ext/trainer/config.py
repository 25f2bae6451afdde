"""Settings of a training run: structured-config dataclasses, with their only defaults.

Those of its balancing are in `megatron_ext/config.py`. What a recipe leaves out has its default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megatron_ext.config import MOST_WAIT_S, BalanceConfig, Section, setting
from megatron_ext.files.schema import MOST_EXPERTS
from megatron_ext.telemetry.names import MAX_KEYS

MISSING: Any = "???"
"""OmegaConf's mark of a value that the user has to give."""

MOST_LAYERS = 10_000
"""Layers of a model, of which lists are made before anything is built."""

SCHEMA = "train"
"""Name under which recipes put `TrainConfig` first in their `defaults`."""

MEGATRON_NAMES = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "ffn_hidden_size": "model.dense_hidden_size",
    "num_moe_experts": "model.num_experts",
    "moe_grouped_gemm": "model.experts=grouped_mm",
    "moe_ffn_hidden_size": "model.expert_hidden_size",
    "moe_shared_expert_intermediate_size": "model.shared_expert_hidden_size",
    "moe_router_topk": "model.topk",
    "moe_aux_loss_coeff": "model.aux_loss",
    "transformer_impl": "model.transformer_impl",
    "params_dtype": "model.precision",
    "bf16": "model.precision=bf16",
    "moe_token_dispatcher_type": "parallel.dispatcher",
    "expert_model_parallel_size": "parallel.ep_size",
    "tensor_model_parallel_size": "parallel.tp_size",
    "pipeline_model_parallel_size": "parallel.pp_size",
    "virtual_pipeline_model_parallel_size": "parallel.vpp_size",
}
"""The settings that decide fields of Megatron's TransformerConfig, by the fields' names."""


@dataclass(kw_only=True, slots=True)
class ModelConfig(Section, name="model"):
    """A GPT with experts in its layers. The section `megatron` takes more settings."""

    num_layers: int = setting(4, least=1, most=MOST_LAYERS)
    """Transformer layers of the whole model."""
    hidden_size: int = setting(256, least=1)
    """Width of the residual stream (H)."""
    num_attention_heads: int = setting(4, least=1)
    """Attention heads. Their number must divide `hidden_size`, unless `megatron.kv_channels` sets
    the width of a head."""
    rotary_base: int = setting(10_000, least=1)
    """Base of the rotary position embedding."""
    rotary_percent: float = setting(1.0, above=0, most=1)
    """Part of a head that the rotary position embedding turns."""

    num_dense_layers: int = setting(0, least=0, most=MOST_LAYERS)
    """First layers that have one FFN instead of experts."""
    dense_hidden_size: int = setting(0, least=0)
    """Width inside the FFN of a dense layer; 0 is that of an expert."""
    activation: str = setting("gelu", choices=("gelu", "swiglu"))
    """Inside FFNs and experts: `gelu`, or `swiglu`, which has two matrices into their width."""
    vocab_size: int = setting(0, least=0)
    """Tokens that the model knows, at least those of the data; 0 is as many as the data have."""

    num_experts: int = setting(16, least=1, most=MOST_EXPERTS)
    """Logical experts of a layer (E)."""
    topk: int = setting(2, least=1)
    """Experts that a token goes to (K)."""
    expert_hidden_size: int = setting(1024, least=1)
    """Width inside an expert (F)."""
    shared_expert_hidden_size: int = setting(0, least=0)
    """Width of the expert that every token goes to besides its K; 0 has none."""
    aux_loss: float = setting(0.0, least=0)
    """Weight of the load-balancing loss on the router; 0 leaves the router alone."""

    experts: str = setting("sequential", choices=("sequential", "grouped_mm"))
    """How a rank computes its experts: `sequential` (one matrix product after the other,
    everywhere) or `grouped_mm` (all in one call of a grouped product, Transformer Engine's where
    the layers are its own, else PyTorch's; fp32 and bf16)."""
    transformer_impl: str = setting("auto", choices=("auto", "local", "transformer_engine"))
    """Whose layers the model is made of: Megatron's own (`local`), those of `transformer_engine`,
    or `auto`: Transformer Engine's where it is installed and there is a GPU."""
    precision: str = setting("fp32", choices=("fp32", "bf16"))
    """Type of weights and activations: `fp32` or `bf16` (with fp32 main weights and gradients)."""

    def _relation_problems(self) -> Iterator[str]:
        if self.topk > self.num_experts >= 1:
            yield f"model.topk ({self.topk}) must be <= model.num_experts ({self.num_experts})"
        if self.num_dense_layers >= self.num_layers >= 1:
            yield (
                f"model.num_dense_layers ({self.num_dense_layers}) must be < "
                f"model.num_layers ({self.num_layers})"
            )


@dataclass(kw_only=True, slots=True)
class ParallelConfig(Section, name="parallel"):
    """How the model is spread over ranks. Ranks beyond these sizes are data-parallel."""

    num_ranks: int = setting(0, least=0)
    """Ranks that a run of this recipe has at least; 0 is any number that fits the sizes below."""
    ep_size: int = setting(1, least=1)
    """Ranks that share the experts of a layer (R)."""
    tp_size: int = setting(1, least=1)
    """Ranks that share attention, embeddings and sequences (tensor and sequence parallelism)."""
    pp_size: int = setting(1, least=1)
    """Pipeline stages."""
    vpp_size: int = setting(1, least=1)
    """Model chunks on each stage (interleaved schedule); 1 is the plain 1F1B schedule."""

    dispatcher: str = setting("alltoall", choices=("alltoall", "allgather", "flex"))
    """Megatron's token dispatcher: `alltoall`, `allgather` or `flex`."""
    recompute: str = setting("none", choices=("none", "selective", "full"))
    """What backward computes again: `none`, `selective` (the MoE layers) or `full`."""

    distributed_optimizer: bool = True
    """Spread the optimizer's state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Start the data-parallel reduction of gradients during backward."""
    overlap_param_gather: bool = False
    """Gather updated weights during the next forward; needs the two settings above."""

    def _relation_problems(self) -> Iterator[str]:
        if self.vpp_size > 1 and self.pp_size == 1:
            yield (
                f"parallel.vpp_size ({self.vpp_size}) must be 1 without a pipeline "
                "(parallel.pp_size is 1)"
            )
        if self.overlap_param_gather and not (
            self.distributed_optimizer and self.overlap_grad_reduce
        ):
            yield (
                "parallel.overlap_param_gather (True) needs parallel.distributed_optimizer and "
                "parallel.overlap_grad_reduce"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig(Section, name="data"):
    """Which text is trained on, and how much of it in a step."""

    path: str = MISSING
    """Folder made by `megatron-ext data build`; or, as Megatron's `--data-path` in quotes, prefixes
    of Megatron's datasets (`.bin` and `.idx`), each with a weight in front or all without."""
    tokenizer: str = ""
    """Hugging Face's `tokenizer.json` of prefixes in `path`: says how many tokens there are. If
    empty, `model.vocab_size` does. A folder of `data build` has its own."""
    sequence_length: int = setting(256, least=1)
    """Tokens of a sample."""
    micro_batch_size: int = setting(4, least=1)
    """Samples that a rank computes at a time."""
    global_batch_size: int = setting(8, least=1)
    """Samples of an optimizer step, over all ranks. A run may go on with another number: the next
    step takes the samples that follow those of the checkpoint."""

    affinity: str = ""
    """File of `megatron-ext place`: the samples of a step go to the ranks that have the experts
    which the samples' tokens choose, if the model starts with its experts placed by the same file.
    Empty deals the samples in turn. The samples of a step are the same."""
    rebatch: str = ""
    """File of `megatron-ext place`: in MoE layers, the tokens of a sequence go to the
    tensor-parallel ranks that probably have the tokens' experts, if the model starts with its
    experts placed by the same file. Needs `parallel.tp_size` and `parallel.ep_size` to be the same,
    above 1. Empty leaves tokens where the sequence puts them. Training results stay the same."""

    weights: dict[str, float] = field(default_factory=dict)
    """Share of each domain of a folder; empty is in proportion to the domains' sizes."""
    mix_by: str = setting("microbatch", choices=("microbatch", "sample"))
    """Draw a domain for each `microbatch` or for each `sample`."""
    validation_fraction: float = setting(0.02, least=0, below=1)
    """Part of every domain that is kept for evaluation."""
    reverse_samples: bool = False
    """Give the samples of a microbatch in reverse order. Only the rounding of sums changes, so such
    a run shows how far two runs differ by rounding alone."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section, name="optimizer"):
    """Adam and its schedule: linear warm-up, then decay until the last step."""

    lr: float = setting(1e-3, least=0)
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: float = setting(1e-4, least=0)
    """Learning rate of the last step."""
    warmup_steps: int = setting(10, least=0)
    """Steps from learning rate 0 to `lr`; a shorter run reaches `lr` in its last step but one."""
    decay: str = setting("cosine", choices=("constant", "linear", "cosine"))
    """Shape of the way to `min_lr`: `constant`, `linear` or `cosine`."""

    weight_decay: float = setting(0.01, least=0)
    """Decoupled weight decay (AdamW)."""
    beta1: float = setting(0.9, least=0, below=1)
    """Decay of Adam's mean of gradients."""
    beta2: float = setting(0.95, least=0, below=1)
    """Decay of Adam's mean of squared gradients."""
    eps: float = setting(1e-8, above=0)
    """Added to Adam's denominator."""
    clip_grad: float = setting(1.0, least=0)
    """Largest norm of all gradients together; larger ones are scaled down. 0 does not clip."""

    def _relation_problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"optimizer.min_lr ({self.min_lr}) must be <= optimizer.lr ({self.lr})"


@dataclass(kw_only=True, slots=True)
class LoggingConfig(Section, name="logging"):
    """Where a run reports, besides `metrics.jsonl` and the display of rank 0."""

    every: int = setting(1, least=1)
    """Steps between two plain progress lines, where the display is not a terminal; the first step
    and slow ones have lines, too."""
    trace_steps: int = setting(0, least=0)
    """Steps in one file of `trace/` in the run directory, with the exact load of every microbatch
    in every layer; 0 records none. A checkpoint ends a file early, so that a run that continues
    from it has the loads of every step."""
    route_samples: int = setting(0, least=0)
    """Samples of a step whose tokens' ids and chosen experts are recorded in `routes/`, in files of
    `trace_steps` steps: the first samples of one rank, at most its own. `megatron-ext place`
    reads them. Costs 2 bytes a choice in memory until the file is written; 0 records none."""
    heatmap_every: int = setting(100, least=1)
    """Steps between two lines of `layers.jsonl` that hold the loads of single experts."""

    tier: str = setting("brief", choices=("brief", "detailed"))
    """What W&B and TensorBoard get: `brief` describes each step, `detailed` also each layer."""
    max_keys: int = setting(MAX_KEYS, least=1)
    """Most names that a step has in W&B and TensorBoard; the layers with the largest imbalance
    before balancing are kept."""

    wandb: str = setting("off", choices=("off", "offline", "online"))
    """Weights & Biases: `off`, `offline` (written to the run directory) or `online`."""
    wandb_project: str = "megatron_ext"
    """Project of the W&B run."""
    wandb_name: str | None = None
    """Name of the W&B run; by default the name of the run directory."""
    wandb_group: str = ""
    """Group of the W&B run; if empty, a quickstart or a sweep groups its runs by their folder."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the W&B run, besides its strategy."""
    tensorboard: bool = False
    """Write the same metrics for TensorBoard, to `tensorboard/` in the run directory."""

    def _relation_problems(self) -> Iterator[str]:
        wanted = {"tensorboard": self.tensorboard, "wandb": self.wandb in ("offline", "online")}
        for name, is_wanted in wanted.items():
            if is_wanted and not importlib.util.find_spec(name):
                yield (
                    f"logging.{name} ({getattr(self, name)!r}) needs the package {name}: "
                    f"pip install 'megatron-ext[{name}]'"
                )
        if self.route_samples > 0 and not self.trace_steps:
            yield f"logging.route_samples ({self.route_samples}) needs logging.trace_steps > 0"


@dataclass(kw_only=True, slots=True)
class ProfileConfig(Section, name="profile"):
    """Steps that are recorded operator by operator, into one trace for Perfetto.

    A recorded step takes longer, and needs memory for some 200 bytes an operator.
    """

    steps: int = setting(0, least=0)
    """Steps that are recorded; 0 records none."""
    # The first steps of a start allocate memory and load code.
    first: int = setting(6, least=1)
    """First step that is recorded."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that record, as [0,8]; empty is all ranks."""

    def _relation_problems(self) -> Iterator[str]:
        if min(self.ranks, default=0) < 0 or len(set(self.ranks)) < len(self.ranks):
            yield f"profile.ranks ({self.ranks}) must be different numbers >= 0"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section, name="checkpoint"):
    """When to save, and where to start from. A run continues from its own newest checkpoint."""

    every: int = setting(0, least=0)
    """Steps between two checkpoints; the last step has one, too. 0 saves none."""
    keep: int = setting(2, least=1)
    """Newest checkpoints that are kept."""
    load: str | None = None
    """Where a run without checkpoints of its own starts from: `RUN/checkpoints/step_...`; `RUN`,
    which means its newest; or a checkpoint of Megatron-LM or Megatron-Bridge (`torch_dist`), as the
    folder of their `latest_checkpointed_iteration.txt` or as one `iter_...` in it."""

    verify: bool = True
    """Compare a checkpoint's files with their checksums before it is loaded."""
    fallback: bool = True
    """If the newest checkpoint is damaged, warn and take the newest whole one. False refuses."""
    trust: bool = False
    """Load a checkpoint that another user wrote, or that holds pickled classes beyond those that
    checkpoints need. Loading such a checkpoint may run code that is in it."""

    required: bool = False
    """End the run if a checkpoint cannot be saved. False warns and goes on without it."""
    asynchronous: bool = False
    """Write a checkpoint beside the training, from a copy of the state in the memory of the CPU."""


@dataclass(kw_only=True, slots=True)
class HardwareConfig(Section, name="hardware"):
    """The machine that a recipe is for. Files of `recipes/hardware` have these fields."""

    summary: str = ""
    """One line about the machine; empty is any machine."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Numbers of the machine with their sources, as `megatron-ext simulate` reads them."""

    @property
    def domain_ranks(self) -> int | None:
        """Ranks of an NVLink domain; None if `constants` has no number."""
        return self._number("domain_ranks")

    @property
    def server_ranks(self) -> int | None:
        """Ranks of a server, of which a domain may have several; None without a number."""
        return self._number("server_ranks")

    def _number(self, name: str) -> int | None:
        constant = self.constants.get(name)
        value = constant.get("value") if isinstance(constant, Mapping) else None
        return value if isinstance(value, int) else None


@dataclass(kw_only=True, slots=True)
class TrainConfig(Section):
    """A training run. Together with the data, everything that determines its result."""

    recipe: str = ""
    """Name of the recipe that the settings began with; it is filled in."""
    at_most: dict[str, int] = field(default_factory=dict)
    """Upper limits of numbers, by the names of their settings. A larger number of a recipe is cut
    to the limit, a number on the command line is not. `size=tiny` sets such limits."""
    run_dir: str = "runs/train"
    """Directory of the run's files: config, metrics, checkpoints. A run that has checkpoints there
    goes on from the newest."""
    overwrite: bool = False
    """Begin anew where `run_dir` holds steps and no checkpoint: its files go to `earlier_1` in it.
    Without this, such a run is refused."""
    steps: int = setting(100, least=1)
    """Optimizer steps of the whole run."""
    seed: int = setting(1234, least=0, most=2**32 - 1)
    """Seed of the initial weights and of the order of the data."""

    on_nan: str = setting("stop", choices=("stop", "skip", "ignore"))
    """What is done with a step whose loss or gradients are not finite: `stop` the run before its
    optimizer step, `skip` that optimizer step, or `ignore` it. If only the loss is not finite, the
    optimizer step is made: then `stop` ends the run after it. A state that is not finite is never
    saved, and ends a run that does not `ignore` it."""
    timeout_s: float = setting(600, least=1, most=MOST_WAIT_S)
    """Seconds that a rank waits for another before the run ends and names the rank that hangs.
    Must be longer than all that a rank does alone, as writing its part of a checkpoint."""
    restarts: int = setting(0, least=0)
    """How often a run whose ranks died starts again by itself, from its newest whole checkpoint. It
    does not after a signal, nor after an error that it would meet again: wrong settings, numbers
    that are not finite, a refused checkpoint. For several machines, `launch/train.sh` passes it on
    as `--max-restarts`."""

    eval_every: int = setting(0, least=0)
    """Steps between two evaluations; 0 makes none."""
    eval_steps: int = setting(4, least=1)
    """Global batches of an evaluation, always the same ones."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by its names."""

    @property
    def group_timeout(self) -> timedelta:
        """How long process groups wait: longer than the watchdog, which can name who hangs."""
        return timedelta(seconds=2 * self.timeout_s)

    def _relation_problems(self) -> Iterator[str]:
        if not self.run_dir:
            yield "run_dir ('') must name a folder"
        if self.eval_every > 0 and self.data.validation_fraction == 0:
            yield f"eval_every ({self.eval_every}) needs data.validation_fraction > 0"
        profile = self.profile
        if profile.steps > 0 and profile.first + profile.steps - 1 > self.steps:
            yield (
                f"profile.first ({profile.first}) + profile.steps ({profile.steps}) must be "
                f"<= steps + 1 ({self.steps + 1}): the run ends before"
            )
