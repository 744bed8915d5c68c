"""The losses and their gradients are those of their formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outrider.train.errors import TrainError  # noqa: E402
from outrider.train.losses import distance, parse_mix  # noqa: E402


@pytest.mark.parametrize("text", ["kl", "tv", "ce", "0.3*kl+0.7*tv", "0.9*tv+0.1*ce+kl"])
def test_loss_and_gradient_equal_autograd(text: str) -> None:
    """Value (up to p's entropy) and gradient equal those that torch derives from the plain formulas, to 1e-6."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64).float().requires_grad_()
    p = torch.softmax(2 * torch.randn(5, 11, generator=generator), -1)
    token = torch.tensor([0, 3, 3, 10, 7])
    weights = torch.rand(5, generator=generator)
    mix = parse_mix(text)
    q = torch.softmax(logits, -1)
    plain = sum(
        weight
        * {
            "kl": -(p * q.log()).sum(-1),
            "tv": 0.5 * (p - q).abs().sum(-1),
            "ce": -q.log()[torch.arange(5), token],
        }[name]
        for name, weight in mix.items()
    )
    (wanted,) = torch.autograd.grad((plain * weights).sum(), logits, retain_graph=True)
    found = distance(mix, logits, p, token)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("text", ["", "l2", "kl+kl", "-1*kl", "x*kl", "0*tv"])
def test_an_unknown_loss_is_refused(text: str) -> None:
    """A misspelt loss is named, and never trained with."""
    with pytest.raises(TrainError, match="loss"):
        parse_mix(text)
