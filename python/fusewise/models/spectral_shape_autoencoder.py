"""SpectralShapeAutoencoder: reconstructs frames of log-mel values and scores the reconstruction."""

from functools import partial
from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._ops import AUTOENCODER, AUTOENCODER_WEIGHTS, wide_dtype
from .._settings import TORCH, settings
from ..functional._transforms import is_jit_tracing, is_symbolic, refuse_script
from ..nn._checks import floating, whole
from ..nn._parts import (
    foreign,
    hooks_everywhere,
    make_weights,
    ordinary,
    parameter,
    run_torch,
    weight_and_bias,
)
from ._autoencoder import autoencoder

# The submodules that hold the parameters, in the operators' order. The basis is inserted fifth.
_PARTS = {
    "slice_encoder": (nn.LayerNorm, nn.Linear),
    "bottleneck_mlp": (nn.LayerNorm, nn.Linear),
    "slice_decoder": (nn.Linear,),
}
_KINDS = [kind for kinds in _PARTS.values() for kind in (nn.Sequential, *kinds)]
_HOLDERS = [i for i, kind in enumerate(_KINDS) if kind is not nn.Sequential]
_BASIS = 4
_NAMES = [
    f"{part}.{i}.{name}"
    for part, kinds in _PARTS.items()
    for i in range(len(kinds))
    for name in ("weight", "bias")
]
_NAMES.insert(_BASIS, "global_basis")


