"""The Transformer block that language models and image classifiers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def check_heads(dim: int, heads: int) -> None:
    if dim % heads:
        raise ValueError(f"dim={dim} is not a multiple of heads={heads}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn each pair (x[i], x[i + half]) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Self-attention with one fused `qkv` projection."""

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, bias: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.proj(x.transpose(1, 2).reshape(batch, time, dim))


class Block(nn.Module):
    """Attention and a GELU layer, each behind a LayerNorm."""

    def __init__(self, attn: Attention, dim: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.fc = nn.Linear(dim, hidden, bias=bias)
        self.proj = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.proj(F.gelu(self.fc(self.norm2(x)))))
