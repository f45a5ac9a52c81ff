"""SpectralShapeAutoencoder: reconstructs frames of log-mel values, and scores how well."""

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from .._ops import AUTOENCODER_WEIGHTS
from ..nn._checks import floating, whole
from ..nn._parts import computes_as, parameter, weight_and_bias
from ._autoencoder import autoencoder

# What holds the parameters, in the operators' order but for the basis, which comes in fifth.
_PARTS = {
    "slice_encoder": (nn.LayerNorm, nn.Linear),
    "bottleneck_mlp": (nn.LayerNorm, nn.Linear),
    "slice_decoder": (nn.Linear,),
}
_BASIS = 4
_NAMES = [
    f"{part}.{i}.{name}"
    for part, kinds in _PARTS.items()
    for i in range(len(kinds))
    for name in ("weight", "bias")
]
_NAMES.insert(_BASIS, "global_basis")


class SpectralShapeAutoencoder(nn.Module):
    """An autoencoder for machine sounds, every output as one fused operator each way.

    A row is `frames` frames of `n_mels` log-mel values. Every frame is encoded by itself, the
    frames together are projected on a basis of `latent_dim` spectral shapes of length one, a small
    layer works on the coordinates, and the same basis leads back:

        s_f = GELU(slice_encoder(x_f))
        z   = GELU(bottleneck_mlp(B s))
        y_f = slice_decoder((B^T z)_f)

    The submodules hold the parameters, under the names of the state dict, and are not called: what
    is changed in them but the parameters, such as a LayerNorm's eps, changes nothing.

    Args:
        n_mels: values of a frame.
        frames: frames of a row.
        latent_dim: number of spectral shapes.
        slice_latent_dim: values that a frame is encoded in.
    """

    def __init__(
        self,
        n_mels: int = 64,
        frames: int = 5,
        latent_dim: int = 32,
        slice_latent_dim: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {
            "n_mels": n_mels,
            "frames": frames,
            "latent_dim": latent_dim,
            "slice_latent_dim": slice_latent_dim,
        }
        for name, value in sizes.items():
            whole(name, value)
        floating(dtype)
        self.n_mels, self.frames = n_mels, frames
        self.latent_dim, self.slice_latent_dim = latent_dim, slice_latent_dim
        where = {"device": device, "dtype": dtype}
        self.slice_encoder = nn.Sequential(
            nn.LayerNorm(n_mels, **where), nn.Linear(n_mels, slice_latent_dim, **where)
        )
        self.global_basis = nn.Parameter(
            torch.empty(latent_dim, frames * slice_latent_dim, **where)
        )
        self.bottleneck_mlp = nn.Sequential(
            nn.LayerNorm(latent_dim, **where), nn.Linear(latent_dim, latent_dim, **where)
        )
        self.slice_decoder = nn.Sequential(nn.Linear(slice_latent_dim, n_mels, **where))
        self._reset_basis()

    def reset_parameters(self) -> None:
        """Draws the parameters anew: as torch.nn's own modules do, the basis from N(0, 1)."""
        for part in (*self.slice_encoder, *self.bottleneck_mlp, *self.slice_decoder):
            part.reset_parameters()
        self._reset_basis()

    def _reset_basis(self) -> None:
        nn.init.normal_(self.global_basis)

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction of every row of x, `[B, frames * n_mels]` or `[B, frames, n_mels]`;
        x's shape, dtype (autocast's, where that is on) and layout."""
        return self._run(x, "reconstruction")

    def encode(self, x: Tensor) -> Tensor:
        """The latent of every row, `[B, latent_dim]`."""
        return self._run(x, "latent")

    def anomaly_score(self, x: Tensor) -> Tensor:
        """The mean squared error of every row's reconstruction, `[B]`; float32 for half data.

        The reconstruction itself is never written. A training loss is its mean.
        """
        return self._run(x, "score")

    def _run(self, x: Tensor, output: str) -> Tensor:
        try:
            return autoencoder(x, *self._weights(), output=output)
        except RuntimeError as error:
            # By the name that the parameter has here.
            for name, own in zip(AUTOENCODER_WEIGHTS, _NAMES, strict=True):
                if str(error).startswith(f"{name}:"):
                    raise RuntimeError(own + str(error)[len(name) :]) from None
            raise

    def _weights(self) -> list[Tensor]:
        """In the operators' order; made anew where they are pruned or otherwise parametrised."""
        weights = []
        modules = self._modules
        for name, kinds in _PARTS.items():
            parts = modules[name]._modules.values()
            if len(parts) != len(kinds) or not all(map(computes_as, parts, kinds)):
                expected = ", ".join(kind.__name__ for kind in kinds)
                found = ", ".join(type(part).__name__ for part in parts)
                raise TypeError(
                    f"{name}: expected {expected} of torch.nn, got {found}: their forward would "
                    "not be called"
                )
            for part in parts:
                weights += weight_and_bias(part)
        weights.insert(_BASIS, parameter(self, "global_basis"))
        return weights

    def save_safetensors(
        self, path: str | PathLike, metadata: dict[str, str] | None = None
    ) -> None:
        """Writes the weights, and texts beside them, as a `.safetensors` file, which
        `fusewise::Safetensors` reads in C++ and `safetensors.torch.load_file` here. Needs the
        package safetensors."""
        try:
            from safetensors.torch import save
        except ImportError as error:
            message = "save_safetensors needs the package safetensors: pip install safetensors"
            raise ImportError(message) from error
        values = (weight.detach().contiguous() for weight in self._weights())
        tensors = dict(zip(_NAMES, values, strict=True))
        content = save(tensors, {"model": type(self).__name__, **(metadata or {})})
        # Not save_file, whose file nobody else may read.
        Path(path).write_bytes(content)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # Checkpoints of old have a decoder of their own that no output ever depended on.
        state_dict.pop(prefix + "global_decoder.weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"n_mels={self.n_mels}, frames={self.frames}, latent_dim={self.latent_dim}, "
            f"slice_latent_dim={self.slice_latent_dim}"
        )
