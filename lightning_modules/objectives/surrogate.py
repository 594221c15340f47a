"""PPO's clipped surrogate, one value per sample.

    L_i = max(c_i rho_i, c_i clip(rho_i, 1 - eps, 1 + eps)),   rho_i = exp(log p_theta - log p_rollout)

with ``c_i = -A_i w_t / N`` (advantage, step weight, normaliser) folded in beforehand: since ``w_t / N > 0`` this is
``w_t / N`` times the usual ``max(-A rho, -A clip(rho))`` (PPO, arXiv 1707.06347, eq. 7; FlowGRPO, arXiv 2505.05470).

On policy ``rho == 1`` and the gradient with respect to ``log p_theta`` is exactly ``c_i``: at the tie ``maximum``
halves the gradient between its two equal arguments, both of which pass it on. That is the identity LeanGRPO lives on,
and :func:`on_policy_surrogate` is that case written out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    log_prob: Tensor, rollout_log_prob: Tensor, coefficient: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """``[n]`` each -> loss per sample ``[n]`` and the ratio ``[n]`` (detached)."""
    ratio = torch.exp(log_prob - rollout_log_prob)
    loss = torch.maximum(coefficient * ratio, coefficient * ratio.clamp(1.0 - clip_range, 1.0 + clip_range))
    return loss, ratio.detach()


def on_policy_surrogate(log_prob: Tensor, coefficient: Tensor) -> Tensor:
    """``[n]`` each -> ``[n]`` with the gradient :func:`clipped_surrogate` has at ratio 1."""
    return coefficient * log_prob
