"""A trained model from whose outputs a student learns, in addition to its targets (Hinton et al., "Distilling the
knowledge in a neural network", 2015).

With w the share and T the temperature, the loss of a batch is (1 − w) · loss of the task + w · T² · KL(teacher ‖
student), both as means over the task's targets, so that it is the same for any split of a step into micro-batches and
over ranks. For embeddings T² · KL is replaced by the mean of 1 − cos between the two vectors of a text, for `hard`
targets by the cross entropy against the teacher's likeliest class. A distilled head (Touvron et al., ICML 2021, "DeiT",
section 4) learns the first term with one linear layer and the second with another. Differences inside the models are
added, each times its weight and averaged over the tokens of a micro-batch. Evaluations use only the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.apply import TEACHER, Setup, apply
from penstock.boundary.files import quoted
from penstock.config.graph import Graph, PatchInput
from penstock.config.model import ModelConfig
from penstock.config.recipes import INSIDE, require_alike
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.kernels.distil import Taught, divergences, relation_divergence, score_difference
from penstock.kernels.padding import is_real
from penstock.models.anatomy import uncompiled
from penstock.models.convert import from_pretrained
from penstock.models.heads import Vocabulary
from penstock.models.inputs import Inputs, lengths_of
from penstock.models.model import Model
from penstock.models.stack import TokenStack
from penstock.models.sublayers import Attention
from penstock.parallel.fsdp import shard_frozen
from penstock.parallel.sharded_init import made_in_rows
from penstock.tasks.embedding import Embedding, vectors
from penstock.tasks.task import Task
from penstock.tasks.text import WordTask


class Teacher:
    """A teacher in evaluation mode for a student. It draws no random numbers and is not part of the student, so that
    checkpoints and exports do not contain it. It may be sharded if the student is. For a head over words the teacher
    computes only features: the student's head computes the logits of both models together, a few rows at a time."""

    def __init__(self, model: Model, student: ModelConfig, recipe: Recipe) -> None:
        """`model` is changed in place."""
        self.model, self.student = model, student.graph
        self.share, self.temperature = recipe.teacher_weight, recipe.temperature
        self.hard = recipe.teacher_targets == "hard"
        self.inside = [
            (weight, difference)
            for weight, difference in (
                (recipe.teacher_hidden, _hidden_loss), (recipe.teacher_attention, _relations_loss),
                (recipe.teacher_scores, _scores_loss),
            )
            if weight
        ]  # fmt: skip
        """Differences inside the models that are added to the loss, each with its weight."""
        self.compared = slice(0)
        """Blocks whose attention is compared."""
        if recipe.teacher_scores or recipe.teacher_attention:
            self.compared = slice(None) if recipe.teacher_scores else slice(-1, None)
        self.head: Vocabulary | None = None
        if model.graph.words is not None and self.student.words is not None:
            self.head = getattr(model, model.graph.words.name)
            self.head.passes = True
        self.release: Callable[[], None] | None = None
        """Frees the weights that its passes have gathered; None if they are not sharded."""
        model.eval().requires_grad_(False)

    def __call__(self, task: Task, model: nn.Module, batch: Any) -> Tensor:
        """The student's loss for a batch, 0-d; differentiable by the student's parameters."""
        try:
            return self._loss(task, model, batch)
        finally:
            if self.release is not None:
                self.release()

    def _loss(self, task: Task, model: nn.Module, batch: Any) -> Tensor:
        if not self.inside:
            return self._outputs_loss(task, model, batch)
        plain: Any = uncompiled(model)
        with _looking(self.model, self.compared) as teacher, _looking(plain, self.compared) as student:
            loss = self._outputs_loss(task, model, batch)
            arguments = Inputs.of(plain.graph, task.inputs(batch))
            runs = [
                (run, teacher[name], lengths_of(self.model.graph, self.student.run(name), arguments))
                for name, run in student.items()
            ]
            for weight, difference in self.inside:
                loss = loss + weight * torch.stack([difference(*run) for run in runs]).mean()
        return loss

    def _outputs_loss(self, task: Task, model: nn.Module, batch: Any) -> Tensor:
        """The loss of the task, combined with the divergence between the outputs."""
        inputs = task.inputs(batch)
        with torch.no_grad():
            accepted = self.model.graph.arguments
            named = zip(self.student.arguments, inputs)
            taught: Tensor = self.model(
                **{name: self._cast(value) for name, value in named if name in accepted}
            )
            taught = torch.cat(vectors(taught, batch)) if isinstance(task, Embedding) else taught
        if isinstance(task, Embedding):
            outputs = model(*inputs)
            distance = 1.0 - (torch.cat(vectors(outputs, batch)) * taught).sum(1).mean()
            return (1.0 - self.share) * task.loss(outputs, batch) + self.share * distance
        if self.head is None:
            return self._classes_loss(task, model, inputs, taught, batch)
        head = model.get_submodule(self.student.words.name) if self.student.words else None
        assert isinstance(head, Vocabulary)  # `open_teacher` checks this
        x = taught.flatten(0, -2)
        head.taught = Taught(x, self.head.weight, self.head.bias, self.share, self.temperature, self.head.cap)
        try:
            return task.loss(model(*inputs), batch)
        finally:
            head.taught = None

    def _classes_loss(
        self, task: Task, model: nn.Module, inputs: tuple[Any, ...], taught: Tensor, batch: Any
    ) -> Tensor:
        """The loss of a batch for the teacher's logits `taught`, (B, classes)."""
        student = uncompiled(model)
        assert isinstance(student, Model)  # `open_teacher` checks this
        student.both_logits = self.student.classes is not None and self.student.classes.distilled
        try:
            outputs = model(*inputs)
        finally:
            both, student.both_logits = student.both_logits, False
        outputs, logits = outputs.unbind(1) if both else (outputs, outputs)
        if self.hard:
            divergence = F.cross_entropy(logits.float(), taught.argmax(1), reduction="none")
        else:
            divergence = divergences(logits.float(), taught.float(), self.temperature)
        counted = task.counted(batch)
        if counted is None:
            mean = divergence.mean()
        else:
            mean = divergence.where(counted, 0.0).sum() / counted.sum().clamp(min=1)
        return (1.0 - self.share) * task.loss(outputs, batch) + self.share * mean

    def _cast(self, value: Any) -> Any:
        """An argument in the dtype of the teacher's weights, if it is a floating-point tensor."""
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(next(self.model.parameters()).dtype)
        return value


