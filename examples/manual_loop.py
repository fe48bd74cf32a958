"""A hand-written loop, debugged step by step: one batch has wrong values; the report, the picture and the diagnostics show their effect.

Run it with:  python examples/manual_loop.py [folder for the log and the pictures]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import sonde

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="sonde-"))
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

manager = sonde.PyTorchDebugManager(sonde.DebugConfig(output_dir=str(folder)))
manager.setup_training_logging("manual_loop")
diagnostics = sonde.ModelDiagnostics()
diagnostics.inspect(model, x[:2])

for epoch in range(3):
    order = torch.randperm(1536)
    for batch, chosen in enumerate(order.split(32)):
        inputs = x[chosen]
        if (epoch, batch) == (2, 20):
            inputs = inputs * -50  # a sensor with the wrong sign and scale
        values = manager.debug_training_step(model, optimizer, criterion, inputs, y[chosen], epoch, batch)
        step = epoch * 48 + batch
        held_out = None
        if step % 12 == 11:
            logits = manager.debug_model_inference(model, x[1536:])["output"]
            held_out = nn.functional.cross_entropy(logits, y[1536:]).item()
        diagnostics.record_performance(
            sonde.ModelPerformanceMetrics(
                training_step=step, loss=values["loss"], validation_loss=held_out, batch_size=len(chosen),
                step_time_ms=1e3 * values["execution_time"], memory_usage_mb=values["cpu_memory"],
            )
        )  # fmt: skip

norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
print(f"\nlast gradient norm: {values['gradient_norm']:.6f}; by torch itself: {norm:.6f}\n")
print(manager.create_comprehensive_report(), end="\n\n")
print(diagnostics.analyze().summary(), end="\n\n")
first = manager.debugger.debug_history[0]
print(f"{first.operation} of epoch {first.epoch}: {1e3 * first.execution_time:.2f} ms, then {first.memory_usage:.0f} MiB")
print("picture of the loop:", manager.create_debug_plots())
diagnostics.analyze().plot(folder / "diagnostics.png")
manager.close()
