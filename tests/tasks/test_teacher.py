"""A teacher's part in the loss: what is computed by hand, however steps are cut, and refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.spawn import spawn
from penstock.build import Built, build
from penstock.compress.pad import write_transformers
from penstock.compress.quantise import quantise_folder
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.export.export import export
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.optim.tensors import local
from penstock.parallel import ALONE, dims_of
from penstock.shards import whole_of
from penstock.tasks import (
    Embedding,
    MaskedWords,
    NextToken,
    Sentences,
    Task,
    TextBatch,
    Translation,
    classification_loss,
)

SIZES: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32}
VIT = ViTConfig(image_size=8, patch_size=4, channels=1, classes=5, **SIZES)
GPT = DecoderConfig(vocabulary=40, sequence=8, **SIZES)
BERT = EncoderConfig(vocabulary=40, sequence=8, head="words", **SIZES)
LABELS = replace(BERT, head="classes", classes=3)
BOTH = Seq2SeqConfig(
    vocabulary=40, sequence=8, decoder_sequence=8, encoder=Stack(**SIZES), decoder=Stack(**SIZES)
)
KINDS: dict[str, tuple[ModelConfig, Task]] = {
    "images": (VIT, classification_loss),
    "next token": (GPT, NextToken()),
    "masked words": (BERT, MaskedWords()),
    "translation": (BOTH, Translation()),
    "sentences": (LABELS, Sentences()),
}
SHARE, WARMTH = 0.3, 2.5


def _sized(model: Any, **sizes: int) -> Any:
    """A model of the same inputs and outputs."""
    if isinstance(model, Seq2SeqConfig):
        stack = Stack(**SIZES | sizes)
        return replace(model, encoder=stack, decoder=stack)
    return replace(model, **sizes)


def _teacher(model: ModelConfig, folder: Path) -> Recipe:
    """A recipe with a teacher of weights that are large enough to have an opinion."""
    torch.manual_seed(7)
    teacher = create(_sized(model, width=32, depth=2))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(2.0)
    save_pretrained(teacher, folder)
    return Recipe(teacher=str(folder), teacher_weight=SHARE, temperature=WARMTH, clip_norm=None)


def _batch(kind: str, samples: int = 4, seed: int = 0) -> Any:
    """Samples of which some targets count nothing, so that batches have different numbers of them."""
    g = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> Tensor:
        return torch.randint(0, 40, shape, generator=g)

    if kind == "images":
        classes = torch.randint(0, 5, (samples,), generator=g)
        return torch.randn(samples, 1, 8, 8, generator=g), classes.where(torch.arange(samples) % 3 > 0, -100)
    targets = words(samples, 8)
    targets[:, : 1 + seed % 3] = -100
    ids, lengths = torch.arange(samples).numpy(), torch.randint(3, 9, (samples,), generator=g)
    inputs: tuple[Any, ...]
    labels, count = None, int((targets != -100).sum())
    if kind == "next token":
        documents = (torch.arange(8) > 3).long().expand(samples, 8)
        inputs = (words(samples, 8), documents, targets)
    elif kind == "masked words":
        rows = torch.arange(samples)[:, None] * 8 + torch.tensor([0, 2])
        targets = targets[:, 1:3].flatten()
        count = int((targets != -100).sum())
        inputs = (words(samples, 8), lengths, None, None, targets, rows.flatten())
    elif kind == "translation":
        inputs = (words(samples, 8), words(samples, 8), lengths, targets, None, 0.1)
    else:
        inputs, labels = (words(samples, 8), lengths), torch.randint(0, 3, (samples,), generator=g)
    return TextBatch(inputs=inputs, ids=ids, tokens=0, labels=labels, count=count)


def _logits(kind: str, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Rows of logits and their targets, of a model that is not asked for its loss."""
    if kind == "images":
        return model(batch[0]), batch[1]
    inputs = list(batch.inputs)
    at = {"next token": 2, "masked words": 4, "translation": 3}.get(kind)
    if at is None:
        return model(*inputs), batch.labels
    targets, inputs[at] = inputs[at], None
    return model(*inputs).flatten(0, -2), targets.flatten()


def _by_hand(kind: str, built: Built, teacher: nn.Module, batch: Any) -> Tensor:
    z, targets = _logits(kind, built.model, batch)
    u, _ = _logits(kind, teacher, batch)
    counted = targets != -100
    z, u, targets = z[counted], u[counted].detach(), targets[counted]
    smoothing = 0.1 if kind == "translation" else 0.0
    hard = F.cross_entropy(z, targets, label_smoothing=smoothing)
    p, q = (z / WARMTH).softmax(1), (u / WARMTH).softmax(1)
    return (1 - SHARE) * hard + SHARE * WARMTH**2 * (q * (q.log() - p.log())).sum(1).mean()