class SpectralShapeAutoencoder(nn.Module):
    """An autoencoder for machine sounds. Each output is one fused operator; so is its backward.

    A row of the input is `frames` frames of `n_mels` log-mel values. The encoder maps each frame
    separately. All encoded frames of a row are projected together on a basis B of `latent_dim`
    spectral shapes, each normalised to length one. A small layer transforms the coordinates, and
    the transposed basis maps them back:

        s_f = GELU(slice_encoder(x_f))
        z   = GELU(bottleneck_mlp(B s))
        y_f = slice_decoder((B^T z)_f)

    The submodules hold the parameters under the names of the state dict, and are normally not
    called. If one of them has hooks, was replaced by another kind of layer, or is a LayerNorm with
    another eps, the model calls them all and runs torch's own operators instead.

    Args:
        n_mels: log-mel values per frame.
        frames: frames per row.
        latent_dim: number of spectral shapes in the basis.
        slice_latent_dim: size of an encoded frame.

    Example:
        >>> import torch, fusewise
        >>> model = fusewise.models.SpectralShapeAutoencoder(n_mels=64, frames=5)
        >>> rows = torch.randn(8, 320)
        >>> model(rows).shape
        torch.Size([8, 320])
        >>> model.anomaly_score(rows).mean().backward()  # a training step
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
        """Initialises the parameters again: the layers as torch.nn does, the basis from N(0, 1)."""
        for part in (*self.slice_encoder, *self.bottleneck_mlp, *self.slice_decoder):
            part.reset_parameters()
        self._reset_basis()

    def _reset_basis(self) -> None:
        nn.init.normal_(self.global_basis)

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction of each row of x.

        x is `[B, frames * n_mels]` or `[B, frames, n_mels]`. The result has x's shape, memory
        layout and dtype; under autocast, autocast's dtype.
        """
        return self._run(x, "reconstruction")

    def encode(self, x: Tensor) -> Tensor:
        """The latent vector of each row, `[B, latent_dim]`. x as in `forward`.

        Example:
            >>> import torch, fusewise
            >>> model = fusewise.models.SpectralShapeAutoencoder(latent_dim=32)
            >>> model.encode(torch.randn(8, 5, 64)).shape
            torch.Size([8, 32])
        """
        return self._run(x, "latent")

    def anomaly_score(self, x: Tensor) -> Tensor:
        """The mean squared reconstruction error of each row, `[B]`; float32 if x is fp16 or bf16.

        The reconstruction itself is never written to memory. The mean of the scores is a training
        loss. x as in `forward`.

        Example:
            >>> import torch, fusewise
            >>> model, rows = fusewise.models.SpectralShapeAutoencoder(), torch.randn(8, 320)
            >>> scores = model.anomaly_score(rows)
            >>> torch.allclose(scores, (model(rows) - rows).square().mean(1), rtol=1e-4)
            True
        """
        return self._run(x, "score")

    def _run(self, x: Tensor, output: str) -> Tensor:
        if output != "reconstruction":
            make_weights(self)  # the module's own pre-hooks only run before forward
        if settings.autoencoder == TORCH:
            return run_torch("autoencoder", self, partial(self._with_torch, output=output), x)
        parts = self._parts()
        if why := self._foreign(parts) or hooks_everywhere():
            return run_torch("autoencoder", self, partial(self._with_torch, output=output), x, why)
        try:
            return autoencoder(x, *self._weights(parts), output=output)
        except RuntimeError as error:
            # Report the parameter under the name that it has in this module.
            for name, own in zip(AUTOENCODER_WEIGHTS, _NAMES, strict=True):
                if str(error).startswith(f"{name}:"):
                    raise RuntimeError(own + str(error)[len(name) :]) from None
            raise

    def _with_torch(self, x: Tensor, output: str) -> Tensor:
        if not is_symbolic(x) and not is_jit_tracing():
            AUTOENCODER.check_shape("x", x, F=self.frames, M=self.n_mels)
        rows = x.reshape(x.shape[0], self.frames, self.n_mels)
        slices = F.gelu(self.slice_encoder(rows))
        basis = F.normalize(self.global_basis, dim=1)
        z = F.gelu(self.bottleneck_mlp(F.linear(slices.flatten(1), basis)))
        if output == "latent":
            return z
        codes = (z @ basis).reshape(x.shape[0], self.frames, self.slice_latent_dim)
        y = self.slice_decoder(codes)
        if output == "score":
            dtype = wide_dtype(x)
            return (y.to(dtype) - rows.to(dtype)).square().mean((1, 2))
        return y.reshape(x.shape)

    def _parts(self) -> list[nn.Module]:
        """The three Sequentials, each followed by the layers in it."""
        modules = self._modules
        encoder = modules["slice_encoder"]
        bottleneck = modules["bottleneck_mlp"]
        decoder = modules["slice_decoder"]
        return [
            encoder,
            *encoder._modules.values(),
            bottleneck,
            *bottleneck._modules.values(),
            decoder,
            *decoder._modules.values(),
        ]

    def _foreign(self, parts: list[nn.Module]) -> str:
        """Why calling the parts would not compute what the operator computes, or ''."""
        if ordinary(parts, _KINDS):
            return ""
        containers = {name: self._modules[name] for name in _PARTS}
        why = foreign(containers, (nn.Sequential,) * len(_PARTS))
        for name, kinds in _PARTS.items():
            why = why or foreign(self._modules[name]._modules, kinds, f"{name}.")
        return why

    def _weights(self, parts: list[nn.Module]) -> list[Tensor]:
        """In the operators' order; recomputed if they are pruned or otherwise parametrised."""
        weights = []
        for i in _HOLDERS:
            weights += weight_and_bias(parts[i])
        weights.insert(_BASIS, parameter(self, "global_basis"))
        return weights

    def save_safetensors(
        self, path: str | PathLike, metadata: dict[str, str] | None = None
    ) -> None:
        """Writes the weights to a `.safetensors` file, with optional text metadata.

        `fusewise::Safetensors` reads the file in C++, `safetensors.torch.load_file` in Python.
        Needs the package safetensors.

        Raises:
            ImportError: If the package safetensors is missing.
            TypeError: If a submodule was replaced or has hooks, which the file cannot hold.

        Example:
            >>> import os, tempfile, fusewise
            >>> path = os.path.join(tempfile.mkdtemp(), "machine.safetensors")
            >>> model = fusewise.models.SpectralShapeAutoencoder()
            >>> model.save_safetensors(path, {"trained on": "pump 3"})
            >>> from safetensors.torch import load_file
            >>> load_file(path).keys() == model.state_dict().keys()
            True
        """
        try:
            from safetensors.torch import save
        except ImportError as error:
            message = "save_safetensors needs the package safetensors: pip install safetensors"
            raise ImportError(message) from error
        parts = self._parts()
        if why := self._foreign(parts):
            raise TypeError(f"save_safetensors writes only the weights, but {why}")
        make_weights(self)
        values = (weight.detach().contiguous() for weight in self._weights(parts))
        tensors = dict(zip(_NAMES, values, strict=True))
        content = save(tensors, {"model": type(self).__name__, **(metadata or {})})
        # Not save_file: it creates a file that only its owner may read.
        Path(path).write_bytes(content)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # Old checkpoints contain a separate decoder that no output ever depended on.
        state_dict.pop(prefix + "global_decoder.weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return (
            f"n_mels={self.n_mels}, frames={self.frames}, latent_dim={self.latent_dim}, "
            f"slice_latent_dim={self.slice_latent_dim}"
        )
