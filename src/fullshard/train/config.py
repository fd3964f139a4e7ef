"""The configuration of a training run: frozen sections, every value checked once when it is made.

Reading files and command-line overrides is the job of `fullshard.train.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fullshard.train.errors import ConfigError


def _require(holds: bool, key: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} = {found!r} is not possible: expected {expected}.")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Llama; the names are those of a Hugging Face `config.json`."""

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    intermediate_size: int = 768
    vocab_size: int = 256
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        _require(self.vocab_size >= 256, "model.vocab_size", self.vocab_size, "at least 256 (tokens are bytes)")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            self.hidden_size % (2 * heads) == 0,
            "model.hidden_size",
            self.hidden_size,
            f"a multiple of 2 * model.num_attention_heads = {2 * heads} (rotary embedding needs even heads)",
        )
        _require(
            heads % kv_heads == 0,
            "model.num_key_value_heads",
            kv_heads,
            f"a divisor of model.num_attention_heads = {heads}",
        )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            _require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a positive number")

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. Tokens are its bytes."""

    paths: tuple[str, ...] = ("stdlib",)
    suffixes: tuple[str, ...] = (".py", ".pyi", ".txt", ".md", ".rst")
    skip_folders: tuple[str, ...] = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
    validation_fraction: float = 0.05
    seq_len: int = 256
    max_bytes: int = 0

    def __post_init__(self) -> None:
        _require(len(self.paths) > 0, "data.paths", list(self.paths), "at least one file, folder, glob or 'stdlib'")
        _require(
            0 < self.validation_fraction < 0.9,
            "data.validation_fraction",
            self.validation_fraction,
            "a number above 0 and below 0.9",
        )
        _require(self.seq_len >= 2, "data.seq_len", self.seq_len, "at least 2")
        _require(self.max_bytes >= 0, "data.max_bytes", self.max_bytes, "0 (no limit) or a number of bytes")


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run and the shape of one step.

    `global_batch_size` is the number of windows a step takes on all ranks together; 0: as many as
    `gradient_accumulation` micro batches have on the ranks that begin the run. It stays when other ranks resume a run.
    """

    steps: int = 200
    global_batch_size: int = 0
    micro_batch_size: int = 8
    gradient_accumulation: int = 1
    gradient_sync: Literal["every", "last"] = "every"
    precision: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: Literal["none", "full"] = "none"
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch_size", "gradient_accumulation"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        _require(
            self.global_batch_size >= 0,
            "train.global_batch_size",
            self.global_batch_size,
            "0 (what train.gradient_accumulation makes it) or a number of windows",
        )
        _require(
            self.gradient_accumulation == 1 or not self.global_batch_size,
            "train.gradient_accumulation",
            self.gradient_accumulation,
            f"1 where train.global_batch_size = {self.global_batch_size} says how many windows a step has",
        )
        _require(
            self.max_grad_norm > 0,
            "train.max_grad_norm",
            self.max_grad_norm,
            "a positive number (a very large one never clips)",
        )
        _require(0 <= self.seed < 2**63, "train.seed", self.seed, "0 or a positive 63-bit number")

    def step_windows(self, ranks: int) -> int:
        """Windows of a step, of all `ranks` ranks that begin a run."""
        return self.global_batch_size or self.micro_batch_size * self.gradient_accumulation * ranks


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up, then a cosine down to `lr * min_lr_ratio`."""

    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "a positive number")
        _require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "a number from 0 to 1")
        _require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "a number from 0 to below 1")
        _require(self.eps > 0, "optim.eps", self.eps, "a positive number")


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks this host starts, and how the ranks split into replicas and shards (-1: the rest).

    `keep_bytes` of full parameters stay from forward to backward with `reshard_after_forward`, and `prefetch_bytes` are
    gathered ahead of use (-1: as many as the largest block has).
    """

    nproc: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    reshard_after_forward: bool = True
    keep_bytes: int = 0
    prefetch_bytes: int = -1
    transport: Literal["auto", "shm", "direct", "torch"] = "auto"

    def __post_init__(self) -> None:
        _require(self.nproc >= 1, "parallel.nproc", self.nproc, "at least 1 rank")
        _require(self.dp_replicate >= 1, "parallel.dp_replicate", self.dp_replicate, "at least 1")
        _require(self.dp_shard == -1 or self.dp_shard >= 1, "parallel.dp_shard", self.dp_shard, "-1 or at least 1")
        _require(self.keep_bytes >= 0, "parallel.keep_bytes", self.keep_bytes, "0 or a number of bytes")
        _require(self.prefetch_bytes >= -1, "parallel.prefetch_bytes", self.prefetch_bytes, "-1 or a number of bytes")

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """(replicas, shards) for `world_size` ranks."""
        shards = self.dp_shard if self.dp_shard != -1 else max(1, world_size // self.dp_replicate)
        if self.dp_replicate * shards != world_size:
            raise ConfigError(
                f"the mesh parallel.dp_replicate x parallel.dp_shard = {self.dp_replicate} x {shards} needs "
                f"{self.dp_replicate * shards} ranks, but {world_size} are started. "
                f"Set --nproc or the two sizes so that their product is the number of ranks."
            )
        return self.dp_replicate, shards


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save (interval 0: only at the end and when the run is stopped), how, and whether to resume.

    With `async_mode` "async" a thread copies this rank's part during the next step, and writes it during later ones.
    """

    interval: int = 0
    save_at_end: bool = True
    keep_latest_k: int = 2
    async_mode: Literal["disabled", "async"] = "disabled"
    resume: Literal["no", "yes", "auto"] = "no"

    def __post_init__(self) -> None:
        _require(self.interval >= 0, "checkpoint.interval", self.interval, "0 or a number of steps")
        _require(self.keep_latest_k >= 1, "checkpoint.keep_latest_k", self.keep_latest_k, "at least 1")


@dataclass(frozen=True)
class EvalConfig:
    """Validation: always before the first and after the last step, and each `interval` steps if not 0."""

    interval: int = 0
    windows: int = 128

    def __post_init__(self) -> None:
        _require(self.interval >= 0, "eval.interval", self.interval, "0 or a number of steps")
        _require(self.windows >= 1, "eval.windows", self.windows, "at least 1")


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine: device, threads of each rank (0: cores / ranks) and time limits.

    `timeout_seconds` is for a collective of a step; `prepare_timeout_seconds` for a wait for work on files (reading the
    text, saving and checking checkpoints), which takes as long as the disk does and says nothing about a peer.
    """

    device: Literal["auto", "cpu"] = "auto"
    threads: int = 0
    timeout_seconds: float = 120.0
    prepare_timeout_seconds: float = 1800.0
    grace_seconds: float = 60.0

    def __post_init__(self) -> None:
        _require(self.threads >= 0, "runtime.threads", self.threads, "0 or a number of threads")
        for name in ("timeout_seconds", "prepare_timeout_seconds", "grace_seconds"):
            _require(getattr(self, name) > 0, f"runtime.{name}", getattr(self, name), "a positive number of seconds")


@dataclass(frozen=True)
class RunConfig:
    """The run folder is `folder/name`; what is printed and sampled."""

    folder: str = "runs"
    name: str = "train"
    log_interval: int = 10
    sample_prompt: str = "def "
    sample_bytes: int = 120
    sample_temperature: float = 0.7

    def __post_init__(self) -> None:
        plain = bool(self.name) and self.name not in (".", "..") and not set(self.name) & set("/\\\0")
        _require(plain, "run.name", self.name, "one folder name without slashes")
        _require(self.folder != "", "run.folder", self.folder, "a folder")
        _require(self.log_interval >= 1, "run.log_interval", self.log_interval, "at least 1")
        _require(self.sample_bytes >= 0, "run.sample_bytes", self.sample_bytes, "0 (no sample) or a number of bytes")
        _require(
            self.sample_temperature >= 0,
            "run.sample_temperature",
            self.sample_temperature,
            "0 (the most likely byte) or a positive number",
        )
        _require(self.sample_prompt != "", "run.sample_prompt", self.sample_prompt, "at least one character")


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps of a session `--profile` records: `steps` of them after the first `start`."""

    enabled: bool = False
    start: int = 3
    steps: int = 8

    def __post_init__(self) -> None:
        _require(self.start >= 0, "profile.start", self.start, "0 or a number of steps")
        expected = "at least 4 (one that counts copies, two in which nothing overlaps, and those that are measured)"
        _require(self.steps >= 4, "profile.steps", self.steps, expected)


@dataclass(frozen=True)
class Config:
    """Everything `fullshard train` needs to know. Sections are the tables of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    run: RunConfig = field(default_factory=RunConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        _require(
            self.data.seq_len <= self.model.max_position_embeddings,
            "data.seq_len",
            self.data.seq_len,
            f"at most model.max_position_embeddings = {self.model.max_position_embeddings}",
        )
        room = self.model.max_position_embeddings - len(self.run.sample_prompt.encode())
        _require(
            self.run.sample_bytes <= room,
            "run.sample_bytes",
            self.run.sample_bytes,
            f"at most model.max_position_embeddings minus the prompt = {room}",
        )
        last = self.profile.start + self.profile.steps
        _require(
            not self.profile.enabled or self.train.steps >= last,
            "train.steps",
            self.train.steps,
            f"at least profile.start + profile.steps = {last}, or no --profile",
        )
