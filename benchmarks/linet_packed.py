"""li_resnet18 in plain PyTorch with the streams side by side in the channels: grouped convolutions.

A baseline of linet_step.py. Each layer has its streams' weights in one parameter, so a training
step copies none of them. `blanked` and bottlenecks are left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def joined(tensors) -> nn.Parameter:
    return nn.Parameter(torch.cat([t.detach() for t in tensors]))


class Conv(nn.Module):
    """`plain`: a convolution of the model with a list of streams. So it is below."""

    def __init__(self, plain):
        super().__init__()
        self.groups = len(plain.stream_weights)
        self.stride, self.padding = plain.stride, plain.padding
        self.weight = joined(plain.stream_weights)
        self.mix = nn.Parameter(torch.cat([w.detach() for w in plain.integration_from_streams], 1))
        self.integrated_weight = nn.Parameter(plain.integrated_weight.detach().clone())

    def forward(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        u = F.conv2d(x, self.weight, None, self.stride, self.padding, groups=self.groups)
        return u, F.conv2d(u, self.mix) + F.conv2d(m, self.integrated_weight, stride=self.stride)


class First(nn.Module):
    """The streams have different channels, so each has a convolution of its own."""

    def __init__(self, plain):
        super().__init__()
        self.weights = nn.ParameterList(w.detach().clone() for w in plain.stream_weights)
        self.mix = nn.Parameter(torch.cat([w.detach() for w in plain.integration_from_streams], 1))
        self.stride, self.padding = plain.stride, plain.padding

    def forward(self, streams) -> tuple[Tensor, Tensor]:
        pairs = zip(streams, self.weights, strict=True)
        u = torch.cat([F.conv2d(x, w, None, self.stride, self.padding) for x, w in pairs], 1)
        return u, F.conv2d(u, self.mix)


class Norm(nn.Module):
    def __init__(self, plain):
        super().__init__()
        features = plain.integrated_weight.numel()
        self.streams = nn.BatchNorm2d(len(plain.stream_weights) * features)
        self.integrated = nn.BatchNorm2d(features)
        with torch.no_grad():
            self.streams.weight.copy_(joined(plain.stream_weights))
            self.streams.bias.copy_(joined(plain.stream_biases))
            self.integrated.weight.copy_(plain.integrated_weight)
            self.integrated.bias.copy_(plain.integrated_bias)

    def forward(self, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return self.streams(x), self.integrated(m)


class Block(nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.conv1, self.bn1 = Conv(plain.conv1), Norm(plain.bn1)
        self.conv2, self.bn2 = Conv(plain.conv2), Norm(plain.bn2)
        self.shortcut = None
        if plain.downsample is not None:
            convolution, norm = plain.downsample
            self.shortcut = nn.ModuleList([Conv(convolution), Norm(norm)])

    def forward(self, x: Tensor, m: Tensor, last: bool) -> tuple[Tensor | None, Tensor]:
        residual, integrated_residual = x, m
        if self.shortcut is not None:
            for layer in self.shortcut:
                residual, integrated_residual = layer(residual, integrated_residual)
        x, m = self.bn1(*self.conv1(x, m))
        x, m = self.conv2(F.relu(x), F.relu(m))
        m = F.relu(self.bn2.integrated(m) + integrated_residual)
        return None if last else F.relu(self.bn2.streams(x) + residual), m


class PackedLINet(nn.Module):
    """A model with the weights of `plain`, the li_resnet18 of tests/python/linet_reference.py."""

    def __init__(self, plain):
        super().__init__()
        self.conv1, self.bn1 = First(plain.conv1), Norm(plain.bn1)
        self.blocks = nn.ModuleList(map(Block, plain.blocks()))
        self.fc = nn.Linear(plain.fc.in_features, plain.fc.out_features)
        self.fc.load_state_dict(plain.fc.state_dict())

    def forward(self, *streams: Tensor) -> Tensor:
        x, m = self.bn1(*self.conv1(streams))
        x, m = (F.max_pool2d(F.relu(t), 3, 2, 1) for t in (x, m))
        for i, block in enumerate(self.blocks, 1):
            x, m = block(x, m, last=i == len(self.blocks))
        return self.fc(m.mean((2, 3)))