def _student(
    kind: str, model: ModelConfig, teacher: nn.Module, folder: Path, **shares: float
) -> tuple[Recipe, Built, Any, Any, tuple[Any, ...]]:
    """A student that learns from its teacher what `shares` name, and no words: the recipe, the student, the teacher as
    it is read, a batch and the inputs in it."""
    save_pretrained(teacher, folder)
    recipe = Recipe(teacher=str(folder), teacher_weight=0.0, clip_norm=None, **shares)
    built, batch = build(model, Plan(), recipe=recipe, loss=KINDS[kind][1]), _batch(kind)
    return recipe, built, from_pretrained(folder).eval(), batch, KINDS[kind][1].inputs(batch)


def _counts(kind: str, run: Any, inputs: tuple[Any, ...], tokens: int) -> list[int]:
    """How many of `tokens` are no padding, for each sample."""
    lengths = {"masked words": 1, "sentences": 1, "translation": 2}.get(kind)
    return [tokens] * 4 if lengths is None or run.causal else inputs[lengths].tolist()


def _outputs(model: nn.Module, inputs: tuple[Any, ...], *modules: nn.Module) -> list[Tensor]:
    """What some modules give, by hooks."""
    seen: list[Tensor] = []
    handles = [one.register_forward_hook(lambda _, __, output: seen.append(output)) for one in modules]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return seen


def _blocks(model: Any, run: Any) -> Any:
    return model.get_submodule(f"{run.name}.blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_blocks_are_compared_at_the_same_depth(kind: str, tmp_path: Path) -> None:
    model, task = KINDS[kind]
    recipe, built, teacher, batch, inputs = _student(
        kind, _sized(model, depth=2), create(_sized(model, depth=4)), tmp_path / "teacher", teacher_hidden=2.0
    )
    parts = []
    for run in teacher.graph.runs:
        ours = _outputs(built.model, inputs, *_blocks(built.model, run))
        theirs = _outputs(teacher, inputs, *_blocks(teacher, run)[1::2])
        tokens = ours[0].shape[1]
        real = torch.arange(tokens) < torch.tensor(_counts(kind, run, inputs, tokens))[:, None]
        ratios = [
            ((o - t.detach()).norm(dim=-1) / t.detach().norm(dim=-1))[real] ** 2 for o, t in zip(ours, theirs)
        ]
        parts.append(torch.stack([ratio.mean() for ratio in ratios]).mean())
    expected = task(built.model, batch) + 2.0 * torch.stack(parts).mean()
    _require_loss(built, batch, expected, rtol=None, atol=None)
    with pytest.raises(ConfigError, match="use a shallower student"):
        build(_sized(model, depth=5), Plan(), recipe=recipe, loss=task)
    with pytest.raises(ConfigError, match="padding=keep"):
        build(_sized(model, depth=2), Plan(padding="remove"), recipe=recipe, loss=task)
    save_pretrained(create(_sized(model, width=32, depth=2)), tmp_path / "teacher")
    with pytest.raises(ConfigError, match="use a student of the same width"):
        build(model, Plan(), recipe=recipe, loss=task)


def _relations(model: Any, inputs: tuple[Any, ...], run: Any) -> list[Tensor]:
    """Queries, keys and values of the last block, (B, N, heads, K)."""
    attention = _blocks(model, run)[-1].attention
    (seen,) = _outputs(model, inputs, attention.qkv)
    return [*seen.unflatten(-1, (-1, 3, attention.head_width)).unbind(3)]


@pytest.mark.parametrize("kind", ["images", "next token", "sentences", "translation"])
def test_relations_of_tokens_are_compared(kind: str, tmp_path: Path) -> None:
    """With a teacher of twice the width and heads."""
    model, task = KINDS[kind]
    wide: Any = _sized(model, width=32, depth=2)
    if not isinstance(model, Seq2SeqConfig):
        wide = replace(wide, heads=4)
    torch.manual_seed(3)
    recipe, built, teacher, batch, inputs = _student(
        kind, model, create(wide), tmp_path / "teacher", teacher_attention=3.0
    )
    parts = []
    for run in teacher.graph.runs:
        for own, other in zip(_relations(built.model, inputs, run), _relations(teacher, inputs, run)):
            total, rows, whole = torch.zeros(()), 0, own.shape[1]
            for sample, count in enumerate(_counts(kind, run, inputs, whole)):
                for row in range(count):
                    seen = slice(0, row + 1 if run.causal else count)
                    for head in range(2):
                        logs = []
                        for one in (own, other.detach()):
                            x = one[sample].reshape(whole, 2, -1)[:, head]
                            logs.append(torch.log_softmax(x[seen] @ x[row] / x.shape[1] ** 0.5, 0))
                        total = total + (logs[1].exp() * (logs[1] - logs[0])).sum()
                        rows += 1
            parts.append(total / rows)
    term = torch.stack(parts).mean()
    assert float(term.detach()) > 1e-4
    _require_loss(built, batch, task(built.model, batch) + 3.0 * term)
    with pytest.raises(ConfigError, match="compile=none"):
        build(model, Plan(compile="blocks"), recipe=recipe, loss=task)


def _require_loss(
    built: Any, batch: Any, expected: Tensor, *, rtol: float | None = 1e-4, atol: float | None = 1e-6
) -> None:
    """The loss of a batch and its gradients are those of `expected`, within the type's own tolerance for `None`."""
    weights = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(expected, weights, allow_unused=True)
    loss = built.loss(built.model, batch)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=rtol, atol=atol)


