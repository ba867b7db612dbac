"""A small ResNet on scikit-learn's 8×8 digits: python examples/resnet.py."""

import itertools

import torch
from common import Progress, arguments, warmup_cosine
from sklearn.datasets import load_digits
from torch import nn

from ngn_kernels import NGNMDv1, groups

BATCH = 64


class Block(nn.Module):
    """Two convolutions beside a shortcut, which halves the image where the width grows."""

    def __init__(self, before, width):
        super().__init__()
        stride = 1 if before == width else 2
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet():
    widths = (16, 16, 32, 64)
    blocks = [Block(a, b) for a, b in itertools.pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main():
    args = arguments(steps=300)
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.tensor(digits)
    held_out = torch.arange(len(labels)) % 5 == 0
    train_images, train_labels = images[~held_out], labels[~held_out]

    model = resnet()
    optimizer = NGNMDv1(
        groups(model, weight_decay=0.01),
        lr=1e-2,
        step_cap=1e-2,
        loss_target=0.2,
        decay_form="adamw",
    )
    scheduler = warmup_cosine(optimizer, args.steps)
    progress = Progress(args.steps)
    for _ in range(args.steps):
        chosen = torch.randint(len(train_labels), (BATCH,))
        loss = nn.functional.cross_entropy(model(train_images[chosen]), train_labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        scheduler.step()
        progress(loss.item())

    model.eval()
    with torch.no_grad():
        right = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    print(f"accuracy on held-out digits: {right:.1%}")


if __name__ == "__main__":
    main()
