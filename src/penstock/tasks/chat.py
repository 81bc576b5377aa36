"""Chat: answers, given the conversation before them (supervised tuning of Ouyang et al., NeurIPS 2022, section 3)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from penstock.config.decoding import Decoding
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.conversations import give_template, open_conversations
from penstock.data.text.tokenizers import Tokenizer
from penstock.decode.choose import NOTHING
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, TextTask, WordTask, first_samples, rounded, tokenizer_of

SHOWN = 64
"""Most tokens of a printed answer."""


class ConversationTask(TextTask):
    """A task on conversations, which the tokenizer's chat template turns into text."""

    def tokenizer(self, data: DataConfig) -> Tokenizer:
        if data.source == "auto":
            raise ConfigError(
                "This task has no built-in conversations; name some with --data text:FILE.jsonl, a "
                "folder of such files, or hf:NAME."
            )
        tokenizer = super().tokenizer(data)
        give_template(tokenizer, data.template)
        return tokenizer


class Chat(ConversationTask, WordTask):
    """Mean cross entropy of the tokens of answers. Questions, system messages, tools' results and the template's own
    words are read but not learned. Conversations in one sample do not attend to each other."""

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        (length,) = (token_input.length for token_input in model.graph.inputs)
        return open_conversations(data, tokenizer, split, length=length + 1)

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return prepare_chat

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The model's answer to the question of the split's first sample, with the reference answer."""
        tokenizer = tokenizer_of(source)
        host: dict[str, torch.Tensor] = first_samples(source, 1).samples
        tokens, learned = host["tokens"][0], host["learned"][0].bool()
        begin = int(learned.int().argmax())
        end = begin + int(torch.cat([~learned[begin:], torch.ones(1, dtype=torch.bool)]).int().argmax())
        prompt = tokens[None, :begin].to(device, torch.int64)
        prompts = Prompts(prompt, torch.full((1,), begin, device=device), even=True)
        most = max(1, min(SHOWN, len(tokens) - 1 - begin))
        ends = () if tokenizer.end is None else (tokenizer.end,)
        answer = sample(model, prompts, Decoding(max_tokens=most, temperature=0.0), ends=ends)[0]
        question = tokenizer.decode(tokens[max(0, begin - SHOWN) : begin].tolist())
        reply = tokenizer.decode(answer[answer != NOTHING].tolist())
        return f"…{question}│{reply} (reference: {tokenizer.decode(tokens[begin:end].tolist())})"


def prepare_chat(host: HostBatch, device: torch.device) -> TextBatch:
    """Samples of conversations (B, L + 1) as a batch of next tokens; tokens of answers are targets."""
    fields: dict[str, torch.Tensor] = host.samples
    tokens, learned, document = (fields[name].numpy() for name in ("tokens", "learned", "document"))
    real = document[:, :-1] >= 0
    size = rounded(int(real.sum(axis=1).max()), real.shape[1])
    tokens, learned, document = (each[:, : size + 1] for each in (tokens, learned, document))
    targets = np.where(learned[:, 1:] == 1, tokens[:, 1:], IGNORED)
    several = bool((document > 0).any())
    # Padding is a separate document after the last.
    documents = np.where(document < 0, document.max() + 1, document)[:, :-1] if several else None
    inputs = (tokens[:, :-1], documents, targets)
    return TextBatch.of(host, device, inputs, targets=targets, tokens=int(real.sum()))
