"""BatchNorm and an activation as a module."""

import torch
from torch import Tensor

from .. import functional
from .._ops import BATCH_NORM_ACT
from ..functional._synchronized import is_shared
from ..functional._transforms import refuse_script
from ._checks import floating, one_of, true_or_false, unhooked, whole
from ._others import norm_activation


class _ProcessGroup:
    """Holds a group, which torch can neither copy nor pickle."""

    def __init__(self, group=None):
        self.group = group

    def __deepcopy__(self, _):
        return self

    def __reduce__(self):
        return _ProcessGroup, ()


class SharedNorm(torch.nn.Module):
    """A norm of ours: the processes of `process_group` can share its statistics."""

    @property
    def process_group(self):
        """The `torch.distributed` group that shares the statistics of a training step, or None.

        Example:
            >>> import fusewise
            >>> fusewise.nn.BatchNormAct2d(64).process_group is None
            True
        """
        return self._process_group.group

    @process_group.setter
    def process_group(self, group) -> None:
        is_shared(group)
        self._process_group = _ProcessGroup(group)


class BatchNormAct2d(SharedNorm):
    """BatchNorm over `[N, C, H, W]`, an optional residual and an activation, fused in forward and
    backward.

    Computes `act(batch_norm(x) + residual)`. Parameters, buffers, state dict and the meaning of the
    arguments are those of `torch.nn.BatchNorm2d`. It is not a subclass of it: tools that replace or
    skip BatchNorms would lose the activation. `fusewise.nn.convert_sync_batchnorm` and
    `fusewise.nn.update_bn` know both kinds.

    Args:
        num_features: C.
        activation: "identity", "relu", "relu6", "silu" or "hardswish".
        eps: added to the variance.
        momentum: weight of a batch's statistics in the running ones; None averages all batches.
        affine: whether there are a weight and a bias.
        track_running_stats: without running statistics, those of the batch are used in eval mode
            too.
        process_group: a `torch.distributed` group whose processes share the statistics of a
            training step, as with `torch.nn.SyncBatchNorm`; None: no other process takes part.
            Copies of the module keep it, pickled ones do not.
        max_pool: whether a max-pool of 3x3 values with stride 2 and padding 1 follows, as at the
            start of a ResNet; then there is no residual.

    Example:
        >>> import torch, fusewise
        >>> norm = fusewise.nn.BatchNormAct2d(64, activation="relu")
        >>> x = torch.randn(8, 64, 14, 14).to(memory_format=torch.channels_last)
        >>> norm(x, residual=x).shape
        torch.Size([8, 64, 14, 14])
        >>> norm.num_batches_tracked
        tensor(1)
    """

    _version = 2  # as that of BatchNorm2d: checkpoints of version 1 have no num_batches_tracked

    def __init__(
        self,
        num_features: int,
        activation: str = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group=None,
        max_pool: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        whole("num_features", num_features)
        one_of("activation", activation, BATCH_NORM_ACT.choices["activation"])
        true_or_false("affine", affine)
        true_or_false("track_running_stats", track_running_stats)
        true_or_false("max_pool", max_pool)
        floating(dtype)
        self.num_features = num_features
        self.activation = activation
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.process_group = process_group
        self.max_pool = max_pool
        kind = {"device": device, "dtype": dtype}

        def parameter():
            return torch.nn.Parameter(torch.empty(num_features, **kind)) if affine else None

        def buffer(new):
            return new if track_running_stats else None

        self.register_parameter("weight", parameter())
        self.register_parameter("bias", parameter())
        self.register_buffer("running_mean", buffer(torch.zeros(num_features, **kind)))
        self.register_buffer("running_var", buffer(torch.ones(num_features, **kind)))
        tracked = torch.tensor(0, dtype=torch.int64, device=device)
        self.register_buffer("num_batches_tracked", buffer(tracked))
        self.reset_parameters()

    @classmethod
    def from_batch_norm(
        cls, norm: torch.nn.BatchNorm2d, activation: str = "relu", max_pool: bool = False
    ) -> "BatchNormAct2d":
        """Makes a BatchNormAct2d that shares the parameters and buffers of a `BatchNorm2d`, and
        starts in the same mode (train or eval).

        Raises:
            TypeError: If `norm` is of another class, subclasses included.
            ValueError: If it has hooks.

        Example:
            >>> import torch, fusewise
            >>> theirs = torch.nn.BatchNorm2d(64).eval()
            >>> ours = fusewise.nn.BatchNormAct2d.from_batch_norm(theirs, "silu")
            >>> ours.weight is theirs.weight, ours.training
            (True, False)
        """
        if type(norm) is not torch.nn.BatchNorm2d:
            kind = f"{type(norm).__module__}.{type(norm).__qualname__}"
            raise TypeError(f"norm: expected torch.nn.BatchNorm2d, got {kind}")
        unhooked("norm", norm)
        made = cls(*_arguments(norm, activation), max_pool=max_pool, device="meta")
        _share(norm, made)
        return made

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> "BatchNormAct2d":
        """The same for timm's `BatchNormAct2d`, which has its own activation.

        Raises:
            TypeError, ValueError: Naming the part, if the fused operator would compute something
                else: another activation, a drop layer, hooks.

        Example:
            >>> import timm, torch, fusewise
            >>> theirs = timm.layers.BatchNormAct2d(64, act_layer=torch.nn.SiLU)
            >>> fusewise.nn.BatchNormAct2d.from_module(theirs).activation
            'silu'
        """
        made = cls(*_arguments(module, norm_activation(module)), device="meta")
        _share(module, made)
        return made

    def to_batch_norm(self) -> torch.nn.BatchNorm2d:
        """Makes a `torch.nn.BatchNorm2d` that shares the parameters and buffers. It lacks the
        activation and the max-pool, which belong behind it.

        Example:
            >>> import fusewise
            >>> fusewise.nn.BatchNormAct2d(64, activation="silu").to_batch_norm()
            BatchNorm2d(64, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
        """
        number, _, *others = _arguments(self, self.activation)
        made = torch.nn.BatchNorm2d(number, *others, device="meta")
        _share(self, made)
        return made

    def reset_running_stats(self) -> None:
        """Sets the running statistics to mean 0 and variance 1, and the counter to 0."""
        if self.track_running_stats:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Resets the running statistics, and sets the weight to 1 and the bias to 0."""
        self.reset_running_stats()
        if self.affine:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """
        Args:
            x: `[N, C, H, W]`, any strides; channels_last is the fastest layout. dtypes as in
                `functional.batch_norm_act`.
            residual: x's shape and dtype, or None.

        Returns:
            A tensor like x; with `max_pool` `[N, C, ceil(H / 2), ceil(W / 2)]`.
        """
        # torch.nn.BatchNorm2d uses the running statistics it has in eval mode only.
        mean, var, tracked = self.running_mean, self.running_var, None
        training = self.training or mean is None
        if self.training and self.track_running_stats:
            tracked = self.num_batches_tracked
        elif training:
            mean = var = None
        try:
            return functional.batch_norm_act(
                x,
                mean,
                var,
                self.weight,
                self.bias,
                residual,
                activation=self.activation,
                training=training,
                momentum=self.momentum,
                eps=self.eps,
                num_batches_tracked=tracked,
                max_pool=self.max_pool,
                process_group=self.process_group if self.training else None,
            )
        except RuntimeError as error:
            # The function reports running_mean, but a module's own is right.
            if not x.is_nested and x.dim() == 4 and x.shape[1] != self.num_features:
                message = f"x: expected {self.num_features} channels, got {x.shape[1]}"
                raise RuntimeError(message) from error
            raise

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        name = prefix + "num_batches_tracked"
        old = local_metadata.get("version") is None or local_metadata["version"] < 2
        if old and self.track_running_stats and name not in state_dict:
            counter = self.num_batches_tracked
            known = counter is not None and counter.device.type != "meta"
            state_dict[name] = counter if known else torch.tensor(0, dtype=torch.int64)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, activation={self.activation!r}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}" + ", max_pool=True" * self.max_pool
        )


def _arguments(norm, activation):
    affine = norm.weight is not None
    tracks = norm.track_running_stats
    return norm.num_features, activation, norm.eps, norm.momentum, affine, tracks


def _share(source: torch.nn.Module, target: torch.nn.Module) -> None:
    for name in ("weight", "bias"):
        target.register_parameter(name, getattr(source, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        target.register_buffer(name, getattr(source, name))
    target.training = source.training
