"""nanoGPT's order: a model of a class of its own, then its optimizer, then torch.compile."""

import sys
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers()
if len(sys.argv) > 2:
    model = torch.compile(model, backend=sys.argv[2])  # type: ignore[assignment]
step = optimizer.step
for _ in range(int(sys.argv[1])):
    data = torch.randint(0, 64, (4, 17))
    with nullcontext():
        logits, loss = model(data[:, :-1], data[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    step()
    optimizer.zero_grad(set_to_none=True)
print("loss", loss.item())
