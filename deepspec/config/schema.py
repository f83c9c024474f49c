"""Every key of a recipe, as frozen dataclasses.

One dataclass a Hydra group. ``metadata["help"]`` is the text of ``docs/config.md``, which is generated from this file.
Nothing here imports torch: ``--cfg job`` composes on a laptop in a moment. Checks that need more than one key, and the
conversion from OmegaConf, live in ``resolve.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]
MISSING = "???"


def key(help_text: str, default: Any = MISSING) -> Any:
    """Declare a field with its help text; without a default the key must be given."""
    if default is MISSING:
        return field(metadata={"help": help_text})
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model that is to be made faster (group ``target``)."""

    name: str = key("Short name, used in folders and reports")
    path: str = key("Local folder, or a hub id such as Qwen/Qwen3-4B")
    mask_token_id: int = key("An id below the vocabulary size that the tokenizer never emits in text")
    target_layer_ids: Literal["auto"] | tuple[int, ...] = key(
        "Layers whose output feeds the drafter, counted from 0; auto is five, evenly spaced over 1 .. N-3", "auto"
    )
    revision: str | None = key("Revision of a hub id; null is the default branch", None)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "Precision of the frozen weights; auto is fp32 on CPU and the checkpoint's own on CUDA", "auto"
    )
    gguf_package: str | None = key(
        "Python package that carries the weights as a GGUF file; converted once into `path` when `path` is missing",
        None,
    )
    template_options: dict[str, Any] = key("Extra variables for the chat template", {})
    trust_remote_code: bool = key("Run model code that comes with the checkpoint", False)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts, answers and how they become samples (group ``data``)."""

    name: str = key("Short name, used in folders and reports")
    train: str = key("Conversation file (JSON lines) to train on")
    path: str | None = key("Shorthand of data=jsonl: the file that `train` becomes", None)
    validation: str | None = key("Conversation file for the losses printed while training", None)
    test: str | None = key("Conversation file for evaluate", None)
    max_length: int = key("Tokens of a sample; longer ones are cut, and dropped when nothing supervised is left", 2048)
    row_tokens: int | None = key(
        "Tokens of a row that several samples are packed into; null gives each sample a row of its own, padded", None
    )
    anchors_per_sample: int = key("Most anchors drawn from one sample in one epoch", 512)
    anchor_share: float | None = key(
        "Share of a sample's supervised tokens that become anchors, at most anchors_per_sample of them; null is all",
        None,
    )
    limit: int | None = key("Use the first N conversations of each file only", None)
    seed: int | None = key("Seed of sample order and anchors; null is the top-level `seed`", None)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How ``prepare`` lets the target answer prompts that have no answer yet."""

    max_new_tokens: int = key("Longest answer in tokens", 160)
    temperature: float = key("0 is greedy", 0.0)
    max_repeats: int | None = key(
        "An answer is cut (finish_reason length) when it says the same 8 tokens this often; null never", None
    )
    batch_size: int = key("Prompts answered side by side", 64)
    seed: int = key("Seed of the sampled answers; each answer depends on it and on the prompt's id only", 0)


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """Where the target's hidden states come from (group ``features``)."""

    source: Literal["online"] = key("online runs the frozen target on each micro-batch", "online")
    memory_gib: float = key("GiB of features that each rank keeps in memory for later epochs; 0 keeps none", 0.0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a step is run (group ``engine``)."""

    kind: Literal["plain", "deepspeed"] = key("plain is PyTorch alone; deepspeed adds ZeRO")
    precision: Precision = key("Precision of the drafter's forward and backward pass; masters stay fp32")
    micro_batch_size: int = key("Rows of one forward pass on one rank: samples, or packed rows (data.row_tokens)")
    global_batch_size: int = key("Samples of one optimiser step over all ranks; accumulation follows from it")
    zero_stage: Literal[0, 1, 2, 3] = key("ZeRO stage (deepspeed only)", 0)
    loss_precision: Literal["auto", "exact", "common_mode", "bf16_logits"] = key(
        "exact forms fp32 logits; common_mode cancels rounding errors; auto is exact on CUDA and for fp32; bf16_logits "
        "rounds them, for comparison",
        "auto",
    )
    attention: Literal["auto", "flex", "sdpa", "eager"] = key(
        "Attention of the drafter: flex (CUDA; skips what a mask hides), sdpa (takes a dense mask), or eager, "
        "the definition; auto is flex on CUDA, else sdpa",
        "auto",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto takes CUDA when there is one", "auto")
    threads: int | None = key("CPU threads of a rank; null leaves PyTorch's choice", None)
    initial_loss_scale: float = key("First loss scale of fp16", 65536.0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its schedule (group ``optim``)."""

    name: Literal["adamw", "adamw8bit", "muon"] = key(
        "adamw; adamw8bit: its moments in one byte each, by bitsandbytes (engine.zero_stage=0); "
        "muon for matrices with adamw for the rest (plain engine)",
        "adamw",
    )
    lr: float = key("Peak learning rate", 6e-4)
    muon_lr: float = key("Peak learning rate of the matrices under muon", 0.01)
    betas: tuple[float, float] = key("Decay of the first and second moment", (0.9, 0.95))
    eps: float = key("Added to the root of the second moment", 1e-8)
    weight_decay: float = key("Decoupled decay of matrices; norms, biases and embeddings never decay", 0.0)
    warmup_ratio: float = key("Share of all steps in which the rate rises linearly", 0.04)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "Course of the rate after warm-up: cosine to the end, wsd (stable, then a line down), or constant", "cosine"
    )
    min_lr_ratio: float = key("Rate at the end, as a share of the peak (cosine, wsd)", 0.0)
    decay_ratio: float = key("Share of all steps in which wsd falls, at the end", 0.2)
    clip_norm: float = key("Largest global gradient norm; 0 does not clip", 1.0)


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """Where metrics go besides ``metrics.jsonl`` (group ``tracker``)."""

    name: Literal["none", "wandb"] = key("none or wandb", "none")
    project: str = key("W&B project", "deepspec")
    entity: str | None = key("W&B entity", None)
    mode: Literal["online", "offline", "disabled"] = key("W&B mode; the API key comes from the environment", "online")
    tags: tuple[str, ...] = key("W&B tags", ())


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, and when to log and save."""

    epochs: int = key("Passes over the training samples", 1)
    max_steps: int | None = key("Stop after so many optimiser steps; the schedule ends there too", None)
    log_every: int = key("Steps between lines of metrics", 10)
    validate_every: int | None = key("Steps between passes over the validation samples; null never", None)
    save_every: int | None = key("Steps between checkpoints; one is always written at the end", 500)
    keep: int = key("Checkpoints kept, newest first", 2)
    resume: bool = key(
        "Go on from the newest checkpoint in the run folder; false moves it, with its metrics and config, to before-N",
        True,
    )
    warm_start: str | None = key(
        "Run, checkpoint or package whose weights to start from; what it lacks starts as drafter.init says", None
    )
    max_bad_steps: int = key("Stop after so many steps in a row with a gradient that is not finite", 20)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Decoding the test prompts (group ``evaluate``)."""

    limit: int | None = key("Prompts per domain; null takes all", None)
    max_new_tokens: int = key("Longest answer in tokens", 128)
    temperature: float = key("0 is greedy", 0.0)
    gamma: int | None = key("Drafted tokens per round; null is the drafter's own", None)
    timing_prompts: int = key("Prompts that are timed, plain, prompt lookup and speculative; 0 times nothing", 15)
    timing_new_tokens: int = key("Tokens of each timed answer", 64)
    confidence_threshold: float | None = key(
        "Time also blocks that end before a slot whose chance of being kept is lower; null does not", None
    )
    threads: int = key("CPU threads while timing on a CPU", 1)
    bootstrap: int = key("Resamples for the confidence intervals", 2000)
    check_lossless: bool = key("Decode plainly too and compare token for token (greedy, fp32)", True)
    seed: int = key("Seed of sampling and of the bootstrap", 0)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The inference package (group ``export``)."""

    profile: Literal["bf16", "fp16", "fp16_int8", "fp16_int8_full", "int8_dynamic", "int4_mlp"] = key(
        "Number formats (docs/quantisation.md). fp16_int8: INT8 per output channel for the layers' linears, FP16 for "
        "the rest; fp16_int8_full: fusion and Markov matrices too; int8_dynamic: activations too, token by token; "
        "int4_mlp: 4 bits for the MLPs, rounded on conversations of data.validation",
        "fp16_int8",
    )
    qkv: Literal["int8", "16bit"] = key("Where layers are quantised, how q, k and v are stored: all alike", "int8")
    int4_group: Literal[32, 128] = key("Columns that share a scale in 4 bits; it must divide the MLPs' widths", 32)
    overflow: Literal["refuse", "bf16"] = key(
        "What fp16 cannot hold: refuse names it and writes nothing; bf16 keeps such tensors in bf16, and a drafter "
        "with such states out of fp16",
        "refuse",
    )
    layout: Literal["native", "universal", "speculators", "zlab_dflash", "eagle3", "mtp"] = key(
        "native for DeepSpec's own decoder; for servers: universal (DSpark and anchor-first DFlash in vLLM, SGLang, "
        "speculators), speculators, zlab_dflash (fill-in), eagle3, mtp (docs/serving.md)",
        "native",
    )
    consumer: tuple[str, ...] = key(
        "Who has to load a layout for servers: vllm, sglang, speculators, published_eval; [] is one of those it is for",
        (),
    )
    server_quantisation: Literal["none", "w8a8", "w8a16"] = key(
        "Layouts for servers: INT8 for the layers' linears (compressed-tensors), with activations in INT8 or not",
        "none",
    )
    server_dtype: Literal["auto", "bf16", "fp16"] = key(
        "Layouts for servers: type of everything else, which is the one the target is served in; auto asks its config",
        "auto",
    )
    include_embeddings: bool = key(
        "Copies of the target's embedding and head too; the published evaluation code needs them, DeepSpec does not",
        False,
    )
    calibration_prompts: int = key(
        "Prompts of data.validation that are decoded, as evaluate does, to calibrate the confidence head; 0 skips it",
        48,
    )
    fold_temperature: float | None = key(
        "Layouts for servers: divide the confidence's log-odds by it, for vLLM, which applies no temperature", None
    )
    sps_table: str | None = key("JSON of step rates, copied beside a universal layout as dspark_sps.json", None)
    out: str | None = key("Folder of the package; null is package-<profile or layout> in the run folder", None)
    verify_prompts: int = key("Test prompts decoded before and after, 0 skips it", 12)
    verify_samples: int = key("Test conversations compared in each domain", 20)
    max_length_change: float = key(
        "Largest relative loss of accepted length that is let through: what the upper end of its 95 % interval must "
        "not exceed on any domain",
        0.01,
    )
    force: bool = key("Write the package although it lost more; the card says so", False)


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Folders (group ``paths``)."""

    cache: str = key("Converted targets and tokenised samples")
    runs: str = key("Parent of the run folders", "runs")
    run: str = key("This run's folder")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What ``plan`` assumes where it cannot know."""

    tflops: float = key("Sustained rate of one rank in TFLOP/s, forward and backward together", 1.0)
    ranks: int = key("Processes the run will have, one a device", 1)
    samples: int | None = key("Training samples; null counts the lines of data.train", None)
    tokens_per_sample: int | None = key("Mean length of a sample in tokens; null is half of data.max_length", None)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole recipe, resolved. ``drafter`` is the drafter's own frozen dataclass, named by its ``_target_``."""

    recipe: str = key("Name of the recipe, chosen by recipe=NAME")
    seed: int = key("Seed of initial weights; of sample order and anchors too where data.seed is null", 0)
    mode: Literal["all", "target", "answers"] = key(
        "What prepare does: all; target fetches or converts the target; answers lets it answer the prompts", "all"
    )
    show: int = key("Samples that prepare prints with their supervised tokens coloured", 0)
    out: str | None = key(
        "Folder that prepare writes the answered splits to (train.jsonl, ...); null keeps them in the cache", None
    )
    target: TargetConfig = key("The frozen model that is to be made faster")
    drafter: Any = key("The drafter's own keys; `_target_` names its configuration class")
    data: DataConfig = key("Prompts, answers and how they become samples")
    generate: GenerateConfig = key("How prepare answers prompts")
    features: FeaturesConfig = key("Where the target's hidden states come from")
    engine: EngineConfig = key("How a step is run")
    optim: OptimConfig = key("The optimiser and its schedule")
    train: TrainConfig = key("How long to train, and when to log and save")
    tracker: TrackerConfig = key("Where metrics go")
    evaluate: EvaluateConfig = key("Decoding the test prompts")
    export: ExportConfig = key("The inference package")
    plan: PlanConfig = key("What plan assumes")
    paths: PathsConfig = key("Folders")

    @property
    def data_seed(self) -> int:
        """Seed of sample order and anchors."""
        return self.seed if self.data.seed is None else self.data.seed


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """What ``deepspec.evaluate`` was asked for; ``config`` is the run's own, with the given overrides applied."""

    run: str = key("Run folder, or a package inside one")
    config: RunConfig = key("The run's config.yaml, overridden by the groups given on the command line")
    package: str | None = key("Package to score in place of the run's newest checkpoint", None)
    out: str | None = key("Folder of the report; null is evaluation in the run folder", None)
    allow_other_target: bool = key(
        "Score with another revision of the target than the one trained with: lossless, but fewer tokens are accepted",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """What ``deepspec.export`` was asked for; ``config`` is the run's own, with the given overrides applied."""

    run: str = key("Run folder; with source, the run whose target the drafter belongs to")
    source: str | None = key(
        "Folder of another project, a layout for servers or a package: imported as a run folder of its own", None
    )
    config: RunConfig = key("The run's config.yaml, overridden by the groups given on the command line")
