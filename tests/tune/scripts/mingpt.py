"""The shape of minGPT: configuration nodes, attention written out, and a Trainer with callbacks. `mingpt.py STEPS`."""

import sys
import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
                "act": nn.GELU(),
            }
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class SortDataset(Dataset):
    """Six digits, and then the same in order."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        digits = torch.randint(3, (6,))
        both = torch.cat((digits, torch.sort(digits)[0]))
        y = both[1:].clone()
        y[:5] = -1
        return both[:-1], y


class Trainer:
    def __init__(self, config, model, dataset):
        self.config, self.model, self.dataset = config, model, dataset
        self.callbacks = defaultdict(list)
        self.iter_num, self.iter_dt = 0, 0.0

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def run(self):
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.95)
        )
        loader = DataLoader(self.dataset, shuffle=True, batch_size=self.config.batch_size)
        self.model.train()
        data, began = iter(loader), time.time()
        while self.iter_num < self.config.max_iters:
            try:
                x, y = next(data)
            except StopIteration:
                data = iter(loader)
                x, y = next(data)
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.iter_num += 1
            self.iter_dt, began = time.time() - began, time.time()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)


config = CfgNode(n_layer=2, n_head=2, n_embd=32, vocab_size=3, block_size=11, attn_pdrop=0.1)
trainer = Trainer(
    CfgNode(learning_rate=5e-4, batch_size=16, max_iters=int(sys.argv[1])), GPT(config), SortDataset()
)


def report(trainer):
    if trainer.iter_num % 100 == 0:
        print(
            f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}"
        )


trainer.add_callback("on_batch_end", report)
trainer.run()
