"""What a trace has wrong strides of: an op whose fake lies, and a net of torch's own ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rematc

TRACED, REAL = (3, 1), (1, 4)  # strides of what `pair` returns second, of a tensor of 4 x 3


@rematc.pure
@torch.library.custom_op("misled::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos().t().contiguous().t()


@pair.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)  # wrong of the second


pair.register_autograd(lambda ctx, first, second: first + second)


class Attended(nn.Module):
    """Attention between convolutions, of one image, as in an autoencoder for diffusion.

    The trace has what `group_norm` reads contiguous, with the channels last. It isn't: so `aot_eager` fails,
    and the kernel of the backward pass would read it in another order without a word.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16, 16))
        self.weigh = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.silu(norm(conv(x)))
            x = self.weigh(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(x.shape) + x
        return (self.norms[0](x) * torch.linspace(0, 1, x.numel()).view(x.shape)).square().mean()