def _hidden_loss(student: TokenStack, teacher: TokenStack, lengths: Tensor | None) -> Tensor:
    """The mean over blocks and tokens of ‖student − teacher‖² / ‖teacher‖², 0-d; lengths (B,) of samples."""
    assert student.outputs
    assert teacher.outputs
    depth, losses = len(student.outputs), []
    for number, output in enumerate(student.outputs):
        target = teacher.outputs[_at_same_depth(number, depth, len(teacher.outputs))]
        output, target = output.float(), target.float()
        size = target.square().sum(-1).clamp(min=1e-12)
        difference = (output - target).square().sum(-1) / size
        if lengths is None:
            losses.append(difference.mean())
            continue
        tokens = difference.t() if student.sequence_first else difference
        real = is_real(lengths, tokens.shape[1])
        losses.append(tokens.where(real, 0.0).sum() / real.sum().clamp(min=1))
    return torch.stack(losses).mean()


def _relations_loss(student: TokenStack, teacher: TokenStack, lengths: Tensor | None) -> Tensor:
    """The mean divergence of the self-attention relations of queries, keys and values in the last blocks, 0-d."""
    looked, others = (_looked_in(run, -1)[:3] for run in (student, teacher))
    losses = []
    for own, taught in zip(looked, others, strict=True):
        real = None if lengths is None else is_real(lengths, own.shape[1])
        heads = math.gcd(own.shape[2], taught.shape[2])
        losses.append(
            relation_divergence(own.flatten(2), taught.flatten(2), heads, real=real, causal=student.causal)
        )
    return torch.stack(losses).mean()


