"""The recipe: everything a user decides about a run, one struct per section of the TOML file.

Each field carries its description and its range; the reader, the command line's flags and the reference page are all
made from them. A flag is the field's name with dashes, whatever its section, so field names are unique in the recipe
(`Meta.extra["flag"]` gives the few flags that would read badly otherwise).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coterie.config.cluster_section import ClusterSection as ClusterSection  # noqa: PLC0414 - a name of the recipe
from coterie.config.cluster_section import LocalWorker as LocalWorker  # noqa: PLC0414 - as above
from coterie.config.side_section import SideSection
from coterie.jobs.model_spec import FrozenDtype, LoraVariant, TrainableMethod

TaskName = Literal["token-classification", "sequence-classification", "regression", "causal-lm", "summarization"]
DataFormat = Literal["auto", "conll", "jsonl", "csv", "datasets"]
# The planner's own names, spelled out (a test holds them equal): importing the planner would load numpy for `--help`.
Objective = Literal["time", "memory"]
Allocator = Literal["auto", "default", "tight"]
ComputeDtype = Literal["float32", "bfloat16"]
TrainSchedule = Literal["flush", "gpipe", "stash", "2bw"]
TrainMode = Literal["pipeline", "side"]

# msgspec wants a range on the number itself, not on "number or nothing".
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]

MODEL_LEARNING_RATE, SIDE_LEARNING_RATE = 5e-5, 1e-3


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pretrained model to fine-tune."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            description="A Hugging Face model: a folder on disk, or a name on the hub (downloaded once).",
            extra={"flag": "model"},
        ),
    ]
    compute_dtype: Annotated[
        ComputeDtype,
        Meta(
            description="Type of the arithmetic. Trained weights stay float32. bfloat16 is slow on CPUs without AMX.",
            extra={"refused": {"float16": "float16 loses small gradients unless losses are scaled, which is not done"}},
        ),
    ] = "float32"
    frozen_dtype: Annotated[
        FrozenDtype,
        Meta(
            description="How weights of linear layers that are not trained are held: half (`bfloat16`), a quarter "
            "(`int8`) or a seventh (`int4`) of the memory, for a small loss of accuracy. For LoRA above all. int8 and "
            'int4 need `pip install "coterie[bitsandbytes]"` on every device.'
        ),
    ] = "float32"


class DataSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to learn from. Relative paths start at the current folder."""

    train: Annotated[
        str,
        Meta(
            min_length=1,
            description="Training data: a file, a folder with a file per split (train, dev, test), or a folder made by "
            "`save_to_disk` of Hugging Face datasets.",
        ),
    ]
    dev: Annotated[
        Text | None,
        Meta(description="Data for the quality after each epoch. Default: the dev split of `train`, if any."),
    ] = None
    test: Annotated[
        Text | None, Meta(description="Data for the quality at the end. Default: the test split of `train`, if any.")
    ] = None
    task: Annotated[TaskName, Meta(description="What the model learns to do.")] = "token-classification"
    format: Annotated[DataFormat, Meta(description="Format of the data files; `auto` looks at name and content.")] = (
        "auto"
    )
    text_column: Annotated[
        int | Text | None,
        Meta(
            description="Column of the text (for tags: of the words): its name, or its number (0 is the first). "
            "Default: the usual one."
        ),
    ] = None
    pair_column: Annotated[
        int | Text | None,
        Meta(description="Column of the second text of a pair. Default: the usual one, if there is one."),
    ] = None
    label_column: Annotated[
        int | Text | None,
        Meta(description="Column of the labels: its name, or its number (-1 is the last). Default: the usual one."),
    ] = None
    sentence_column: Annotated[
        NonNegativeInt | Text | None,
        Meta(description="In CSV files: the column that says which sentence a word belongs to."),
    ] = None
    label_names: Annotated[
        tuple[Text, ...], Meta(description="What labels written as integers mean, in order: the first is label 0.")
    ] = ()
    encoding: Annotated[str, Meta(min_length=1, description="Encoding of the data files.")] = "utf-8"
    max_tokens: Annotated[
        Annotated[int, Meta(ge=4)] | None,
        Meta(
            description="Longest row in tokens, longer ones are cut. Default: the model's context; of causal models "
            "at most 1024."
        ),
    ] = None
    prompt: Annotated[
        Text | None,
        Meta(
            description="Of `causal-lm` and `summarization`: what a model reads before its answer, with `{text}` and, "
            "for a second column, `{input}`; with a chat template it is what the user says. Default: a plain one."
        ),
    ] = None
    packing: Annotated[
        bool,
        Meta(description="Of `causal-lm`: put several short rows into one context; they do not see each other."),
    ] = False


class TrainSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the parameters are trained."""

    mode: Annotated[
        TrainMode,
        Meta(
            description="Train parameters of the model itself over a `pipeline` of devices, or a network beside it "
            "(`side`): devices run the frozen model forward once, a server trains on what they send it."
        ),
    ] = "pipeline"
    method: Annotated[
        TrainableMethod,
        Meta(
            description="Train all parameters (`full`), adapters (`lora`), biases and task layers (`bitfit`), or the "
            "task layers alone (`head`)."
        ),
    ] = "full"
    lora_variant: Annotated[
        LoraVariant,
        Meta(
            description="Plain adapters (`lora`), scaled by alpha / sqrt(rank) for high ranks (`rslora`), or with the "
            "length of each output's weights trained apart (`dora`: better at low ranks, slower)."
        ),
    ] = "lora"
    lora_rank: Annotated[int, Meta(ge=1, description="Rank of the adapters.")] = 8
    lora_alpha: Annotated[int, Meta(ge=1, description="Scale of the adapters: their output times alpha / rank.")] = 16
    lora_dropout: Annotated[float, Meta(ge=0, lt=1, description="Dropout before the adapters.")] = 0.0
    lora_targets: Annotated[
        tuple[Text, ...],
        Meta(description="Name endings of the modules that get adapters. Default: PEFT's for the model."),
    ] = ()
    freeze: Annotated[
        tuple[Text, ...],
        Meta(
            description="Parameters that are not trained: `embeddings`, `block 3`, `block 0..3` (both included), "
            "`output layer`, or patterns of names such as `*.layer.0.*`."
        ),
    ] = ()
    trainable: Annotated[
        tuple[Text, ...],
        Meta(
            description="Instead of `freeze`, in the same words: all that is trained. With `lora`: where adapters go, "
            "with `bitfit`: whose biases are trained; task layers are trained beside them."
        ),
    ] = ()
    epochs: Annotated[int, Meta(ge=1, description="Passes over the training data.")] = 3
    max_steps: Annotated[PositiveInt | None, Meta(description="Stop after this many optimizer steps.")] = None
    batch_rows: Annotated[int, Meta(ge=1, description="Rows (sentences) per optimizer step.")] = 16
    micro_batches: Annotated[
        PositiveInt | None,
        Meta(description="Parts a batch is cut into. Fixed for a run. Default: the planner chooses."),
    ] = None
    learning_rate: Annotated[
        PositiveFloat | None,
        Meta(
            description=f"Highest learning rate. Default: {MODEL_LEARNING_RATE:g}, which suits a whole model; with "
            f'`mode = "side"` {SIDE_LEARNING_RATE:g}, since only a small network learns.'
        ),
    ] = None
    lr_schedule: Annotated[
        Literal["linear", "cosine", "constant"], Meta(description="How the learning rate falls after the warm-up.")
    ] = "linear"
    warmup_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Part of the run in which the learning rate rises.")
    ] = 0.0
    warmup_steps: Annotated[
        NonNegativeInt | None, Meta(description="The same in optimizer steps; give one of the two.")
    ] = None
    weight_decay: Annotated[float, Meta(ge=0, description="Decay of weight matrices (never of norms and biases).")] = (
        0.01
    )
    max_grad_norm: Annotated[
        float, Meta(ge=0, description="Clip gradients to this global norm; 0 switches it off.")
    ] = 1.0
    optimizer: Annotated[Literal["adamw", "sgd"], Meta(description="The optimizer.")] = "adamw"
    momentum: Annotated[float, Meta(ge=0, lt=1, description="Momentum of `sgd`.")] = 0.0
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="Base of all randomness: data order, dropout, new layers, drawn tokens."),
    ] = 0
    schedule: Annotated[
        TrainSchedule,
        Meta(
            description="Order of forwards and backwards. `flush` (1F1B) and `gpipe` give the numbers of one device; "
            "`stash` and `2bw` keep the pipeline full with weights that lag behind."
        ),
    ] = "flush"
    recompute: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Run forwards again in backward to save memory; `auto` lets the planner decide per stage."),
    ] = "auto"
    group_by_length: Annotated[
        bool, Meta(description="Put rows of similar length into one batch: less padding, less random order.")
    ] = True

    @property
    def highest_learning_rate(self) -> float:
        """The rate that is given, or the default for what is trained."""
        if self.learning_rate is not None:
            return self.learning_rate
        return SIDE_LEARNING_RATE if self.mode == "side" else MODEL_LEARNING_RATE


class PlanSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner may do and what it aims at."""

    objective: Annotated[
        Objective, Meta(description="Least seconds per step (`time`) or least memory of the fullest device (`memory`).")
    ] = "time"
    lossy_links: Annotated[
        bool, Meta(description="Allow fp16 and int8 on slow links. Off, a run is exact: links carry float32.")
    ] = False
    allocator: Annotated[
        Allocator,
        Meta(description="`tight` gives freed memory back at once: lower peaks for some CPU time. Linux with glibc."),
    ] = "auto"
    min_workers: Annotated[int, Meta(ge=1, description="Use at least this many devices.")] = 1
    max_workers: Annotated[PositiveInt | None, Meta(description="Use at most this many devices.")] = None
    cuts: Annotated[
        tuple[PositiveInt, ...] | None,
        Meta(
            description="Cut at these units instead of searching: each is the first unit of a stage (0 is the "
            "embedding, 1 the first block). Stages go to the devices in the order they joined; with `keep_data_local` "
            "the first and the last go to local workers."
        ),
    ] = None
    keep_data_local: Annotated[
        bool,
        Meta(
            description="The first and the last stage run on local workers, of which there must be two: token ids and "
            "labels are sent to no other device. Others still see hidden states, which tell much of a text."
        ),
    ] = False


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where results go, and what is kept."""

    output: Annotated[
        str, Meta(min_length=1, description="Folder of the run: model, checkpoints, events, plot, this recipe.")
    ] = "runs/latest"
    checkpoint_every: Annotated[
        int, Meta(ge=0, description="Optimizer steps between checkpoints; 0: at the end of each epoch only.")
    ] = 0
    keep_checkpoints: Annotated[int, Meta(ge=2, description="Checkpoints kept; older ones are removed.")] = 2
    resume: Annotated[bool, Meta(description="Continue the run in `output` from its last whole checkpoint.")] = False
    evaluate_every_epoch: Annotated[bool, Meta(description="Measure quality on `dev` after each epoch.")] = True
    tensorboard: Annotated[bool, Meta(description="Also write TensorBoard files into the run folder.")] = False


class GenerateSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a causal model writes text: in `predict` always, in `evaluate` where it is asked for."""

    max_new_tokens: Annotated[int, Meta(ge=1, description="Most tokens of an answer.")] = 128
    temperature: Annotated[
        float,
        Meta(ge=0, description="How freely a token is drawn; 0 takes the likeliest one, the same at every run."),
    ] = 0.0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Draw only among the likeliest tokens that together have this probability.")
    ] = 1.0
    when_evaluating: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Let `evaluate` also write answers and compare them (ROUGE); `auto`: for summarization only.",
            extra={"flag": "generate"},
        ),
    ] = "auto"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole recipe. Make one with `load_recipe`, which checks it."""

    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    side: SideSection = SideSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()
    generate: GenerateSection = GenerateSection()
    cluster: ClusterSection = ClusterSection()
