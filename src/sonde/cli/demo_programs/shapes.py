"""Small pictures of four shapes, drawn with noise: something real to learn that needs no download."""

import torch

CLASSES = ("circle", "square", "cross", "stripes")


def make_shapes(num_images, seed):
    """`num_images` grey pictures of 16 x 16 and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (num_images,), generator=generator)
    centre = torch.randint(6, 10, (num_images, 2, 1, 1), generator=generator).float()
    radius = torch.randint(3, 6, (num_images, 1, 1), generator=generator).float()
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    dy, dx = (y - centre[:, 0]).abs(), (x - centre[:, 1]).abs()
    drawings = torch.stack(
        [
            ((dx**2 + dy**2).sqrt() - radius).abs() < 0.8,
            (torch.maximum(dx, dy) - radius).abs() < 0.8,
            (torch.minimum(dx, dy) < 0.8) & (torch.maximum(dx, dy) <= radius),
            (dx % 2 < 1) & (torch.maximum(dx, dy) <= radius),
        ]
    )
    images = drawings[labels, torch.arange(num_images)].float()
    images += 0.4 * torch.randn(images.shape, generator=generator)
    return images.unsqueeze(1), labels
