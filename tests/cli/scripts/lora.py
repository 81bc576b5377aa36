"""Low-rank adapters by peft, copied and saved after training."""

import copy
import os
import sys

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import torch  # isort: skip  # after the libraries, as most scripts have it

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(LlamaForCausalLM(config), adapters)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for _ in range(int(sys.argv[1])):
    ids = torch.randint(0, 60, (4, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert type(copy.deepcopy(model)) is type(model)
model.save_pretrained(sys.argv[2])
print(sorted(os.listdir(sys.argv[2])))
