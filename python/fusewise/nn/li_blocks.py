"""LINet's residual blocks."""

import torch
from torch import Tensor, nn

from .li_batch_norm import LIBatchNorm2d
from .li_conv import LIConv2d


class _Block(nn.Module):
    """A chain of convolutions with their norms, and a residual in the last norm."""

    expansion = 1

    def __init__(
        self, channels: int, planes: int, num_streams: int, stride: int, sizes, device, dtype
    ):
        super().__init__()
        kind = {"device": device, "dtype": dtype}

        def convolution(inputs, outputs, kernel, stride):
            return LIConv2d([inputs] * num_streams, outputs, kernel, stride, **kind)

        def norm(outputs, activation="relu"):
            return LIBatchNorm2d(outputs, num_streams, activation, **kind)

        self._layers = []
        for i, (inputs, outputs, kernel, step) in enumerate(sizes, 1):
            self.add_module(f"conv{i}", convolution(inputs, outputs, kernel, step))
            self.add_module(f"bn{i}", norm(outputs))
            self._layers.append((f"conv{i}", f"bn{i}"))
        out = planes * self.expansion
        self.downsample = None
        if stride != 1 or channels != out:
            shortcut = convolution(channels, out, 1, stride)
            self.downsample = nn.Sequential(shortcut, norm(out, "identity"))

    def forward(
        self, x: Tensor, blanked: Tensor | None = None, integrated_only: bool = False
    ) -> Tensor:
        """
        Args:
            x: `[S + 1, N, C, H, W]`, with 0 in blanked samples, as every layer leaves it.
            blanked: bool `[S, N]` or `[S + 1, N]`, or None, as in `LIBatchNorm2d`.
            integrated_only: whether to return the integrated stream alone. What only the other
                streams would need is not computed; its parameters get gradients of 0.
        """
        residual = x[-1] if integrated_only else x
        if self.downsample is not None:
            convolution, norm = self.downsample
            residual = convolution(x, integrated_only=integrated_only)
            residual = norm(residual, None, blanked, integrated_only)
        *layers, last = self._parts()
        for convolution, norm in layers:
            x = norm(convolution(x), None, blanked)
        convolution, norm = last
        x = convolution(x, integrated_only=integrated_only)
        return norm(x, residual, blanked, integrated_only)

    def forward_stream(self, i: int, x: Tensor) -> Tensor:
        """Stream i alone, `[N, C, H, W]`.

        Example:
            >>> import torch, fusewise
            >>> block = fusewise.nn.LIBasicBlock(channels=16, planes=32, num_streams=2, stride=2)
            >>> block.forward_stream(0, torch.randn(4, 16, 8, 8)).shape
            torch.Size([4, 32, 4, 4])
        """
        residual = x
        if self.downsample is not None:
            convolution, norm = self.downsample
            residual = norm.forward_stream(i, convolution.forward_stream(i, x))
        *layers, last = self._parts()
        for convolution, norm in layers:
            x = norm.forward_stream(i, convolution.forward_stream(i, x))
        convolution, norm = last
        return norm.forward_stream(i, convolution.forward_stream(i, x), residual)

    def _parts(self):
        return [tuple(map(self.get_submodule, names)) for names in self._layers]


class LIBasicBlock(_Block):
    """Two 3x3 convolutions, each with its BatchNorm, and a residual, for every stream and the
    integrated one.

    Args:
        channels: C of the input.
        planes: channels of the output.
        num_streams: S.
        stride: of the first convolution. If it is not 1, or if `channels` and `planes` differ, the
            residual goes through a 1x1 convolution with the same stride and a BatchNorm.

    Example:
        >>> import torch, fusewise
        >>> block = fusewise.nn.LIBasicBlock(channels=16, planes=32, num_streams=2, stride=2)
        >>> block(torch.randn(3, 4, 16, 8, 8)).shape
        torch.Size([3, 4, 32, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        planes: int,
        num_streams: int,
        stride: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = [(channels, planes, 3, stride), (planes, planes, 3, 1)]
        super().__init__(channels, planes, num_streams, stride, sizes, device, dtype)


class LIBottleneck(_Block):
    """Convolutions of 1x1, 3x3 and 1x1, each with its BatchNorm, and a residual, for every stream
    and the integrated one.

    Args:
        channels: C of the input.
        planes: channels of the first two convolutions; the output has four times as many.
        num_streams: S.
        stride: of the 3x3 convolution; the residual as in `LIBasicBlock`.

    Example:
        >>> import torch, fusewise
        >>> block = fusewise.nn.LIBottleneck(channels=16, planes=8, num_streams=2)
        >>> block(torch.randn(3, 4, 16, 8, 8), integrated_only=True).shape
        torch.Size([4, 32, 8, 8])
    """

    expansion = 4

    def __init__(
        self,
        channels: int,
        planes: int,
        num_streams: int,
        stride: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = [(channels, planes, 1, 1), (planes, planes, 3, stride), (planes, 4 * planes, 1, 1)]
        super().__init__(channels, planes, num_streams, stride, sizes, device, dtype)
