"""Where rounding decides a gradient.

At relu's kink a value of 1e-9 and one of -1e-9 have different gradients, and rounding makes one of
the other. Such elements say nothing about right and wrong. `Kinks` finds the elements of an output
that depend on one; their cotangent is then set to 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Where the derivative jumps, by the name of torch's function.
_KINKS = {
    "relu": (0.0,),
    "relu_": (0.0,),
    "relu6": (0.0, 6.0),
    "hardtanh": (0.0, 6.0),
    "hardtanh_": (0.0, 6.0),
    "hardswish": (-3.0, 3.0),
    "hardsigmoid": (-3.0, 3.0),
}
_ULPS = 32  # rounding errors that add up in front of a kink


class Kinks(TorchFunctionMode):
    """Collects, while a reference runs, the elements that lie at a kink or at a pooling's tie.

    `dtype` is the one that the modules under test compute in.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._eps = torch.finfo(torch.float32).eps  # of the sums; the check shifts by as much
        self._rounding = max(self._eps, torch.finfo(dtype).eps)
        self._masks: list[Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        with torch.no_grad():
            if name in _KINKS:
                self._look(args[0], _KINKS[name])
            elif name in ("max_pool2d", "boolean_dispatch") and args and args[0].dim() == 4:
                self._pool(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _look(self, v: Tensor, kinks: tuple[float, ...]) -> None:
        largest = v.abs().nan_to_num(posinf=0.0).max() if v.numel() else 0.0
        for kink in kinks:
            # A kink elsewhere than at 0 is met by values that were rounded to the dtype before.
            near = _ULPS * (self._eps * largest + self._rounding * abs(kink) / 8)
            self._masks.append((v - kink).abs() <= near)

    def _pool(
        self,
        v: Tensor,
        kernel_size,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    ) -> None:
        if ceil_mode:  # `unfold` has no such windows
            return
        window = {"kernel_size": kernel_size, "stride": stride or kernel_size, "dilation": dilation}
        rows, columns = (padding, padding) if isinstance(padding, int) else padding
        # `unfold` pads with 0, which could win.
        padded = F.pad(v, [columns, columns, rows, rows], value=-torch.finfo(v.dtype).max)
        values = F.unfold(padded, **window).unflatten(1, (v.shape[1], -1))
        if values.shape[2] == 1:
            return

        def pool(t: Tensor) -> Tensor:
            return F.max_pool2d(t, padding=padding, **window)

        self._masks = [
            pool(mask.to(v.dtype)).bool() if mask.shape == v.shape else mask for mask in self._masks
        ]
        first, second = values.topk(2, dim=2).values.unbind(2)
        tie = (first - second).abs() <= self._rounding * first.abs()
        self._masks.append(tie.view(pool(v).shape))

    def at(self, output: Tensor) -> Tensor:
        """The elements of an output that depend on a kink."""
        found = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
        for mask in self._masks:
            if mask.dim() == output.dim():
                for dim, (size, wanted) in enumerate(zip(mask.shape, output.shape, strict=True)):
                    if size != wanted:
                        mask = mask.any(dim, keepdim=True)
                found = found | mask
            elif mask.any():
                found = torch.ones_like(found)
        return found
