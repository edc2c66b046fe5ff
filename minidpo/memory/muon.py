"""Muon: a matrix moves along its momentum with all singular values made alike, so that no direction waits."""

import torch
from torch import Tensor

# Numbers of one shape that are moved together. A step of SmolLM2's 420 maps takes 1,912 operations so, one by
# one 20,580 (counted without views), each of which a GPU would have to start. More takes more memory.
STACK = 2**22


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U Vᵀ of each matrix = U S Vᵀ, (...,m,n), whatever its scale: five quintic Newton-Schulz steps
    bring what is above 0.01 of its norm to within 0.65 and 1.25; 0 stays 0. Jordan et al. 2024, Muon,
    kellerjordan.github.io. Differs from their code: in the matrix's own dtype, not in bfloat16.
    """
    x = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.mT if (tall := x.shape[-2] > x.shape[-1]) else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov's momentum of 0.95, orthogonalised; one number a weight is kept. Matrices move as far as by
    AdamW at the same rate, 0.2 a weight (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for p in (p for p in group["params"] if p.grad is not None):
                alike.setdefault(p.shape, []).append(p)
            for shape, several in alike.items():
                together = max(1, STACK // shape.numel())
                for first in range(0, len(several), together):
                    self._move(
                        several[first : first + together], group["lr"], group["weight_decay"]
                    )

    def _move(self, several: list[Tensor], lr: float, weight_decay: float) -> None:
        """Move matrices of one shape."""
        ahead = []
        for p in several:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            ahead.append(p.grad.lerp(momentum, 0.95))
        updates = orthogonalise(torch.stack(ahead)) * 0.2 * max(ahead[0].shape) ** 0.5
        for p, update in zip(several, updates):
            p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
