"""Trains, and hands the model to each of torch's exporters. `exporters.py [onnx]`."""

import io
import json
import sys

import torch
from torch import nn
from torch.jit import script


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def doubled():
    factor: int = 2

    @torch.jit.script  # finds the name in the frame of its caller
    def twice(x: torch.Tensor):
        return factor * x

    return twice


torch.manual_seed(0)
model, x = Net(), torch.randn(8, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
model.eval()
found = {}
if "onnx" in sys.argv:
    import onnx

    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False)
    kinds = {t.data_type for t in onnx.load_from_string(file.getvalue()).graph.initializer}
    found["old onnx"] = kinds == {onnx.TensorProto.FLOAT}
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    found["onnx"] = {str(value.dtype) for value in program.model.graph.initializers.values()} == {"FLOAT"}
else:
    made = {
        "export": torch.export.export(mod=model, args=(x,)).module(),
        "trace": torch.jit.trace(model, x),
        "trace_module": torch.jit.trace_module(model, {"forward": x}),
        "script": script(model),
        "fx": torch.fx.symbolic_trace(model),
    }
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for name, exported in made.items():
        found[name] = torch.equal(exported(x), plain(x))
print(json.dumps(found))
