"""What every family of models must hold under every Plan. A new one is enrolled in `helpers.families`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cpus import ProductsOfBf16
from helpers.equality import Trained, beside_one, hold
from helpers.families import ENROLLED, Enrolled, batches, loss, small
from helpers.spawn import pool
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.apply import compile_model
from penstock.build import Built, build
from penstock.checkpoint import rewrite
from penstock.config.load import to_dict
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.run import Lora, Recipe, RunConfig
from penstock.cpu import this_cpu
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.anatomy import anatomy_of
from penstock.models.convert import from_pretrained, load_weights, model_in, save_pretrained
from penstock.models.lora import add_adapters, gives_classes

# Keys' biases have no gradient but rounding, which Adam would divide by its own size: one step is then anybody's.
RECIPE = Recipe(lr=3e-3, eps=1e-4, ema_decay=0.5)
LEVELS = ["precision=O0", "precision=O1", "precision=O2 optimizer=fused", "precision=O3 optimizer=contiguous",
          "precision=O1 dtype=fp16 optimizer=fused", "precision=O2 dtype=fp16 optimizer=contiguous"]  # fmt: skip
SAME = ["recompute=selective attention=plain", "recompute=budget", "recompute=full",
        "recompute=operators", "recompute=early recompute_every=2", "optimizer=contiguous",
        "attention=plain", "attention=auto", "token_order=batch_second"]  # fmt: skip


def _by_turns(lines: list[str], share: int) -> list[Any]:
    """Each family with each line: each family with every `share`-th, and each line with as many; in `make test-sweeps`
    with all others."""
    marks = ((), *(pytest.mark.sweep,) * (share - 1))
    return [
        pytest.param(name, line, marks=marks[(number + place) % share])
        for number, name in enumerate(ENROLLED)
        for place, line in enumerate(lines)
    ]


@pytest.fixture(params=ENROLLED)
def enrolled(request: pytest.FixtureRequest) -> Enrolled:
    return ENROLLED[request.param]


def _stepped(
    enrolled: Enrolled, line: str, steps: int, *, fixed: bool = False, **options: Any
) -> tuple[Built, list[float]]:
    built = build(enrolled.config, Plan.parse(f"micro_batch=4 {line}"), recipe=RECIPE, loss=loss, **options)
    return built, [
        float(built.step([batches(enrolled.config, 0 if fixed else i, 4)]).loss) for i in range(steps)
    ]


@cache
def _baseline(enrolled: Enrolled) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after three steps of the baseline, and their losses."""
    built, losses = _stepped(enrolled, "baseline", 3)
    return built.model.state_dict(), losses


@pytest.mark.parametrize(("enrolled", "line"), _by_turns(LEVELS, 6), indirect=["enrolled"])
def test_every_level_learns(enrolled: Enrolled, line: str) -> None:
    built, losses = _stepped(enrolled, line, 12, fixed=True)
    assert losses[-1] < losses[0] - 0.05, losses
    if built.scaler is not None:
        assert built.scaler.overflows < 6
    assert losses[0] == pytest.approx(_baseline(enrolled)[1][0], rel=3e-2)


@pytest.mark.parametrize(("enrolled", "line"), _by_turns(SAME, 6), indirect=["enrolled"])
def test_what_changes_no_result_changes_none(enrolled: Enrolled, line: str) -> None:
    _same_as_the_baseline(enrolled, *_stepped(enrolled, line, 3))


def _same_as_the_baseline(
    enrolled: Enrolled, built: Built, losses: list[float], *, rel: float = 1e-5, rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:  # fmt: skip
    """Compare losses to `rel`, weights to `rtol` and `atol`."""
    wanted, expected = _baseline(enrolled)
    assert losses == pytest.approx(expected, rel=rel)
    for name, tensor in built.model.state_dict().items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=rtol, atol=atol, msg=lambda t, n=name: f"{n}: {t}"
        )


# Rounding to bf16 changes inputs of products by up to 2**-9 of their size, and losses by no more (measured: 1.2e-3 for
# Marian). Adam makes a step of up to `lr` even of a gradient that is mostly rounding (weights of T5: 2.8 steps apart).
IN_BF16 = {"rel": 2**-9, "rtol": 1e-4, "atol": 4 * RECIPE.lr}


@pytest.mark.parametrize(("enrolled", "line"), _by_turns(["matmul=medium"], 6), indirect=["enrolled"])
def test_medium_products_round_inputs_on_amx_alone(enrolled: Enrolled, line: str) -> None:
    _same_as_the_baseline(enrolled, *_stepped(enrolled, line, 3), **IN_BF16 if this_cpu().amx else {})


