"""Corrected updates against their formulas, and how large a step they stand."""

from __future__ import annotations

import pytest
import torch

from megatron_2bw.runtime.corrections import Correction, MomentLead, UpdateLead

DECAY, LEAD = 0.95, 2.0
SHARE = LEAD * (1 - DECAY) / DECAY


def test_adam_with_a_lead() -> None:
    """Its m, corrected for its start, gets the share of g that takes it ahead; what is kept stays m."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(DECAY, 0.99), weight_decay=0.1)
    MomentLead(LEAD).attach(optimizer)
    expected, m, v = weight.detach().clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for step in range(1, 21):
        weight.grad = g = torch.randn(5, dtype=torch.float64)
        optimizer.step()
        m, v = DECAY * m + (1 - DECAY) * g, 0.99 * v + 0.01 * g**2
        average = m / (1 - DECAY**step)
        ahead = average + SHARE * (g - average)
        expected -= 0.1 * (0.1 * expected + ahead / ((v / (1 - 0.99**step)).sqrt() + 1e-8))
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], m, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("correction", [MomentLead, UpdateLead])
def test_one_step_less_where_nothing_is_delayed(correction: type[Correction]) -> None:
    long, short = correction(2.0), correction(0.5)
    assert (long.steps_ahead, short.steps_ahead) == (2.0, 0.5)
    long.delayed = short.delayed = False
    assert (long.steps_ahead, short.steps_ahead) == (1.0, 0.0)


def test_sgd_with_a_lead() -> None:
    """Its buffer is 1/(1-decay) times an average; the first step has no trend to follow."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=DECAY)
    MomentLead(LEAD).attach(optimizer)
    expected, before = weight.detach().clone(), torch.zeros(5).double()
    for step in range(20):
        weight.grad = g = torch.randn(5, dtype=torch.float64)
        optimizer.step()
        buffer = DECAY * before + g
        expected -= 0.1 * (buffer + LEAD * (buffer - before) if step else buffer)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], buffer, rtol=1e-12, atol=1e-12)
        before = buffer


def test_muon_with_a_lead() -> None:
    """With an orthogonalization that changes nothing: Nesterov momentum on the corrected average."""
    from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(2, 3))
    optimizer = OrthogonalizedOptimizer(
        [weight],
        0.1,
        DECAY,
        0.0,
        nesterov=True,
        weight_decay_method="decoupled",
        fp32_matmul_prec="high",
        scaled_orthogonalize_fn=torch.nn.Identity(),
    )
    MomentLead(LEAD).attach(optimizer)
    expected, m = weight.detach().clone(), torch.zeros(2, 3)
    for step in range(20):
        weight.grad = g = torch.randn(2, 3)
        optimizer.step()
        m = DECAY * m + (1 - DECAY) * g
        ahead = m + SHARE * (g - m) if step else m  # The first step has no trend to follow.
        expected -= 0.1 * ((1 - DECAY) * g + DECAY * ahead)
        torch.testing.assert_close(weight.detach(), expected)
        torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], m)


def test_weights_ahead_of_updates() -> None:
    """From update to update they change by ``d(t) + c*(d(t) - d(t-1))``; a skipped one leaves no trace."""
    torch.manual_seed(0)
    y = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    alone = torch.nn.Parameter(y.detach().clone())
    optimizer, same = (torch.optim.AdamW([weight], lr=0.1, betas=(DECAY, 0.99)) for weight in (y, alone))
    correction = UpdateLead(LEAD)
    correction.attach(optimizer)
    x, d_before = y.detach().clone(), torch.zeros(5).double()
    for _ in range(20):
        y.grad = alone.grad = torch.randn(5, dtype=torch.float64)
        before = y.detach().clone()
        optimizer.step()
        same.step()
        d = y.detach() - before
        x, d_before = x + d + LEAD * (d - d_before), d
        with correction.shown(optimizer):
            torch.testing.assert_close(y.detach(), x, rtol=1e-12, atol=1e-12)
        assert y.equal(alone)
    with correction.shown(optimizer):
        assert y.equal(alone)


