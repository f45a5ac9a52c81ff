"""LINet's residual blocks."""

import torch
from torch import Tensor, nn

from .._settings import TORCH, settings
from ..functional._li_block import Options, li_block, run_layers
from ..functional._transforms import is_jit_tracing, needs_formula
from ..functional.li_conv import cast_image
from ._parts import hooks_everywhere, ordinary, parameter
from .li_batch_norm import LIBatchNorm2d
from .li_conv import LIConv2d, for_all_streams, members


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
        if isinstance(x, Tensor) and x.dim() == 5:
            x = cast_image(x)  # the residual too
            blanked = for_all_streams(blanked, x, x.shape[0] - 1)
            if self._is_fusible(x):
                strides, weights, norms, running = self._tensors()
                if all(t.dtype == norms[0].dtype for t in norms):
                    norm, shortcut = self.bn1, self.downsample is not None
                    options = Options(strides, shortcut, integrated_only, norm.training)
                    numbers = norm.momentum, norm.eps
                    return li_block(x, weights, norms, running, blanked, options, *numbers)

        def called(convolution, norm):
            def norm_(z, residual, integrated_only):
                return norm(z, residual, blanked, integrated_only)

            return lambda x, integrated_only: convolution(x, None, integrated_only), norm_

        layers = [called(*parts) for parts in self._parts()]
        shortcut = None if self.downsample is None else called(*self.downsample)
        return run_layers(x, layers, shortcut, integrated_only)

    def _is_fusible(self, x: Tensor) -> bool:
        """Whether one operator computes what calling the layers would. Errors about x are left to
        the layers."""
        if (
            settings.records is not None
            or TORCH in (settings.li_conv, settings.batch_norm_act)
            or needs_formula()
            or is_jit_tracing()
        ):
            return False
        layers, rows = self._all_layers(), x.shape[0]
        parts = [part for layer in layers for part in layer]
        kinds = (LIConv2d, LIBatchNorm2d) * len(layers)
        shortcut = [] if self.downsample is None else [self.downsample]
        first = layers[0][1]
        if (
            not ordinary(parts, kinds, getattr(first, "eps", None))
            or not ordinary(shortcut, (nn.Sequential,) * len(shortcut))
            or hooks_everywhere()
        ):
            return False
        training = first.training
        for i, (convolution, norm) in enumerate(layers):
            is_shortcut = i == len(self._layers)
            if (
                convolution.first
                or convolution.stream_biases is not None
                or len(convolution.stream_channels) != rows - 1
                or norm.num_streams != rows - 1
                or norm.activation != ("identity" if is_shortcut else "relu")
                or norm.max_pool
                or norm.training is not training
                or norm.momentum != first.momentum
                or (training and norm.process_group is not None)
            ):
                return False
        _, n, channels, h, w = x.shape
        if n == 0 or min(h, w) < 1 or channels != layers[0][0].stream_channels[0]:
            return False
        if not training or n > 1:
            return True
        for convolution, _ in layers[: len(self._layers)]:
            h, w = ((size - 1) // convolution.stride + 1 for size in (h, w))
        return h * w > 1  # otherwise a norm raises torch's error

    def _tensors(self):
        """Strides, weights, parameters of the norms and running statistics, as `li_block` takes
        them."""
        strides, weights, norms, running = [], [], [], []
        for convolution, norm in self._all_layers():
            strides.append(convolution.stride)
            weights += members(convolution.stream_weights)
            weights += members(convolution.integration_from_streams)
            weights.append(parameter(convolution, "integrated_weight"))
            norms += members(norm.stream_weights)
            norms.append(parameter(norm, "integrated_weight"))
            norms += members(norm.stream_biases)
            norms.append(parameter(norm, "integrated_bias"))
            running += (norm.running_mean, norm.running_var, norm.updates)
        return strides, weights, norms, running

    def _all_layers(self):
        """The main path, then the shortcut."""
        found = self._parts()
        return found if self.downsample is None else [*found, tuple(self.downsample)]

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
        own = self._modules
        return [(own[convolution], own[norm]) for convolution, norm in self._layers]


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