def _scores_loss(student: TokenStack, teacher: TokenStack, lengths: Tensor | None) -> Tensor:
    """The mean over blocks of the difference between attention scores, 0-d."""
    losses, depths = [], (len(student.blocks), len(teacher.blocks))
    for number in range(depths[0]):
        own, taught = _looked_in(student, number), _looked_in(teacher, _at_same_depth(number, *depths))
        real = None if lengths is None else is_real(lengths, own[0].shape[1])
        losses.append(score_difference(own[3:], taught[3:], real=real, causal=student.causal))
    return torch.stack(losses).mean()


def _at_same_depth(number: int, depth: int, others: int) -> int:
    """The number of the block at the same relative depth in a deeper stack with `others` blocks."""
    return round((number + 1) * others / depth) - 1


def _attention_of(block: nn.Module) -> Attention:
    attention = block.attention
    if not isinstance(attention, Attention):
        raise ConfigError(
            "recipe.teacher_attention and recipe.teacher_scores compare the tokens' keys and values, which attention "
            "with latents does not compute; leave them out."
        )
    return attention


def _looked_in(run: TokenStack, number: int) -> list[Tensor]:
    """The recorded tensors of a block's attention, each (B, N, heads, K); see `Attention.looked`."""
    (looked,) = _attention_of(run.blocks[number]).looked or []
    return [x.transpose(0, 1) if run.sequence_first else x for x in looked]


@contextmanager
def _looking(model: nn.Module, inside: slice) -> Iterator[dict[str, TokenStack]]:
    """Within this context, each stack of a model records the outputs of its blocks, and the inputs of attention in the
    blocks `inside`. Yields the stacks by name."""
    runs = {name: module for name, module in model.named_children() if isinstance(module, TokenStack)}
    attentions = [_attention_of(block) for run in runs.values() for block in run.blocks[inside]]
    for run in runs.values():
        run.outputs = []
    for attention in attentions:
        attention.looked = []
    try:
        yield runs
    finally:
        for run in runs.values():
            run.outputs = None
        for attention in attentions:
            attention.looked = None


def open_teacher(task: Any, module: nn.Module, setup: Setup) -> Teacher:
    """Open a recipe's teacher for the student `module`, under the same Plan; it is sharded if the student is. Raises
    ConfigError if it cannot teach this student in this task, and the errors of `from_pretrained`."""
    plan, dims, recipe = setup.plan, setup.dims, setup.recipe
    assert recipe.teacher is not None
    student = _required_student(task, module, setup.config)
    rows: dict[str, Tensor] | None = None
    if plan.sharding in ("fsdp", "hsdp") and not dims.alone:
        model, rows = made_in_rows(partial(from_pretrained, recipe.teacher), dims)
    else:
        model = from_pretrained(recipe.teacher)
    _require_teachable(recipe, model.config, student, task, module)
    teacher = Teacher(model, student, recipe)
    apply(model, setup.beside(TEACHER, rows=rows))
    if rows is not None:
        teacher.release = shard_frozen(model, plan, dims, setup.device, rows)
    return teacher


def _required_student(task: Any, module: nn.Module, student: ModelConfig | None) -> ModelConfig:
    if student is None or not isinstance(uncompiled(module), Model):
        raise ConfigError(
            "recipe.teacher needs a student built from a configuration of Penstock, to compare its outputs with the "
            "teacher's; build one, or add the divergence to your own loss."
        )
    if not isinstance(task, Task):
        raise ConfigError(
            "recipe.teacher is added to the loss of a Task, but the loss is your own function; give a Task, or add the "
            "divergence in your function."
        )
    return student


