"""The forward and backward passes of a training step through the stages of a pipeline.

Each rank runs its list of a schedule's actions, one by one; `penstock.schedules` generates, simulates and draws these
lists. torch's own runtime for such lists (`torch.distributed.pipelining`) fixes the shapes of messages at the first
step, but the shapes of text batches change. So actions are executed here; tests of schedules check that the lists equal
torch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from penstock.config.plan import Plan
from penstock.dtypes import sums_type
from penstock.errors import ConfigError, PenstockError
from penstock.kernels.split_linear import Later, put_off
from penstock.models.balance_loss import balancing
from penstock.parallel import DataParallel
from penstock.parallel.links import Links
from penstock.parallel.pipeline import Stages, Values
from penstock.precision import LossScaler, MasterWeights
from penstock.schedules import Action, Schedule, schedule_of, with_communication
from penstock.step.train_step import StepLoss
from penstock.tasks import Loss, Task

_WORDS = {
    "F": "the forward pass", "B": "the backward pass", "I": "the gradient of its input",
    "W": "the gradients of its weights", "SEND_F": "sending its activations", "RECV_F": "receiving activations",
    "SEND_B": "sending gradients", "RECV_B": "receiving gradients",
}  # fmt: skip


@lru_cache(maxsize=64)
def table(plan: Plan, micro_batches: int) -> Schedule:
    """The actions of each rank of a pipeline, transfers included."""
    return with_communication(schedule_of(plan, micro_batches))


class Pipeline:
    """Runs micro-batches through a model's stages as a Plan's schedule says. The last stage computes the task's loss.
    Raises ConfigError for a loss that is a plain function, which does not separate the model's inputs from it."""

    def __init__(
        self, stages: Stages, loss: Loss, plan: Plan, *, scaler: LossScaler | None = None,
        masters: MasterWeights | None = None, replicas: DataParallel | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(loss, Task):
            raise ConfigError(
                f"plan.pp={plan.pp} runs the model and its loss on different ranks, so the loss must be a "
                "penstock.tasks.Task, with `inputs` of a batch and the `loss` of outputs; give build(…, loss=…) one, "
                "or use plan.pp=1."
            )
        self.loss: Loss = loss
        self.task, self.stages, self.plan = loss, stages, plan
        self.scaler, self.masters, self.replicas = scaler, masters, replicas
        self.divisor: Tensor | None = None
        self.parts: Tensor | None = None
        self.trace: list[tuple[Action, float, float]] | None = None
        """If a list, each computation is appended with its start and end by `time.perf_counter`; the host then waits
        for each."""
        self._types: dict[tuple[int, bool], torch.dtype] = {}
        self._place = stages.dims.place()["pp"]

    def __call__(self, micro_batches: Sequence[Any]) -> Tensor:
        actions = table(self.plan, len(micro_batches)).ranks[self._place]
        if self.replicas is not None:
            self.replicas.begin(0, len(micro_batches))
        step = _Step(self, micro_batches, Links(self.stages.dims, self.stages.device, self._types))
        for action in actions:
            step.perform(action)
        step.links.finish()
        self.stages.add_shared(self._holder)
        if self.replicas is not None:
            self.replicas.end()
        return self._shared_loss(step.loss)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the gradients of all stages, from the norm of this rank's gradients."""
        return self.stages.whole_norm(norm, self._holder)

    def _holder(self, parameter: Tensor) -> Tensor:
        """The tensor that holds the gradient of a parameter."""
        return parameter if self.masters is None else self.masters.master_of(parameter)

    def _shared_loss(self, loss: StepLoss | None) -> Tensor:
        """The loss of the micro-batches and its parts, sent by the last stage to all others."""
        stages = self.stages
        dtype = sums_type(stages.like())
        values = torch.zeros(1 + len(self.task.losses), dtype=dtype, device=stages.device)
        if loss is not None:
            values[0] = loss.result()[0]
            if loss.parts is not None:
                values[1:] = loss.parts
        source = stages.rank_of(stages.last)
        distributed.broadcast(values, group=stages.dims.group("pp"), group_src=source)
        self.parts = values[1:] if self.task.losses else None
        return values[0]


class _Step:
    """A step on one rank, with the tensors that its stages hold for each micro-batch."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[Any], links: Links) -> None:
        self.pipeline, self.stages, self.links = pipeline, pipeline.stages, links
        self.batches = micro_batches
        # Ranks with different samples run the same stage at the same time, so they can add up their counts.
        last = self.stages.last in self.stages.local_stages
        self.loss = StepLoss(pipeline.loss, micro_batches, self.stages.dims) if last else None
        self._inputs: dict[tuple[int, int], Values] = {}
        """Inputs from the previous stage, by stage and micro-batch; their gradients are sent back to it."""
        self._outputs: dict[tuple[int, int], Values] = {}
        self._gradients: dict[tuple[int, int], Values] = {}
        """Gradients of the outputs, by stage and micro-batch."""
        self._performers: dict[str, Callable[[int, int], None]] = {
            "F": self._forward, "B": self._backward, "SEND_F": self._send, "RECV_F": self._receive,
            "SEND_B": self._send_back, "RECV_B": self._receive_back, "I": self._of_input, "W": self._of_weights,
        }  # fmt: skip
        self._lengths: dict[tuple[int, int], list[int]] = {}
        """Number of tokens of each stack, which recomputation needs again if ranks split tokens."""
        self._later: dict[tuple[int, int], Later] = {}
        """Deferred computations of weight gradients, by stage and micro-batch."""
        scaler = pipeline.scaler
        self._balance = (1.0 if scaler is None else scaler.scale) / len(micro_batches)
        """The weight of each micro-batch's balance losses, which are on all stages, while the loss is on the last."""
        self._began = 0.0

    def perform(self, action: Action) -> None:
        """Perform an action of the schedule. Errors are raised with stage and micro-batch."""
        try:
            self._began = self._now()
            self._performers[action.kind](action.stage, action.micro_batch)
            if self.pipeline.trace is not None and not action.communicates:
                self.pipeline.trace.append((action, self._began, self._now()))
        except (RuntimeError, MemoryError, PenstockError) as error:
            _raise_named(error, action, len(self.batches), self.stages.last)

    def _now(self) -> float:
        if self.pipeline.trace is None:
            return 0.0
        if self.stages.device.type == "cuda":
            torch.cuda.synchronize(self.stages.device)
        return time.perf_counter()

    def _await(self, values: Values) -> None:
        """Wait until the received tensors have arrived; the action's time starts then."""
        self.links.wait(values)
        self._began = self._now()

    def _forward(self, stage: int, i: int) -> None:
        stages, task, batch = self.stages, self.pipeline.task, self.batches[i]
        received = self._inputs.get((stage, i), ())
        self._await(received)
        for value in received:
            value.requires_grad_()
        outputs = stages.run(stage, received, lambda: stages.model(*task.inputs(batch)))
        self._lengths[stage, i] = [line.tokens for line in stages.lines]
        if stage == stages.last:
            assert self.loss is not None
            share = self.loss.share(i, task.loss(outputs, batch))
            scaler = self.pipeline.scaler
            outputs = (share if scaler is None else scaler.scaled(share),)
        elif stages.rank_of(stage + 1) == stages.rank_of(stage):
            self._inputs[stage + 1, i] = tuple(value.detach() for value in outputs)
        self._outputs[stage, i] = outputs

    def _backward(self, stage: int, i: int) -> None:
        pipeline, stages = self.pipeline, self.stages
        if pipeline.replicas is not None and 0 < i == len(self.batches) - 1:
            pipeline.replicas.begin(i, len(self.batches))
        outputs = self._outputs.pop((stage, i))
        for line, tokens in zip(stages.lines, self._lengths.pop((stage, i))):
            line.tokens = tokens
        gradients: tuple[Tensor | None, ...] = (None,)
        if stage != stages.last:
            gradients = self._gradients.pop((stage, i))
            self._await(tuple(each for each in gradients if each is not None))
        learned = [(out, gradient) for out, gradient in zip(outputs, gradients) if out.requires_grad]
        if learned:
            with balancing(self._balance):
                torch.autograd.backward([out for out, _ in learned], [grad for _, grad in learned])
        if pipeline.masters is not None:
            pipeline.masters.collect()
        if stage:
            received = self._inputs.pop((stage, i))
            input_gradients = tuple(torch.zeros_like(v) if v.grad is None else v.grad for v in received)
            self._gradients[stage - 1, i] = input_gradients

    def _of_input(self, stage: int, i: int) -> None:
        later: Later = []
        with put_off(later):
            self._backward(stage, i)
        self._later[stage, i] = later

    def _of_weights(self, stage: int, i: int) -> None:
        for make in self._later.pop((stage, i)):
            make()
        if self.pipeline.masters is not None:
            self.pipeline.masters.collect()

    def _send(self, stage: int, i: int) -> None:
        self.links.send(stage, self.stages.rank_of(stage + 1), self._outputs[stage, i])

    def _receive(self, stage: int, i: int) -> None:
        shapes = self.stages.expected(stage, self.pipeline.task.inputs(self.batches[i]))
        self._inputs[stage, i] = self.links.receive(stage - 1, self.stages.rank_of(stage - 1), shapes)

    def _send_back(self, stage: int, i: int) -> None:
        self.links.send_back(self.stages.rank_of(stage - 1), self._gradients.pop((stage - 1, i)))

    def _receive_back(self, stage: int, i: int) -> None:
        source = self.stages.rank_of(stage + 1)
        self._gradients[stage, i] = self.links.receive_back(source, self._outputs[stage, i])


def _raise_named(error: Exception, action: Action, count: int, last: int) -> NoReturn:
    """Raise the error again, with the same type and a description of the rank's action."""
    stage, kind, i = action
    prefix = f"In {_WORDS[kind]} of stage {stage} (0 to {last}) for micro-batch {i} (0 to {count - 1}): "
    try:
        named = type(error)(f"{prefix}{error}")
    except TypeError:
        error.add_note(prefix)
        raise error from None
    raise named from error
