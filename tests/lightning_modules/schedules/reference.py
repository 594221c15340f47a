"""An independent reference for the gradient: plain autograd over the whole loss, formulas written out from the papers,
none of the project's code beyond the policy. Noise, windows, advantages' rewards and weights come in as plain data."""

import math

import torch


def step_moments(kind, x, v, grid, t, a):
    s, s_next = grid[t], grid[t + 1]
    dt = s_next - s
    if kind == "cps":
        std = s_next * math.sin(a * math.pi / 2)
        clean, noisy = x - s * v, x + (1 - s) * v
        return clean * (1 - s_next) + noisy * math.sqrt(s_next**2 - std**2), std
    if kind == "flow":
        diffusion = a * math.sqrt(s / (1 - (grid[1] if s == 1 else s)))
    elif kind == "dance":
        diffusion = a
    else:
        diffusion = grid[-1] + (grid[1] - grid[-1]) * s
    score = -(x + (1 - s) * v) / s
    return x + v * dt - 0.5 * diffusion**2 * score * dt, diffusion * math.sqrt(-dt)


def reference_gradient(
    policy, kind, level, grid, conditionings, initial, noise, trained, rewards, weights, *,
    beta=0.0, anchor=None, gaussian=True, eps=1e-4, clip=None, scale="group", given=None,
):  # fmt: skip
    """All ``[B, M, ...]`` data of one update -> gradient. ``conditionings[b]``: one row; ``noise[t][b][m]``; ``given``:
    advantages [B, M] in place of those of the rewards."""
    groups, members = rewards.shape
    normaliser = groups * members * int(trained[0, 0].sum())
    everyone = rewards.double()
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(groups):
        spread = everyone if scale == "global" else everyone[b]
        divisor = 1.0 if scale == "none" else spread.std(unbiased=False) + eps
        advantages = (everyone[b] - everyone[b].mean()) / divisor
        if everyone[b].max() == everyone[b].min():
            advantages = torch.zeros(members, dtype=torch.float64)
        if clip is not None:
            advantages = advantages.clamp(-clip, clip)
        if given is not None:
            advantages = given[b]
        for m in range(members):
            x = initial[b, m][None]
            for t in range(len(grid) - 1):
                sigma = torch.full((1,), grid[t], dtype=x.dtype)
                v = policy(x, sigma, conditionings[b])
                if not trained[b, m, t]:
                    x = (x + v * (grid[t + 1] - grid[t])).detach()
                    continue
                mean, std_t = step_moments(kind, x, v, grid, t, level)
                after = (mean + std_t * noise[t][b, m][None].to(x.dtype)).detach()
                if gaussian:
                    density = torch.distributions.Normal(mean, std_t).log_prob(after).mean()
                else:
                    density = -(after - mean).square().mean()
                loss = loss - advantages[m] * weights[t] * density / normaliser
                if beta:
                    anchored, _ = step_moments(kind, x, anchor(x, sigma, conditionings[b]).detach(), grid, t, level)
                    kl = torch.distributions.kl_divergence(
                        torch.distributions.Normal(mean, std_t), torch.distributions.Normal(anchored, std_t)
                    )
                    loss = loss + beta * kl.mean() / normaliser
                x = after
    return torch.autograd.grad(loss, [p for p in policy.parameters() if p.requires_grad])