@pytest.mark.parametrize(("enrolled", "line"), _by_turns(["baseline"], 6), indirect=["enrolled"])
def test_what_amx_rounds_is_within_its_tolerance(enrolled: Enrolled, line: str) -> None:
    """The arithmetic of AMX under `matmul=medium`, on any CPU: fp32 sums of products of bf16 numbers."""
    with ProductsOfBf16():
        built, losses = _stepped(enrolled, line, 3)
    _same_as_the_baseline(enrolled, built, losses, **IN_BF16)
    assert losses != _baseline(enrolled)[1]


COMPILED = [
    ("qwen", "baseline", 1e-4),
    ("pruned", "precision=O1 attention=auto", 1e-2),
    ("modernbert", "baseline", 1e-4),
    ("t5", "precision=O1 attention=auto", 1e-2),
    ("marian", "baseline", 1e-4),
    ("mixtral", "precision=O1 attention=auto", 1e-2),
]
"""A family of each form of block, a Plan, and how far losses may be from those of uncompiled blocks."""
TRIED = ("qwen", "aot_eager"), ("mixtral", "inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
@pytest.mark.parametrize(
    ("name", "line", "tolerance", "backend"),
    [
        pytest.param(*case, how, marks=() if (case[0], how) in TRIED else pytest.mark.sweep)
        for how in ("aot_eager", "inductor")
        for case in COMPILED
    ],
)
def test_compiled_models_learn_the_same(
    name: str, line: str, tolerance: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor takes up to half a minute of a processor for a family, tracing two seconds.
    `test_build.test_inductor_agrees` lets it compile the family of images too, and whole.
    """
    monkeypatch.setattr("penstock.apply.compile_model", partial(compile_model, backend=backend))
    enrolled = ENROLLED[name]
    config: Any = enrolled.config
    if name == "pruned":  # two layers are as unequal as four
        enrolled = enrolled._replace(config=replace(config, depth=2, unequal=config.unequal[:2]))
    elif backend == "inductor" and name == "mixtral":  # each block is compiled by itself
        enrolled = enrolled._replace(config=replace(config, depth=1))
    _, losses = _stepped(enrolled, line, 3)
    _, got = _stepped(enrolled, f"{line} compile=blocks", 3)
    assert got == pytest.approx(losses, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(["gpt", "pruned", "modernbert", "t5", "bart"], ["gpt"]))
def test_whole_models_are_traced_and_learn_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "precision=O1 attention=auto"
    _, losses = _stepped(ENROLLED[name], line, 3)
    monkeypatch.setattr("penstock.apply.compile_model", partial(compile_model, backend="aot_eager"))
    _, got = _stepped(ENROLLED[name], f"{line} compile=whole", 3)
    assert got == pytest.approx(losses, rel=1e-2)


def _learned(
    cases: list[tuple[str, ModelConfig, str]], recipe: Recipe = RECIPE
) -> list[tuple[str, Trained, Trained]]:
    known = dict[tuple[str, Plan], Trained]()
    return [
        beside_one(
            f"{name}: {line}", lambda made=config: made, Plan.parse(line), known, steps=3, recipe=recipe,
            batches=partial(batches, config), loss=loss,
        )
        for name, config, line in cases
    ]  # fmt: skip


def _hold(world: int, cases: list[tuple[str, str]]) -> None:
    given = [(name, ENROLLED[name].config, line) for name, line in cases]
    for learned in pool(world).run(_learned, given, timeout=280)[0]:
        hold(*learned)


@pytest.mark.parametrize("turn", sweep(range(8), [0]))
def test_two_ranks_learn_what_one_process_does(turn: int) -> None:
    """A quarter of the families at a time, alternating between two layouts."""
    lines = ["dp=2 micro_batch=2 sharding=fsdp recompute=full", "dp=2 micro_batch=2 accumulate=2"]
    some = list(ENROLLED)[turn % 4 :: 4]
    _hold(2, [(name, lines[(number + turn // 4) % 2]) for number, name in enumerate(some)])


@pytest.mark.parametrize("name", sweep(ENROLLED, (), slow=["t5"]))
def test_every_way_to_share_out_learns_the_same(name: str) -> None:
    shardings = ["zero1 optimizer=contiguous", "zero2 accumulate=2", "hsdp shard=1", "fsdp offload=optimizer"]
    lines = [f"dp=2 micro_batch=2 sharding={sharding}" for sharding in shardings]
    _hold(2, [(name, line) for line in lines])
    _hold(4, [(name, "dp=4 micro_batch=1 sharding=hsdp shard=2")])


def _saved(enrolled: Enrolled, folder: Path, *, steps: int = 2) -> Built:
    """A checkpoint after a few steps, as a run saves it."""
    built, _ = _stepped(enrolled, "baseline", steps)
    assert built.ema is not None
    weights = {"weights": built.model.state_dict(), "ema": built.ema.state_dict()}
    state = {"optimizer": checkpoint.by_name(built.optimizer.state_dict())}
    settings = to_dict(RunConfig(model=enrolled.config))
    checkpoint.save(folder / "checkpoints", checkpoint.Snapshot(steps, weights, state, settings))
    return built


def test_a_model_goes_on_from_its_checkpoint_bit_for_bit(enrolled: Enrolled, tmp_path: Path) -> None:
    built = _saved(enrolled, tmp_path)
    stored = checkpoint.find(tmp_path / "checkpoints")
    assert stored is not None
    again, _ = _stepped(enrolled, "baseline", 0, seed=7)
    found = stored.load(dict(again.model.named_parameters(remove_duplicate=False)))
    again.model.load_state_dict(found.weights["weights"])
    state = checkpoint.by_index(found.state["optimizer"], again.optimizer.state_dict())
    again.optimizer.load_state_dict(state)
    for step in (2, 3):
        batch = batches(enrolled.config, step, 4)
        assert torch.equal(built.step([batch]).loss, again.step([batch]).loss)
    for one, other in zip(built.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


def test_exports_are_the_model_and_its_average_and_transformers_reads_them(
    enrolled: Enrolled, tmp_path: Path
) -> None:
    built = _saved(enrolled, tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "words.txt").write_text("a tokenizer's file")
    (tmp_path / "tokenizer" / "config.json").write_text('{"pad_token_id": 3}')
    *arguments, _ = batches(enrolled.config, 9, 2)
    assert built.ema is not None
    model = built.model.eval()
    for which in ("weights", "ema"):
        folder = tmp_path / which
        rewrite.export_model(rewrite.open_newest(tmp_path), folder, which)
        assert (folder / "words.txt").read_text() == "a tokenizer's file"
        assert '"pad_token_id": 3' in (folder / "config.json").read_text()
        with torch.no_grad(), built.ema.swapped() if which == "ema" else nullcontext():
            expected = model(*arguments)
            again = from_pretrained(folder).eval()(*arguments)
            torch.testing.assert_close(again, expected, rtol=0.0, atol=0.0)
    if enrolled.reader is None:
        return
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, enrolled.reader).from_pretrained(folder).eval()
    given: dict[str, Any] = dict(zip(_names(enrolled), arguments))
    lengths = given.pop("lengths", None)
    if lengths is not None:
        given["attention_mask"] = (torch.arange(arguments[0].shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        torch.testing.assert_close(theirs(**given).logits, expected, rtol=1e-4, atol=1e-5)


HEADS = [
    ("words", "classes"),
    ("classes", "words"),
    ("words", "none"),
    ("none", "words"),
    ("none", "classes"),
]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize(("before", "after"), HEADS)
def test_an_encoder_of_another_head_starts_a_run(name: str, before: str, after: str, tmp_path: Path) -> None:
    """What was learned on masked words is fine-tuned on classes, and so on: all but the head is taken."""
    config: Any = ENROLLED[name].config
    torch.manual_seed(3)
    start, model = create(replace(config, head=before)), create(replace(config, head=after))
    save_pretrained(start, tmp_path)
    loaded = load_weights(model, tmp_path, new_head=True)
    taken = model.state_dict()
    for key, tensor in start.state_dict().items():
        if key.startswith(("tokens.", "types.", "encoder.")):
            torch.testing.assert_close(taken[key], tensor)
    assert set(loaded.drawn) <= {key for key in taken if key.startswith(("head.", "pooler.", "transform."))}
    assert bool(loaded.drawn) == (after != "none")
    if after == "words":
        assert torch.equal(taken["head.weight"], taken["tokens.weight"])
    with pytest.raises(ConfigError):
        load_weights(model, tmp_path) if after != "none" else load_weights(
            create(replace(config, width=8)), tmp_path
        )


def _blocks(enrolled: Enrolled) -> tuple[str, str]:
    """Names of the first and the last block."""
    blocks = anatomy_of(create(enrolled.config)).blocks
    return blocks[0], blocks[-1]


def test_frozen_parts_stay_and_layers_learn_at_their_own_rate(enrolled: Enrolled) -> None:
    first, last = _blocks(enrolled)
    built = build(
        enrolled.config,
        Plan(micro_batch=4),
        recipe=replace(RECIPE, freeze=(first,), layer_decay=0.5, lr_width=8),
        loss=loss,
    )
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    built.step([batches(enrolled.config, 0, 4)])
    moved = {name for name, tensor in built.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert not any(name.startswith(f"{first}.") for name in moved)
    assert f"{last}.mlp.up.weight" in moved
    scales = {
        name: group["lr_scale"] for group in built.optimizer.param_groups for name in group["param_names"]
    }
    assert scales[f"{last}.mlp.up.weight"] == 0.5 * 8 / enrolled.config.graph.runs[-1].stack.width
    assert min(scales.values()) < 0.25


@pytest.mark.parametrize("enrolled", sweep(ENROLLED, list(ENROLLED)[::3]), indirect=True)
def test_adapters_learn_alone_and_are_merged_where_the_model_is_exported(
    enrolled: Enrolled, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    if enrolled.config.graph.pixels is not None:
        pytest.skip("a fresh head that is 0 sends no gradient to what comes before it")
    recipe = replace(RECIPE, lr=3e-2, lora=Lora(rank=2))
    settings = RunConfig(model=enrolled.config, recipe=recipe)
    start = build(enrolled.config, Plan(), loss=loss).model.state_dict()
    built = build(enrolled.config, Plan(micro_batch=4), recipe=recipe, loss=loss)
    losses = [float(built.step([batches(enrolled.config, 0, 4)]).loss) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.02
    head = gives_classes(built.model)
    for name, tensor in built.model.state_dict().items():
        counted = not tensor.is_floating_point()  # visits of experts
        if (
            ".lora_" not in name
            and not counted
            and not (head and name.startswith(("head.", "distil_head.", "pooler.", "attention_pool.")))
        ):
            assert torch.equal(tensor, start[name.replace(".base_layer.", ".")]), name
    weights = {"weights": built.model.state_dict()}
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(12, weights, {}, to_dict(settings)))
    rewrite.export_model(rewrite.open_newest(tmp_path), tmp_path / "export", "weights")
    exported = from_pretrained(tmp_path / "export").eval()
    *arguments, _ = batches(enrolled.config, 9, 2)
    with torch.no_grad():
        torch.testing.assert_close(exported(*arguments), built.model.eval()(*arguments), rtol=1e-4, atol=1e-5)
    for module in built.model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    whole = exported.state_dict()
    for name, tensor in built.model.state_dict().items():
        if ".lora_" not in name and tensor.is_floating_point():
            torch.testing.assert_close(whole[name.replace(".base_layer.", ".")], tensor, msg=name)


@pytest.mark.parametrize("enrolled", sweep(ENROLLED, [*ENROLLED][::3]), indirect=True)
def test_adapters_start_from_weights_and_go_on_from_a_checkpoint(enrolled: Enrolled, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(3)
    start = create(enrolled.config)
    save_pretrained(start, tmp_path)
    recipe = replace(RECIPE, lora=Lora(rank=2, parts="attention", alpha=1.0))
    one, other = (
        build(enrolled.config, Plan(micro_batch=4), recipe=recipe, loss=loss, seed=s) for s in (0, 1)
    )
    load_weights(one.model, tmp_path)
    *arguments, _ = batch = batches(enrolled.config, 9, 4)
    with one.inference():
        torch.testing.assert_close(one.model(*arguments), start.eval()(*arguments))
    one.step([batch])
    other.model.load_state_dict(one.model.state_dict())
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    assert torch.equal(one.step([batch]).loss, other.step([batch]).loss)


def test_adapters_that_cannot_be_are_refused() -> None:
    pytest.importorskip("peft")
    model = create(ENROLLED["gpt"].config)
    with pytest.raises(ConfigError, match=r"recipe\.lora\.trained_parts names 'nothing'"):
        add_adapters(model, Lora(rank=2, trained_parts=("nothing",)))
    with pytest.raises(ConfigError, match=r"does not know which parts|no such parts|No repeated blocks"):
        add_adapters(torch.nn.Linear(2, 2), Lora(rank=2))


def test_adapters_learn_over_ranks_what_they_learn_in_one_process() -> None:
    pytest.importorskip("peft")
    lines = ["dp=2 micro_batch=2 sharding=fsdp", "dp=2 micro_batch=2 accumulate=2"]
    cases = [("adapters", small("gpt-tiny", vocabulary=700), line) for line in lines]
    for learned in pool(2).run(_learned, cases, replace(RECIPE, lora=Lora(rank=8)), timeout=120)[0]:
        hold(*learned)


def _names(enrolled: Enrolled) -> tuple[str, ...]:
    """What transformers calls the model's arguments."""
    return {
        "vit": ("pixel_values",),
        "decoder": ("input_ids",),
        "encoder": ("input_ids", "lengths"),
        "seq2seq": ("input_ids", "decoder_input_ids", "lengths"),
    }[enrolled.config.family]


def test_weights_start_a_run_of_the_same_family(enrolled: Enrolled, tmp_path: Path) -> None:
    """As `--from` does: all weights are taken, and what learns anew is said."""
    torch.manual_seed(3)
    model = create(enrolled.config)
    save_pretrained(model, tmp_path)
    if enrolled.config.family != "vit":
        assert create(model_in(tmp_path)).state_dict().keys() == model.state_dict().keys()  # type: ignore[arg-type]
    other = create(enrolled.config)
    loaded = load_weights(other, tmp_path, new_head=True)
    assert loaded.drawn == ()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