def _require_teachable(
    recipe: Recipe, teacher: ModelConfig, student: ModelConfig, task: Task, module: nn.Module
) -> None:
    assert recipe.teacher is not None
    require_alike(teacher, student, recipe.teacher)
    if recipe.teacher_targets == "hard" and student.graph.classes is None:
        raise ConfigError(
            "recipe.teacher_targets hard uses the teacher's likeliest class, but this student has no classes; use "
            "soft."
        )
    if student.graph.words is not None:
        head = module.get_submodule(student.graph.words.name)
        if not (isinstance(task, WordTask) and isinstance(head, Vocabulary)):
            raise ConfigError(
                f"recipe.teacher cannot be compared with a student trained by {type(task).__name__} with a head of "
                f"{type(head).__name__}; use a task on words, or keep adapters off the head."
            )
    elif isinstance(task, Embedding):
        pass  # the same number of features, which `require_alike` checks
    elif student.graph.classes is None or student.graph.classes.classes < 2:
        raise ConfigError(
            "recipe.teacher teaches words, classes or embeddings, but this student returns numbers or features; leave "
            "it out."
        )
    if problems := list(_inside_problems(teacher.graph, student.graph, recipe)):
        raise ConfigError(problems)


def _inside_problems(teacher: Graph, student: Graph, recipe: Recipe) -> Iterator[str]:
    """Reasons why blocks cannot be compared inside as the recipe asks."""
    name, compared = quoted(str(recipe.teacher)), [setting for setting in INSIDE if getattr(recipe, setting)]
    if not compared:
        return
    for seen, own in zip(teacher.inputs_of(PatchInput), student.inputs_of(PatchInput), strict=True):
        if (seen.length, seen.learned_tokens) != (own.length, own.learned_tokens):
            yield (
                f"{', '.join(f'recipe.{setting}' for setting in INSIDE)} compare tokens, but an image is "
                f"{seen.length} of them for {name} and {own.length} for the student; use the same model.patch_size, "
                "model.classifier and model.distilled, or leave them out."
            )
    stacks, taught = ({run.name: run.stack for run in graph.runs} for graph in (student, teacher))
    if recipe.teacher_hidden and (stacks.keys() != taught.keys() or teacher.width != student.width):
        yield (
            f"recipe.teacher_hidden compares features of blocks, but {name} has {teacher.width} of them in "
            f"{', '.join(taught)} and the student {student.width} in {', '.join(stacks)}; use a student of the same "
            "width, or leave it out."
        )
    elif stacks.keys() != taught.keys():
        yield (
            f"recipe.{compared[-1]} compares runs of the same name, but {name} has {', '.join(sorted(taught))} and the "
            f"student {', '.join(sorted(stacks))}; leave it out."
        )
    if compared != ["teacher_hidden"] and any(
        stack.experts_in == "block" for stack in (*stacks.values(), *taught.values())
    ):
        yield (
            f"recipe.{compared[-1]} compares attention over all samples, but with model.experts_in=block samples are "
            "split over several blocks; leave one of the two out."
        )
    if stacks.keys() != taught.keys():
        return
    shallow = [run for run, stack in stacks.items() if taught[run].depth < stack.depth]
    for setting in compared if shallow else ():
        if setting != "teacher_attention":
            yield (
                f"recipe.{setting} compares each block of the student with one of {name}, which has fewer in "
                f"{', '.join(shallow)}; use a shallower student, or leave it out."
            )
    for run, stack in stacks.items() if recipe.teacher_scores and not shallow else ():
        layers, others = stack.layers, taught[run].layers
        for number, layer in enumerate(layers):
            heads = others[_at_same_depth(number, len(layers), len(others))].heads
            if layer.heads != heads:
                yield (
                    f"recipe.teacher_scores compares head by head, but the heads of {run}.blocks.{number} are "
                    f"{layer.heads}, and {heads} in {name}; use the same number, or recipe.teacher_attention, which "
                    "compares any number."
                )
                break
