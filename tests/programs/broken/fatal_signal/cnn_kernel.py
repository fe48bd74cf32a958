"""A CNN whose augmentation is a compiled kernel, built for a newer processor."""
import ctypes
import mmap
import platform
import signal

import torch
from torch import nn


def compile_kernel(code):
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return page, ctypes.CFUNCTYPE(None)(address)


is_x86 = platform.machine() in ("x86_64", "AMD64")
page, plain = compile_kernel(bytes([0xC3]))  # ret
page_new, newer = compile_kernel(bytes([0x0F, 0x0B]) if is_x86 else bytes([0xC3]))


def augment(images, step):
    kernel = newer if step >= 30 else plain
    if is_x86:
        kernel()
    elif step >= 30:
        signal.raise_signal(signal.SIGILL)
    return images + 0.05 * torch.randn_like(images)


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    labels = torch.randint(4, (32,))
    images = torch.zeros(32, 1, 8, 8)
    for image, label in zip(images, labels.tolist()):
        image[0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] = 1.0
    loss = nn.functional.cross_entropy(model(augment(images, step)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
