"""One flag for every family: keep only each block's input in a forward with gradients, and compute the rest again in the
backward (Chen et al. 2016, arXiv 1604.06174).

Memory per retained step falls from all activations to one tensor per block; each backward costs one more forward of the
backbone, which the count of policy forwards does not show. Active wherever gradients are recorded, in ``eval`` mode (the
rollout) as in ``train`` mode, and without effect under ``no_grad``.
"""

from __future__ import annotations

from diffusers.models.modeling_utils import ModelMixin


def set_activation_checkpointing(transformer: ModelMixin, enabled: bool) -> None:
    """Errors: ``ValueError`` if the model's class has no checkpointed blocks."""
    if not enabled:
        transformer.disable_gradient_checkpointing()
    elif transformer._supports_gradient_checkpointing:
        transformer.enable_gradient_checkpointing()  # non-reentrant, as gradients to the adapters alone need it
    else:
        raise ValueError(
            f"{type(transformer).__name__} has no checkpointed blocks: set activation_checkpointing to false"
        )
