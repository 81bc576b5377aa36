"""The shape of tutorials on translation: nn.Transformer with masks for padding, and the schedule of Vaswani et al.
`seq2seq.py STEPS`.
"""

import sys

import torch
from torch import nn

PAD, VOCABULARY = 0, 40


class Seq2Seq(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 64, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(width, VOCABULARY)

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(
            self.source(source), self.target(target), tgt_mask=causal,
            src_key_padding_mask=(source == PAD).float().masked_fill(source == PAD, float("-inf")),
        )  # fmt: skip
        return self.generator(out)


def batches():
    while True:
        words = torch.randint(2, VOCABULARY, (8, 12))
        lengths = torch.randint(4, 13, (8, 1))
        words = words.masked_fill(torch.arange(12) >= lengths, PAD)
        yield words, torch.cat([torch.ones(8, 1, dtype=torch.long), words], dim=1)


torch.manual_seed(0)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 32**-0.5 * min((step + 1) ** -0.5, (step + 1) * 400**-1.5)
)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
for _step, (source, target) in zip(range(int(sys.argv[1])), batches()):
    logits = model(source, target[:, :-1])
    loss = criterion(logits.reshape(-1, VOCABULARY), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"loss {loss.item():.4f}")
