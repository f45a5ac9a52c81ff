"""LINet's BatchNorm as a module: the statistics of several streams in one call."""

import torch
from torch import Tensor, nn

from .. import functional
from .._ops import BATCH_NORM_ACT
from ..functional._transforms import direct_apply, is_symbolic, needs_formula, refuse_script
from ._checks import floating, one_of, true_or_false, whole
from .batch_norm import SharedNorm
from .li_conv import check_stream, for_all_streams, members, with_unused

_STATISTICS = ("running_mean", "running_var")


class LIBatchNorm2d(SharedNorm):
    """BatchNorm of S streams and the integrated one, an optional residual and an activation.

    Every stream has statistics and parameters of its own. One call serves all of them. x is
    `[S + 1, N, C, H, W]`, the integrated stream behind the others.

    The state dict has the running statistics by stream: `stream{i}_running_mean`,
    `stream{i}_running_var`, `integrated_running_mean`, `integrated_running_var`. In memory they are
    packed, in the buffers `running_mean` and `running_var`, `[S + 1, C]`, and `updates`, `[S + 1]`.

    Args:
        num_features: C.
        num_streams: S.
        activation: "identity", "relu", "relu6", "silu" or "hardswish".
        eps: added to the variance.
        momentum: weight of a batch's statistics in the running ones; None averages all steps in
            which a stream had at least two values.
        max_pool: whether a max-pool of 3x3 values with stride 2 and padding 1 follows; then there
            is no residual.
        process_group: as in `BatchNormAct2d`.

    Example:
        >>> import torch, fusewise
        >>> norm = fusewise.nn.LIBatchNorm2d(16, num_streams=2)
        >>> x = torch.randn(3, 4, 16, 8, 8)
        >>> blanked = torch.tensor([[False] * 4, [True] * 4])  # nothing has depth
        >>> norm(x, blanked=blanked).shape
        torch.Size([3, 4, 16, 8, 8])
        >>> norm.num_batches_tracked, norm.stream_updates
        (tensor(1), tensor([1, 0]))
    """

    track_running_stats = True

    def __init__(
        self,
        num_features: int,
        num_streams: int,
        activation: str = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        max_pool: bool = False,
        process_group=None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        whole("num_features", num_features)
        whole("num_streams", num_streams)
        one_of("activation", activation, BATCH_NORM_ACT.choices["activation"])
        true_or_false("max_pool", max_pool)
        floating(dtype)
        self.num_features, self.num_streams = num_features, num_streams
        self.activation, self.eps, self.momentum = activation, eps, momentum
        self.max_pool, self.process_group = max_pool, process_group
        kind = {"device": device, "dtype": dtype}

        def parameter(_=None):
            return nn.Parameter(torch.empty(num_features, **kind))

        self.stream_weights = nn.ParameterList(map(parameter, range(num_streams)))
        self.stream_biases = nn.ParameterList(map(parameter, range(num_streams)))
        self.integrated_weight = parameter()
        self.integrated_bias = parameter()
        packed = (num_streams + 1, num_features)
        self.register_buffer("running_mean", torch.zeros(packed, **kind), persistent=False)
        self.register_buffer("running_var", torch.ones(packed, **kind), persistent=False)
        updates = torch.zeros(num_streams + 1, dtype=torch.int64, device=device)
        self.register_buffer("updates", updates, persistent=False)
        self.reset_parameters()

    @property
    def num_batches_tracked(self) -> Tensor:
        """The number of training steps, a view of `updates`."""
        return self.updates[-1]

    @property
    def stream_updates(self) -> Tensor:
        """`[S]`: for each stream the number of steps that updated its statistics."""
        return self.updates[:-1]

    def reset_running_stats(self) -> None:
        """Sets the running statistics to mean 0 and variance 1, and the counters to 0."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.updates.zero_()

    def reset_parameters(self) -> None:
        """Resets the running statistics, and sets the weights to 1 and the biases to 0."""
        self.reset_running_stats()
        for weight in (*self.stream_weights, self.integrated_weight):
            nn.init.ones_(weight)
        for bias in (*self.stream_biases, self.integrated_bias):
            nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        blanked: Tensor | None = None,
        integrated_only: bool = False,
    ) -> Tensor:
        """
        Args:
            x: `[S + 1, N, C, H, W]`; with `integrated_only` `[N, C, H, W]`.
            residual: x's shape, or None.
            blanked: bool `[S, N]`, or None. True where a sample of a stream is absent: it does not
                count, and its result and gradients are 0. Or the same with a last row of False for
                the integrated stream, `[S + 1, N]`, which saves a copy in each call. That this row
                is False is not checked.
            integrated_only: whether x is the integrated stream alone. The parameters of the streams
                then get gradients of 0, and their statistics stay.
        """
        self._check(x, 4 if integrated_only else 5)
        if integrated_only:
            x = with_unused(x, [*list(self.stream_weights), *list(self.stream_biases)])
            parameters = self.integrated_weight, self.integrated_bias
            return self._norm(x, -1, parameters, residual, self.num_batches_tracked)
        blanked = for_all_streams(blanked, x, self.num_streams)
        weight, bias = _packed(
            [*members(self.stream_weights), self.integrated_weight],
            [*members(self.stream_biases), self.integrated_bias],
        )
        y = self._norm(x, slice(None), (weight, bias), residual, self.updates, blanked)
        if self.training and x.shape[1] == 0:  # no stream was updated, but it was a step
            self.num_batches_tracked.add_(1)
        return y

    def forward_stream(self, i: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Stream i alone, `[N, C, H, W]`. Training updates its statistics and not
        `num_batches_tracked`.

        Example:
            >>> import torch, fusewise
            >>> norm = fusewise.nn.LIBatchNorm2d(16, num_streams=2)
            >>> norm.forward_stream(1, torch.randn(4, 16, 8, 8)).shape
            torch.Size([4, 16, 8, 8])
            >>> norm.stream_updates
            tensor([0, 1])
        """
        check_stream(i, self.num_streams)
        self._check(x, 4)
        counter = self.updates[i]
        if x.shape[0] == 0:  # a call, but not an update
            counter = counter.clone()
        parameters = self.stream_weights[i], self.stream_biases[i]
        return self._norm(x, i, parameters, residual, counter)

    def _check(self, x, dimensions):
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        c, streams = self.num_features, self.num_streams + 1
        right = x.dim() == dimensions and x.shape[-3] == c
        if not right or (dimensions == 5 and x.shape[0] != streams):
            wanted = f"[N, {c}, H, W]" if dimensions == 4 else f"[{streams}, N, {c}, H, W]"
            raise ValueError(f"x: expected {wanted}, got {list(x.shape)}")

    def _norm(self, x, streams, parameters, residual, counter, blanked=None):
        """With the statistics of one stream or of all."""
        return functional.batch_norm_act(
            x,
            self.running_mean[streams],
            self.running_var[streams],
            *parameters,
            residual,
            activation=self.activation,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
            num_batches_tracked=counter if self.training else None,
            blanked=blanked,
            max_pool=self.max_pool,
            process_group=self.process_group if self.training else None,
        )

    def _names(self):
        return [*(f"stream{i}" for i in range(self.num_streams)), "integrated"]

    def _named_statistics(self):
        """The entries of the state dict, as views."""
        for i, stream in enumerate(self._names()):
            for name in _STATISTICS:
                yield f"{stream}_{name}", getattr(self, name)[i]
        yield "num_batches_tracked", self.num_batches_tracked
        yield "stream_updates", self.stream_updates

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, t in self._named_statistics():
            destination[prefix + name] = t

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
    ):
        given = {}
        for name, view in self._named_statistics():
            found = state_dict.pop(prefix + name, None)
            if found is None and name == "stream_updates":  # an old checkpoint
                found = given.get("num_batches_tracked")
                found = None if found is None else found.expand(self.num_streams)
            if found is None:
                if strict:
                    missing_keys.append(prefix + name)
                found = view
            elif found.shape != view.shape:
                errors.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {found.shape} "
                    f"from checkpoint, the shape in current model is {view.shape}."
                )
                found = view
            given[name] = found
        if local_metadata.get("assign_to_params_buffers", False):
            self._assign(given)
        else:
            with torch.no_grad():
                for name, view in self._named_statistics():
                    view.copy_(given[name])
        rest = (strict, missing_keys, unexpected_keys, errors)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _assign(self, given):
        """New buffers with these values, for a model whose own are on the meta device. What a
        partial checkpoint lacks is reset."""
        devices = [t.device for t in given.values() if t.device.type != "meta"]

        def real(t, value):
            known = t.device.type != "meta" or not devices
            return t if known else torch.full_like(t, value, device=devices[0])

        for name, value in zip(_STATISTICS, (0, 1), strict=True):
            packed = [real(given[f"{stream}_{name}"], value) for stream in self._names()]
            setattr(self, name, torch.stack(packed))
        counters = real(given["stream_updates"], 0), real(given["num_batches_tracked"], 0)
        self.updates = torch.cat([counter.reshape(-1) for counter in counters])

    def __getattr__(self, name: str):
        """The statistics of a stream by their names in the state dict, as views: some tools look
        up every entry of the state dict as an attribute."""
        stream, _, kind = name.partition("_")
        if kind in _STATISTICS and stream in (names := self._names()):
            return super().__getattr__(kind)[names.index(stream)]
        return super().__getattr__(name)

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, num_streams={self.num_streams}, activation={self.activation!r}, "
            f"eps={self.eps}, momentum={self.momentum}" + ", max_pool=True" * self.max_pool
        )


def _packed(weights, biases) -> tuple[Tensor, Tensor]:
    """Two stacks in one launch."""
    if torch.compiler.is_compiling() or needs_formula() or is_symbolic(weights[0]):
        return torch.stack(weights), torch.stack(biases)
    return _pack(*weights, *biases)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        both = torch.stack(tensors)
        half = len(tensors) // 2
        return both[:half], both[half:]

    @staticmethod
    def backward(ctx, dweight, dbias):
        return *dweight.unbind(), *dbias.unbind()


_pack = direct_apply(_Packed)
