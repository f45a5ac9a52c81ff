"""LINet's convolution as a module."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..functional._products import autocast_dtype
from ..functional._transforms import needs_formula, refuse_script
from ._checks import floating, true_or_false, whole
from ._parts import parameter


class LIConv2d(nn.Module):
    """The convolutions of several streams, and their mixture for the integrated stream.

        u_s = conv(x_s, stream_weights[s])
        y   = conv1x1(m, integrated_weight, stride)
              + sum over s of conv1x1(u_s, integration_from_streams[s])

    With a bias, that of a stream is added to what goes on in the stream. The integrated stream does
    not see it, and has a bias of its own. The padding is half the kernel.

    The streams live in one tensor `[S + 1, N, C, H, W]`, the integrated one behind the others, and
    each of them is channels-last. The first layer takes the S images instead, and has no integrated
    stream before it.

    Args:
        stream_channels: the channels of each stream before the convolution. All the same, unless
            this is the first layer.
        out_channels: of each stream and of the integrated one behind the convolution.
        kernel_size: an odd number.
        stride: of the convolution; m is read at every stride-th pixel.
        bias: whether the streams and the integrated stream have biases.
        first: whether this is the first layer.

    Example:
        >>> import torch, fusewise
        >>> first = fusewise.nn.LIConv2d((3, 1), 16, kernel_size=7, stride=2, first=True)
        >>> x = first([torch.randn(4, 3, 16, 16), torch.randn(4, 1, 16, 16)])  # RGB and depth
        >>> x.shape
        torch.Size([3, 4, 16, 8, 8])
        >>> fusewise.nn.LIConv2d((16, 16), 32, kernel_size=3)(x).shape
        torch.Size([3, 4, 32, 8, 8])
    """

    def __init__(
        self,
        stream_channels: Sequence[int],
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = False,
        first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(stream_channels, Sequence):
            got = type(stream_channels).__name__
            raise TypeError(f"stream_channels: expected a number for each stream, got {got}")
        self.stream_channels = tuple(stream_channels)
        if not self.stream_channels:
            raise ValueError("stream_channels: expected at least one stream, got none")
        for channels in self.stream_channels:
            whole("stream_channels", channels)
        whole("out_channels", out_channels)
        whole("kernel_size", kernel_size)
        whole("stride", stride)
        true_or_false("bias", bias)
        true_or_false("first", first)
        floating(dtype)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd number, got {kernel_size}")
        if not first and len(set(self.stream_channels)) > 1:
            raise ValueError(
                "stream_channels: expected one number for all streams, because only the first "
                f"layer takes streams of different sizes, got {self.stream_channels}"
            )
        self.out_channels, self.kernel_size, self.stride = out_channels, kernel_size, stride
        self.first = first
        kind = {"device": device, "dtype": dtype}

        def parameter(*shape):
            data = torch.empty(shape, **kind)
            if len(shape) == 4 and shape[-1] > 1:  # as the convolutions take it without a copy
                data = data.to(memory_format=torch.channels_last)
            return nn.Parameter(data)

        def each(make):
            return nn.ParameterList(map(make, self.stream_channels))

        k, out = kernel_size, out_channels
        self.stream_weights = each(lambda channels: parameter(out, channels, k, k))
        self.integration_from_streams = each(lambda _: parameter(out, out, 1, 1))
        if first:  # empty, so that the state dict has the key
            self.register_buffer("integrated_weight", torch.empty(out, 0, 1, 1, **kind))
        else:
            self.integrated_weight = parameter(out, self.stream_channels[0], 1, 1)
        self.stream_biases = each(lambda _: parameter(out)) if bias else None
        self.register_parameter("integrated_bias", parameter(out) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, each as torch.nn.Conv2d does."""
        for weight in (*self.stream_weights, *self._integration()):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.stream_biases is None:
            return
        for bias, weight in zip(self.stream_biases, self.stream_weights, strict=True):
            _draw_bias(bias, weight[0].numel())
        _draw_bias(self.integrated_bias, sum(weight.shape[1] for weight in self._integration()))

    def _integration(self):
        """The weights of the 1x1 convolutions, as far as there are any."""
        return [*self.integration_from_streams, *([] if self.first else [self.integrated_weight])]

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        blanked: Tensor | None = None,
        integrated_only: bool = False,
    ) -> Tensor:
        """
        Args:
            x: `[S + 1, N, C, H, W]`; for the first layer a list of S images `[N, C_s, H, W]`.
            blanked: bool `[S, N]` or None. True where a sample of a stream is absent: its values do
                not matter, NaN included, its result and its gradient are 0.
            integrated_only: whether to return the integrated stream alone.

        Returns:
            `[S + 1, N, out_channels, P, Q]`, or the integrated stream `[N, out_channels, P, Q]`.
        """
        x = self._images(x) if self.first else x
        if blanked is not None:
            x = self._without_blanked(x, blanked)
        y = functional.li_conv(
            x,
            members(self.stream_weights),
            members(self.integration_from_streams),
            None if self.first else self.integrated_weight,
            stride=self.stride,
            padding=self.kernel_size // 2,
            integrated_only=integrated_only,
        )
        if self.stream_biases is None:
            return y
        if integrated_only:
            y = with_unused(y, self.stream_biases)
            return y + self.integrated_bias.to(y.dtype)[:, None, None]
        biases = torch.stack([*list(self.stream_biases), self.integrated_bias]).to(y.dtype)
        y = y + biases[:, None, :, None, None]
        return y if blanked is None else without(y, with_integrated(blanked))

    def _images(self, x):
        count = len(self.stream_channels)
        if not isinstance(x, (list, tuple)) or len(x) != count:
            got = len(x) if isinstance(x, (list, tuple)) else type(x).__name__
            raise ValueError(f"x: expected {count} images, one per stream, got {got}")
        for i, (image, channels) in enumerate(zip(x, self.stream_channels, strict=True)):
            if not isinstance(image, Tensor):
                raise TypeError(f"stream {i}: x: expected a tensor, got {type(image).__name__}")
            if image.dim() != 4 or image.shape[1] != channels:
                got = list(image.shape)
                raise ValueError(f"stream {i}: x: expected [N, {channels}, H, W], got {got}")
        return list(x)

    def _without_blanked(self, x, blanked):
        count = len(self.stream_channels)
        first = x[0] if self.first else x
        if not isinstance(first, Tensor) or first.dim() != 5 - self.first:
            got = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise ValueError(f"x: expected [{count + 1}, N, C, H, W], got {got}")
        check_blanked(blanked, count, first.shape[-4], first.device)
        if self.first:
            return [without(image, gone) for image, gone in zip(x, blanked, strict=True)]
        return without(x, with_integrated(blanked))

    def forward_stream(self, i: int, x: Tensor) -> Tensor:
        """Stream i alone: its convolution and its bias.

        x is `[N, C_i, H, W]`, the result `[N, out_channels, P, Q]`.

        Example:
            >>> import torch, fusewise
            >>> first = fusewise.nn.LIConv2d((3, 1), 16, kernel_size=7, stride=2, first=True)
            >>> first.forward_stream(1, torch.randn(4, 1, 16, 16)).shape
            torch.Size([4, 16, 8, 8])
        """
        check_stream(i, len(self.stream_channels))
        weight, channels = self.stream_weights[i], self.stream_channels[i]
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < 1:
            wanted = f"[N, {channels}, H, W] with H and W >= 1"
            raise ValueError(f"x: expected {wanted}, got {list(x.shape)}")
        if x.dtype != weight.dtype and autocast_dtype(x) is None:
            dtypes = [str(dtype).removeprefix("torch.") for dtype in (weight.dtype, x.dtype)]
            raise ValueError("x: expected dtype {}, got {}".format(*dtypes))
        bias = None if self.stream_biases is None else self.stream_biases[i]
        return F.conv2d(x, weight, bias, self.stride, self.kernel_size // 2)

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return (
            f"{self.stream_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, bias={self.stream_biases is not None}, first={self.first}"
        )


def members(parameters: nn.ParameterList) -> list[Tensor]:
    """The same as `list(parameters)`, which takes several times as long."""
    return [parameter(parameters, str(i)) for i in range(len(parameters))]


def with_unused(x: Tensor, parameters) -> Tensor:
    """x itself. The parameters get gradients of 0, so that DDP does not wait for them."""
    learned = [p for p in parameters if p.requires_grad]
    if not learned or not torch.is_grad_enabled() or needs_formula():
        return x
    return _WithUnused.apply(x, *learned)


class _WithUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *parameters):
        ctx.kinds = [(p.shape, {"dtype": p.dtype, "device": p.device}) for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(torch.zeros(shape, **kind) for shape, kind in ctx.kinds)


def check_stream(i: int, streams: int) -> None:
    """Raises unless i is the number of a stream."""
    whole("i", i, least=0)
    if i >= streams:
        raise ValueError(f"i: expected less than {streams}, got {i}")


def check_blanked(blanked: Tensor, streams: int, n: int, device: torch.device) -> None:
    """Raises unless `blanked` is a bool tensor `[S, N]` on the device of the images."""
    if not isinstance(blanked, Tensor):
        raise TypeError(f"blanked: expected a tensor or None, got {type(blanked).__name__}")
    if blanked.dtype != torch.bool:
        got = str(blanked.dtype).removeprefix("torch.")
        raise ValueError(f"blanked: expected dtype bool, got {got}")
    if tuple(blanked.shape) != (streams, n):
        raise ValueError(f"blanked: expected [{streams}, {n}], got {list(blanked.shape)}")
    if blanked.device != device:
        raise ValueError(f"blanked: expected a tensor on {device}, got one on {blanked.device}")


def with_integrated(blanked: Tensor) -> Tensor:
    """`[S + 1, N]`: no sample of the integrated stream is ever blanked."""
    return torch.cat([blanked, torch.zeros_like(blanked[:1])])


def for_all_streams(blanked: Tensor | None, x: Tensor, streams: int) -> Tensor | None:
    """`[S + 1, N]` from `[S, N]`, which is checked against x, `[S + 1, N, C, H, W]`."""
    padded = isinstance(blanked, Tensor) and blanked.shape[:1] == (streams + 1,)
    if blanked is None or padded:
        return blanked
    check_blanked(blanked, streams, x.shape[1], x.device)
    return with_integrated(blanked)


def without(x: Tensor, blanked: Tensor) -> Tensor:
    """x with 0 in the samples that are blanked, in x's layout."""
    return torch.where(blanked[..., None, None, None], x.new_zeros(()), x)


def _draw_bias(bias: Tensor, inputs: int) -> None:
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(bias, -bound, bound)
