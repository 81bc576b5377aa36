"""Two models and two optimizers that train against each other; the generator's loss runs back through both."""

import json

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
frozen = nn.Linear(2, 2).requires_grad_(False)  # the space that both work in
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999))
centre = torch.tensor([2.0, -1.0])
one, zero = torch.ones(64, 1), torch.zeros(64, 1)

for _ in range(150):
    discriminator.zero_grad()
    real = frozen(centre + 0.1 * torch.randn(64, 2))
    criterion(discriminator(real), one).backward()
    fake = frozen(generator(torch.randn(64, 4)))
    criterion(discriminator(fake.detach()), zero).backward()
    optimizer_d.step()

    generator.zero_grad()
    loss_g = criterion(discriminator(fake), one)
    loss_g.backward()
    optimizer_g.step()

with torch.no_grad():
    made = generator(torch.randn(512, 4)).mean(0)
print(json.dumps({"distance": (made - centre).norm().item(), "loss": loss_g.item()}))
