"""The shape of TRL's sft.py: a Trainer whose arguments have bf16 by default, and which binds a forward of its own to
the model. `sft_in_style.py --output_dir …`.
"""

import functools
import types
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class SFTConfig(TrainingArguments):
    bf16: bool = field(default=True)
    max_length: int = field(default=16)


class SFTTrainer(Trainer):
    def __init__(self, model, **more):
        inner = model.forward

        @functools.wraps(type(model).forward)
        def with_head(self, *args, fused_lm_head=False, **kwargs):
            return inner(*args, **kwargs)

        model.forward = types.MethodType(with_head, model)
        super().__init__(model, **more)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Tokens(Dataset):
    def __init__(self, length):
        self.tokens = torch.randint(0, 64, (8, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
SFTTrainer(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens(args.max_length)).train()