def test_what_is_no_adam_sgd_or_muon_has_no_lead_of_the_moment() -> None:
    lion = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(1))], momentum=0.9)
    lion.param_groups[0]["betas"] = (0.9, 0.99)
    del lion.param_groups[0]["eps"]
    soap = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    soap.param_groups[0]["shampoo_beta"] = 0.95
    for optimizer in (lion, soap):
        with pytest.raises(ValueError, match="lead of the whole update"):
            MomentLead(LEAD).check(optimizer)


def test_parameters_without_a_gradient_or_with_fewer_steps() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    alone = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    both, one = torch.optim.Adam(weights, lr=0.1), torch.optim.Adam([alone], lr=0.1)
    for optimizer in (both, one):
        MomentLead(LEAD).attach(optimizer)
    for step in range(6):
        weights[0].grad = torch.full((2,), 1.0 + step, dtype=torch.float64)
        weights[1].grad = torch.ones(2, dtype=torch.float64) if step >= 2 else None
        both.step()
        if step >= 2:
            alone.grad = torch.ones(2, dtype=torch.float64)
            one.step()
    assert torch.equal(weights[1], alone)


@pytest.mark.parametrize(("decay", "lead", "largest"), [(0.9, 2.0, 2.9), (0.95, 2.0, 5.4), (0.98, 2.0, 13.0)])
def test_the_largest_stable_step(decay: float, lead: float, largest: float) -> None:
    """Of ``x' = x - lr * u``, u from gradients h*x of one step before: what the docstring says, times lr*h."""
    assert abs(_after_many_steps(decay, lead, 0.95 * largest)) < 1e-3
    assert abs(_after_many_steps(decay, lead, 1.05 * largest)) > 1e3
    assert abs(_after_many_steps(decay, 0.0, 1.2)) > 1e3, "without a lead, 1 is the limit"


@pytest.mark.parametrize(
    ("decay", "lead", "delayed", "largest"),
    [(0.9, 0.0, 0.5, 2.0), (0.9, 0.0, 0.25, 4.0), (0.95, 0.0, 0.5, 2.0), (0.9, 2.0, 0.5, 6.2), (0.9, 2.0, 0.25, 12.9)],
)
def test_the_largest_stable_step_where_a_share_is_delayed(
    decay: float, lead: float, delayed: float, largest: float
) -> None:
    assert abs(_after_many_steps(decay, lead, 0.95 * largest, delayed)) < 1e-3
    assert abs(_after_many_steps(decay, lead, 1.05 * largest, delayed)) > 1e3


def _after_many_steps(decay: float, lead: float, size: float, delayed: float = 1.0) -> float:
    newest = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([newest], lr=size * (1 - decay), momentum=decay)
    if lead:
        MomentLead(lead).attach(optimizer)
    older = newest.detach().clone()
    for _ in range(6000):
        newest.grad, older = torch.lerp(newest.detach(), older, delayed), newest.detach().clone()
        optimizer.step()
        if not 1e-9 < abs(newest.item()) < 1e9:
            break
    return newest.item()


def test_a_lead_that_leaves_nothing_of_the_average_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
    with pytest.raises(ValueError, match=r"above 0\.5, got 0\.5"):
        MomentLead(1.0).attach(optimizer)
    with pytest.raises(ValueError, match=r"a lead of 2 needs a decay .* above 0\.666667, got 0\.5: raise it"):
        MomentLead(2.0).attach(optimizer)


class AdamOfGroups(torch.optim.Optimizer):
    """Counts steps per group, as those of Apex and Transformer Engine do."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                mean, square = (state.setdefault(key, torch.zeros_like(weight)) for key in ("exp_avg", "exp_avg_sq"))
                mean.mul_(first).add_(weight.grad, alpha=1 - first)
                square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
                size = (square / (1 - second**step)).sqrt() + group["eps"]
                weight -= group["lr"] * mean / (1 - first**step) / size


def test_steps_may_be_counted_per_group():
    found = []
    for optimizer_of in (lambda weights: torch.optim.Adam(weights, lr=0.1, betas=(0.9, 0.99)), AdamOfGroups):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = optimizer_of([weight])
        MomentLead(2.0).attach(optimizer)
        for gradient in (0.5, 1.0, -0.25):
            weight.grad = torch.tensor([gradient])
            optimizer.step()
        found.append(weight.item())
    assert found[0] == pytest.approx(found[1])
