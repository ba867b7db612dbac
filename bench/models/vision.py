"""Image classifiers of the paper's experiments: (batch, channels, height, width) to logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Block, check_heads


class MLP(nn.Module):
    """Fully connected ReLU network; the paper's MNIST model has two hidden layers of 100."""

    def __init__(
        self, inputs: int = 28 * 28, hidden: Sequence[int] = (100, 100), classes: int = 10
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(
            nn.Linear(n_in, n_out) for n_in, n_out in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


class SmallCNN(nn.Module):
    """Three 3×3 convolutions, each followed by a ReLU and pooling, and a linear head."""

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        channels = [3, width, width, 2 * width]
        self.convs = nn.ModuleList(
            nn.Conv2d(n_in, n_out, 3, padding=1) for n_in, n_out in itertools.pairwise(channels)
        )
        self.head = nn.Linear(2 * width * 4 * 4, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.head(x.flatten(1))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut.

    Where the shape changes, a `projection` shortcut is a 1×1 convolution; otherwise the shortcut
    subsamples and pads channels with zeros (option A of the ResNet paper), which has no parameters.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.stride = stride
        self.padding = channels - channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if projection and (stride != 1 or self.padding):
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def shortcut(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            return self.downsample(x)
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            x = F.pad(x, (0, 0, 0, 0, self.padding // 2, self.padding - self.padding // 2))
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network of basic blocks; stage `i` is `layer{i}`, its first convolution `.0.conv1`.

    `stem="imagenet"` is a 7×7 convolution of stride 2 and a max-pool, `stem="small"` one 3×3
    convolution that keeps the size.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        classes: int,
        *,
        projection: bool,
        stem: str = "small",
        channels: int = 3,
    ) -> None:
        super().__init__()
        if len(blocks) != len(widths):
            raise ValueError(f"one width per stage is needed: {len(blocks)} stages, {widths=}")
        if stem not in ("small", "imagenet"):
            raise ValueError(f"stem must be 'small' or 'imagenet', not {stem!r}")
        size, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(channels, widths[0], size, stride, size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        self.stages = len(blocks)
        width_in = widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            layer = nn.Sequential()
            for index in range(count):
                down = 2 if stage > 1 and index == 0 else 1
                layer.append(BasicBlock(width_in, width, down, projection))
                width_in = width
            setattr(self, f"layer{stage}", layer)
        self.fc = nn.Linear(width_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean(dim=(2, 3)))


def cifar_resnet(depth: int = 20, classes: int = 10, width: int = 16) -> ResNet:
    """ResNet-20, -110, … for CIFAR: 6n + 2 layers in three stages, parameter-free shortcuts."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"a CIFAR ResNet has 6n + 2 layers (20, 32, …, 110), not {depth}")
    blocks = [(depth - 2) // 6] * 3
    return ResNet(blocks, (width, 2 * width, 4 * width), classes, projection=False)


def resnet18(
    classes: int = 1000, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2), small: bool = False
) -> ResNet:
    """ResNet-18; `small` is the variant for 32×32 images (ImageNet32)."""
    widths = [width * 2**stage for stage in range(len(blocks))]
    stem = "small" if small else "imagenet"
    return ResNet(blocks, widths, classes, projection=True, stem=stem)


class VGG16(nn.Module):
    """VGG16 (configuration D) for 32×32 images, with the three-layer head of its CIFAR versions."""

    CONVOLUTIONS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))

    def __init__(
        self, classes: int = 10, width: int = 64, batch_norm: bool = False, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels = 3
        for stage in self.CONVOLUTIONS:
            for factor in stage:
                conv = nn.Conv2d(channels, factor * width, 3, padding=1)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
                self.features.append(conv)
                channels = factor * width
                if batch_norm:
                    self.features.append(nn.BatchNorm2d(channels))
                self.features.append(nn.ReLU())
            self.features.append(nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Linear(channels, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class ViT(nn.Module):
    """Vision Transformer with a class token; block `i` has its `blocks.{i}.attn.qkv`.

    The defaults are the common CIFAR model (6 blocks of 512, 4×4 patches).
    """

    def __init__(
        self,
        image: int = 32,
        patch: int = 4,
        classes: int = 10,
        dim: int = 512,
        depth: int = 6,
        heads: int = 8,
        mlp_dim: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"the image size {image} is not a multiple of the patch size {patch}")
        check_heads(dim, heads)
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(Attention(dim, heads, causal=False), dim, mlp_dim, dropout, bias=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit_tiny(classes: int = 1000, image: int = 224, dim: int = 192, depth: int = 12) -> ViT:
    """ViT-Tiny with 16×16 patches; heads of 64, no dropout."""
    heads = max(1, dim // 64)
    return ViT(image, 16, classes, dim, depth, heads, mlp_dim=4 * dim, dropout=0.0)