def _scores(model: Any, inputs: tuple[Any, ...], blocks: Any) -> list[Tensor]:
    """The scores (B, heads, N, N) of some blocks, of the queries and keys that they multiply."""
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for attention in (block.attention for block in blocks):

            def mix(q: Tensor, k: Tensor, v: Tensor, *rest: Any, mix: Any = attention.mix) -> Tensor:
                groups = q.shape[2] // k.shape[2]
                keys = torch.stack([k[:, :, head // groups] for head in range(q.shape[2])], 2)
                seen.append(torch.stack([a @ b.mT for a, b in zip(q.unbind(2), keys.unbind(2))], 1))
                return mix(q, k, v, *rest)  # type: ignore[no-any-return]

            patch.setattr(attention, "mix", mix)
        model(*inputs)
    return [one / attention.head_width**0.5 for one in seen]


ROTARY = replace(GPT, heads=4, kv_heads=2, positions="rotary", attention_dropout=None)


@pytest.mark.parametrize("kind", [*KINDS, "rotary"])
def test_scores_of_attention_are_compared_at_the_same_depth(kind: str, tmp_path: Path) -> None:
    model, task = (ROTARY, NextToken()) if kind == "rotary" else KINDS[kind]
    kind = "next token" if kind == "rotary" else kind
    torch.manual_seed(3)
    wide = create(_sized(model, width=32, depth=4))
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.mul_(5.0)  # so that scores are far from zero
    recipe, built, teacher, batch, inputs = _student(
        kind, _sized(model, depth=2), wide, tmp_path / "teacher", teacher_scores=3.0
    )
    parts = []
    for run in teacher.graph.runs:
        ours = _scores(built.model, inputs, _blocks(built.model, run))
        for own, other in zip(ours, _scores(teacher, inputs, _blocks(teacher, run)[1::2])):
            squares, counts = [], _counts(kind, run, inputs, own.shape[-1])
            for mine, theirs, count in zip(own, other.detach(), counts, strict=True):
                apart = (mine - theirs)[:, :count, :count].square()
                pairs = [(i, j) for i in range(count) for j in range(i + 1 if run.causal else count)]
                squares += [apart[:, i, j].mean() for i, j in pairs]
            parts.append(torch.stack(squares).mean())
    term = torch.stack(parts).mean()
    assert float(term.detach()) > 1e-2
    _require_loss(built, batch, task(built.model, batch) + 3.0 * term)
    with pytest.raises(ConfigError, match="compile=none"):
        build(model, Plan(compile="blocks"), recipe=recipe, loss=task)
    with pytest.raises(ConfigError, match=r"teacher_scores .* use a shallower student"):
        build(_sized(model, depth=5), Plan(), recipe=recipe, loss=task)
    if not isinstance(model, Seq2SeqConfig):
        with pytest.raises(
            ConfigError, match=r"head by head, but the heads of \w+\.blocks\.0 are 1.*teacher_attention"
        ):
            build(replace(model, heads=1, kv_heads=None), Plan(), recipe=recipe, loss=task)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_computed_by_hand(kind: str, tmp_path: Path) -> None:
    model, task = KINDS[kind]
    recipe = _teacher(model, tmp_path / "teacher")
    built, batch = build(model, Plan(), recipe=recipe, loss=task), _batch(kind)
    expected = _by_hand(kind, built, from_pretrained(tmp_path / "teacher").eval(), batch)
    plain = float(task(built.model, batch).detach())
    assert abs(float(expected.detach()) - plain) > 0.05  # the teacher says something
    _require_loss(built, batch, expected)
    # An evaluation is of the task alone, and nothing of the teacher is in the student.
    assert float(task(built.model, batch).detach()) == pytest.approx(plain)
    assert built.model.state_dict().keys() == create(model).state_dict().keys()
    assert isinstance(built.loss, Task)
    used: Any = built.loss.teacher
    assert not any(module.training for module in used.model.modules())
    assert task.teacher is None


def test_embeddings_are_taught_by_their_cosine(tmp_path: Path) -> None:
    student = replace(BERT, head="none")
    torch.manual_seed(7)
    save_pretrained(create(replace(student, depth=2)), tmp_path / "teacher")
    recipe = Recipe(teacher=str(tmp_path / "teacher"), teacher_weight=SHARE, clip_norm=None)
    built = build(student, Plan(), recipe=recipe, loss=Embedding())
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 8, 5, 1, 4, 8])
    words, ids = torch.randint(0, 40, (6, 8), generator=g), torch.arange(3).numpy()
    batch = TextBatch(inputs=(words, lengths), ids=ids, tokens=0)
    teacher = from_pretrained(tmp_path / "teacher").eval()
    means = [
        torch.stack([row[: int(n)].mean(0) for row, n in zip(model(*batch.inputs), lengths)])
        for model in (built.model, teacher)
    ]
    apart = 1 - F.cosine_similarity(means[0], means[1].detach()).mean()
    assert float(apart.detach()) > 0.1
    expected = (1 - SHARE) * Embedding()(built.model, batch) + SHARE * apart
    _require_loss(built, batch, expected)
    assert all(weight.grad is not None for weight in built.model.parameters())
    save_pretrained(create(replace(student, width=32)), tmp_path / "teacher")
    with pytest.raises(ConfigError, match="embeddings have 32 features, the student's 16"):
        build(student, Plan(), recipe=recipe, loss=Embedding())


def test_a_teacher_may_be_in_any_format(tmp_path: Path) -> None:
    """Of a quantised one the values of its weights teach."""
    model = replace(VIT, classifier="token")
    recipe, batch = _teacher(model, tmp_path / "own"), _batch("images")
    quantise_folder(tmp_path / "own", tmp_path / "int8", QuantiseOptions(format="int8"))
    save_pretrained(from_pretrained(tmp_path / "int8"), tmp_path / "values")
    write_transformers(tmp_path / "own", tmp_path / "transformers")
    export(tmp_path / "int8", tmp_path / "compressed", "compressed-tensors")

    def loss(name: str) -> Tensor:
        built = build(model, Plan(), recipe=replace(recipe, teacher=str(tmp_path / name)))
        found = built.loss(built.model, batch)
        assert isinstance(found, Tensor)
        return found.detach()

    torch.testing.assert_close(loss("transformers"), loss("own"))
    assert torch.equal(loss("int8"), loss("values"))
    torch.testing.assert_close(loss("compressed"), loss("values"))
    assert abs(float(loss("int8") - loss("own"))) > 1e-5
    (tmp_path / "transformers" / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    with pytest.raises(ConfigError, match=r"timm's vit_tiny_patch16_224.*call load_weights"):
        loss("transformers")


def test_shares_of_classes_are_taught_too(tmp_path: Path) -> None:
    """Targets of mixup count all samples."""
    built = build(VIT, Plan(), recipe=_teacher(VIT, tmp_path / "teacher"))
    images, _ = _batch("images")
    shares = torch.rand(4, 5).softmax(1)
    teacher = from_pretrained(tmp_path / "teacher").eval()
    z, u = built.model(images), teacher(images)
    p, q = (z / WARMTH).log_softmax(1), (u / WARMTH).log_softmax(1)
    apart = F.kl_div(p, q, log_target=True, reduction="batchmean")
    expected = (1 - SHARE) * F.cross_entropy(z, shares) + SHARE * WARMTH**2 * apart
    torch.testing.assert_close(built.loss(built.model, (images, shares)), expected)


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("targets", ["soft", "hard"])
def test_a_second_head_learns_from_the_teacher(targets: Any, distilled: bool, tmp_path: Path) -> None:
    """With a second token its head alone does; the other learns from the labels. Outputs are the mean of both."""
    model = replace(VIT, distilled=distilled)
    recipe = _teacher(VIT, tmp_path / "teacher")
    if targets == "hard":
        recipe = replace(recipe, temperature=Recipe().temperature, teacher_targets=targets)
    built, batch = build(model, Plan(), recipe=recipe), _batch("images", samples=6)
    images, labels = batch
    counted = labels != -100
    student: Any = built.model
    mean, student.both_logits = student(images), True
    outputs = student(images)
    student.both_logits = False
    z, taught = outputs.unbind(1) if distilled else (outputs, outputs)
    torch.testing.assert_close(mean, (z + taught) / 2)
    u = from_pretrained(tmp_path / "teacher").eval()(images).detach()
    if targets == "hard":
        apart = F.cross_entropy(taught[counted], u[counted].argmax(1))
    else:
        p, q = (taught[counted] / WARMTH).log_softmax(1), (u[counted] / WARMTH).softmax(1)
        apart = WARMTH**2 * (q * (q.log() - p)).sum(1).mean()
    expected = (1 - SHARE) * F.cross_entropy(z[counted], labels[counted]) + SHARE * apart
    _require_loss(built, batch, expected)
    weights = built.model.parameters()
    assert all(weight.grad is not None and weight.grad.any() for weight in weights)
    assert student(images).shape == (6, 5)
    with pytest.raises(ConfigError, match="uses the teacher's likeliest class"):
        build(GPT, Plan(), recipe=replace(_teacher(GPT, tmp_path / "words"), **_HARD))
    with pytest.raises(ConfigError, match="the same at any"):
        build(model, Plan(), recipe=replace(recipe, teacher_targets="hard", temperature=3.0))
    with pytest.raises(ConfigError, match=r"targets is hard, but there is no recipe\.teacher"):
        build(model, Plan(), recipe=Recipe(**_HARD))
    if distilled:
        with pytest.raises(ConfigError, match="and 6 for the student"):
            build(model, Plan(), recipe=replace(recipe, teacher_attention=1.0))


_HARD: dict[str, Any] = {"teacher_targets": "hard", "temperature": Recipe().temperature}


def _steps(kind: str, folder: str, line: str) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of two steps, the weights after them, and the share of the teacher's that this rank holds; of this rank's
    batches among four a step. Each gradient is taken off its weight as it is."""
    plan, (model, task) = Plan.parse(line), KINDS[kind]
    if isinstance(model, ViTConfig):
        model = replace(model, distilled=True)
    dims = dims_of(plan, "cpu") if plan.gpus > 1 else ALONE
    recipe = Recipe(
        teacher=folder, teacher_weight=SHARE, temperature=WARMTH, clip_norm=None, lr=1.0, beta1=0.0,
        weight_decay=0.0,
    )  # fmt: skip
    built = build(model, plan, recipe=recipe, loss=task, dims=dims)
    losses = []
    for step in range(2):
        batches = [_batch(kind, samples=2 + number, seed=4 * step + number) for number in range(4)]
        loss = built.step(batches[dims.data_rank :: plan.dp]).loss.clone()
        if plan.dp > 1:
            torch.distributed.all_reduce(loss)
        losses.append(float(loss) / plan.dp)
    state = {name: whole_of(value).clone() for name, value in built.model.state_dict().items()}
    assert isinstance(built.loss, Task)
    teacher: Any = built.loss.teacher
    parameters = list(teacher.model.parameters())
    held = sum(local(parameter).numel() for parameter in parameters)
    return losses, state, held / sum(parameter.numel() for parameter in parameters)


LAYOUTS = (
    "dp=2 accumulate=2", "dp=2 accumulate=2 sharding=fsdp", "tp=2 accumulate=4", "tp=2 sp=true accumulate=4",
)  # fmt: skip
TAUGHT = ("images", "next token", "translation")


def _every_layout(folder: str) -> dict[tuple[str, str], Any]:
    plans = [f"{line} algorithm=sgd" for line in LAYOUTS]
    return {(line, kind): _steps(kind, f"{folder}/{kind}", line) for line in plans for kind in TAUGHT}


@pytest.mark.slow
def test_steps_are_the_same_over_ranks(tmp_path: Path) -> None:
    """Ranks that shard the student's weights shard the teacher's too."""
    for kind in TAUGHT:
        _teacher(KINDS[kind][0], tmp_path / kind)
    alone = {kind: _steps(kind, str(tmp_path / kind), "accumulate=4 algorithm=sgd") for kind in TAUGHT}
    for rank in spawn(_every_layout, 2, str(tmp_path)):
        for (line, kind), (losses, weights, held) in rank.items():
            assert losses == pytest.approx(alone[kind][0], rel=1e-6), (line, kind)
            for name, expected in alone[kind][1].items():
                torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)
            assert held == pytest.approx(0.5 if "fsdp" in line else 1.0, abs=0.01), (line, kind)


@pytest.mark.parametrize(
    "line", ["precision=O1", "precision=O2", "precision=O3 loss=chunked", "attention=math"]
)
def test_the_teacher_computes_as_the_plan_does(line: str, tmp_path: Path) -> None:
    recipe = replace(_teacher(GPT, tmp_path / "teacher"), eps=1e-4)
    built, exact = (build(GPT, Plan.parse(each), recipe=recipe) for each in (line, "baseline"))
    assert isinstance(built.loss, Task)
    teacher: Any = built.loss.teacher
    half = torch.float32 if "attention" in line else torch.bfloat16
    assert {parameter.dtype for parameter in teacher.model.parameters()} == {half}
    batch = _batch("next token")
    for _ in range(2):
        found, expected = (float(each.step([batch]).loss) for each in (built, exact))
        assert found == pytest.approx(expected, rel=0.02)  # of 8 bits; measured 0.004


@cache
def _others() -> dict[str, tuple[ModelConfig, ModelConfig, str]]:
    """Students, teachers that cannot teach them, and words of the refusal."""
    return {
        "vocabulary": (GPT, replace(GPT, vocabulary=48), "vocabulary of 48 tokens, the student one of 40"),
        "classes": (VIT, replace(VIT, classes=6), "logits of 6 classes, the student of 5 classes"),
        "size": (VIT, replace(VIT, image_size=16), "image_size is 16, the student's 8"),
        "channels": (VIT, replace(VIT, channels=3), "channels is 3, the student's 1"),
        "kind": (GPT, VIT, "takes images, the student tokens"),
        "direction": (GPT, BERT, "logits of 40 words, the student of 40 words by a causal model"),
        "positions": (GPT, replace(GPT, sequence=4), "has 4 positions, but samples have 8 tokens"),
        "head": (replace(BERT, head="none"), BERT, "student returns features"),
    }


@pytest.mark.parametrize("what", _others())
def test_a_teacher_of_something_else_is_refused(what: str, tmp_path: Path) -> None:
    student, teacher, words = _others()[what]
    save_pretrained(create(teacher), tmp_path / "teacher")
    with pytest.raises(ConfigError, match=words):
        build(student, Plan(), recipe=Recipe(teacher=str(tmp_path / "teacher")), loss=NextToken())


@pytest.mark.parametrize("line", ["pp=2", "cp=2", "compile=whole", "tp=2"])
def test_plans_that_split_outputs_are_refused(line: str) -> None:
    inside = 1.0 if "tp" in line else 0.0
    with pytest.raises(ConfigError, match=r"recipe\.teacher"):
        build(GPT, Plan.parse(line), recipe=Recipe(teacher="anywhere", teacher_hidden=inside))


def test_other_losses_and_models_are_refused(tmp_path: Path) -> None:
    recipe = _teacher(GPT, tmp_path / "teacher")
    with pytest.raises(ConfigError, match="your own function"):
        build(GPT, Plan(), recipe=recipe, loss=lambda model, batch: model(*batch))
    with pytest.raises(ConfigError, match="student built from a configuration"):
        build(nn.Linear(2, 2), Plan(), recipe=recipe)
    with pytest.raises(ConfigError, match="trained by Embedding"):
        build(GPT, Plan(), recipe=recipe, loss=Embedding())
    one = replace(LABELS, classes=1)
    save_pretrained(create(one), tmp_path / "numbers")
    with pytest.raises(ConfigError, match="numbers or features"):
        build(one, Plan(), recipe=Recipe(teacher=str(tmp_path / "numbers")), loss=Sentences())
    with pytest.raises(ConfigError, match="no folder"):
        build(GPT, Plan(), recipe=Recipe(teacher=str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r"recipe.temperature is 3, but there is no recipe\.teacher"):
        build(GPT, Plan(), recipe=Recipe(temperature=3.0))
