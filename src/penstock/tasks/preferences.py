"""Preferences: make the chosen of two answers likelier than the rejected one (Rafailov et al., "Direct preference
optimization", NeurIPS 2023).

With the log-probability of an answer, log π(y), as the sum over its tokens given the conversation before them, and
π_ref for the weights that a run starts from, a pair's margin and loss are (equation 7)

    m = β [(log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))]          −log σ(m)

Shapes: B pairs, whose texts are the rows 2i (chosen) and 2i + 1 (rejected) of a batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.apply import REFERENCE, Setup, apply
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.conversations import open_preferences
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.models.convert import load_weights
from penstock.models.draw import seeded
from penstock.models.lora import base_outputs, gives_classes
from penstock.tasks.chat import SHOWN, ConversationTask
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, first_samples, rounded, tokenizer_of


class Preferences(ConversationTask):
    """Mean loss of pairs. Metrics: `loss`; `accuracy`, the share of pairs with a margin above 0; `margin`, its mean.

    `beside` sets the reference; `build` calls it if a run starts from weights. The reference is the model without its
    adapters, or a whole copy on each rank, which is not part of checkpoints and exports.
    """

    unit = "pairs"
    reference: Callable[..., Tensor] | None = None
    """A function of inputs that returns −log π_ref of each text, in evaluation mode, with the model's precision."""
    beta = 0.1
    ranked_by = ("accuracy", "loss")
    means = ("loss", "accuracy", "margin")
    shown = ("loss {loss:.4f}", "accuracy {accuracy:.2%}", "margin {margin:+.4f}")

    def beside(self, reference: Callable[..., Tensor], beta: float = 0.1) -> Self:
        """A copy of the task with a reference and β; a reference that is a module is changed in place."""
        if isinstance(reference, nn.Module):
            reference.eval().requires_grad_(False)
        return self.changed(reference=reference, beta=beta)

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        (length,) = (token_input.length for token_input in model.graph.inputs)
        return open_preferences(data, tokenizer, split, length=length + 1)

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return partial(prepare_pairs, arguments=model.graph.arguments)

    def margins(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        """Margins of pairs (B,), from the sums of −log p that the model returns for each text (2B,); differentiable."""
        if self.reference is None:
            raise ConfigError(
                "Preferences compares a model with the weights that it started from, but there are none; name them "
                "with --from (init_from), or give the task a model with `beside`."
            )
        with torch.no_grad():
            reference_losses = self.reference(*batch.inputs)
        chosen, rejected = (reference_losses - outputs).view(-1, 2).unbind(1)
        margins: Tensor = self.beta * (chosen - rejected)
        return margins

    def loss(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        return -F.logsigmoid(self.margins(outputs, batch)).mean()

    def tally(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        margins = self.margins(outputs, batch).double()
        return torch.stack([-F.logsigmoid(margins).sum(), (margins > 0).double().sum(), margins.sum()])

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """Both answers of the split's first pair, and the margin by which the model prefers the chosen answer."""
        tokenizer, host = tokenizer_of(source), first_samples(source, 1)
        batch = prepare_pairs(host, device, arguments=model.graph.arguments)  # type: ignore[arg-type, union-attr]
        margin = float(self.margins(model(*batch.inputs), batch))
        fields: dict[str, Tensor] = host.samples
        question, answers = "", []
        for tokens, learned in zip(fields["tokens"][0], fields["learned"][0].bool(), strict=True):
            begin = int(learned.int().argmax())
            question = tokenizer.decode(tokens[max(0, begin - SHOWN) : begin].tolist())
            answers.append(tokenizer.decode(tokens[learned][:SHOWN].tolist()))
        return f"…{question}│{answers[0]} over {answers[1]} (margin {margin:+.4f})"


def reference_for(task: Preferences, module: nn.Module, setup: Setup) -> Callable[..., Tensor]:
    """The whole model that preferences start from, under the same Plan. Raises ConfigError if there is none."""
    lora = setup.recipe.lora
    if lora.rank and not lora.trained_parts and not gives_classes(module):
        return partial(base_outputs, module)  # the weights without the adapters
    if task.init_from is None or setup.config is None:
        raise ConfigError(
            "Preferences compares a configuration's model with the weights that it starts from; name them with --from "
            "(init_from), or give the task a model with `beside`."
        )
    with seeded(setup.seed):
        model = create(setup.config)
    load = partial(load_weights, source=task.init_from)
    return apply(model, setup.beside(REFERENCE, load=load))  # type: ignore[no-any-return]


def prepare_pairs(host: HostBatch, device: torch.device, *, arguments: Sequence[str]) -> TextBatch:
    """Pairs (B, 2, L + 1) as a batch of 2B texts, for a model with these `arguments` that returns the loss of each
    text; the tokens of answers are targets."""
    fields: dict[str, Tensor] = host.samples
    lengths = fields["length"].numpy()
    tokens, learned = (fields[name].flatten(0, 1).numpy() for name in ("tokens", "learned"))
    size = rounded(int(lengths.max()) - 1, tokens.shape[1] - 1)
    targets = np.where(learned[:, 1 : size + 1] == 1, tokens[:, 1 : size + 1], IGNORED)
    named: dict[str, Any] = {arguments[0]: tokens[:, :size], "targets": targets, "by_sample": True}
    return TextBatch.of(host, device, map(named.get, arguments), tokens=int((lengths - 1).sum()))
