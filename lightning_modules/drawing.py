"""Images drawn without training: what validation, test and prediction do, and callbacks ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_modules.flow.denoise import ReverseProcess, denoise
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.flow.sigmas import Sigmas
from lightning_modules.flow.transitions import ODE
from lightning_modules.policies.base import Policy
from lightning_modules.types import Conditioning, DrawingSettings, Request, Rows, Samples


class DrawsImages(LightningModule):
    """A module whose policy can be sampled deterministically.

    Args:
        policy: the generator.
        sigmas: the noise grid.
        eval_num_steps: steps of the sampler.
    """

    eval_seed = 0
    """Key of the noise of validation, test and prediction: the same for every run, so that runs and checkpoints are
    judged on the same noise."""

    def __init__(self, policy: Policy, sigmas: Sigmas, eval_num_steps: int) -> None:
        super().__init__()
        self.policy, self.sigmas, self.eval_num_steps = policy, sigmas, eval_num_steps
        self.eval_sigma_grid = sigmas(eval_num_steps, policy.num_tokens)
        self.evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered whenever images are drawn for evaluation; a callback puts averaged weights in place here."""
        self._kind = "single"
        """How weights lie on the ranks: ``single``, ``replicated`` or ``sharded``."""

    @torch.inference_mode(False)  # what FSDP2 gathers weights into is kept, and training could not use it afterwards
    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        *,
        prompt_index: Tensor,
        image_index: Tensor,
        seed: int = 0,
        settings: DrawingSettings | None = None,
    ) -> Tensor:
        """Images by the deterministic sampler (Euler on the ODE, ``eval_num_steps`` steps).

        Args:
            prompts: [n] one per image; equal prompts are encoded once.
            prompt_index, image_index: [n] int64 ids. The initial noise is a function of (seed, prompt_index,
                image_index), so the same ids give the same image on any batch size, before and after training.
            settings: other steps, guidance or size.

        Returns: ``[n, 3, H, W]`` (or video) float32 in [0, 1].
        """
        was_training = self.policy.training
        self.policy.eval()
        try:
            with self._drawing_with(settings) as sigmas:
                return self._denoise(prompts, Rows(prompt=prompt_index, generation=image_index), seed, sigmas)
        finally:
            self.policy.train(was_training)

    def _denoise(self, prompts: Sequence[str], rows: Rows, seed: int, sigmas: Tensor) -> Tensor:
        none = torch.zeros(len(rows), len(sigmas) - 1, dtype=torch.bool)
        noise = KeyedNoise(seed=seed, iteration=-1, rows=rows, latent_shape=self.policy.latent_shape)
        request = Request(
            rows=rows,
            conditioning=self._encode(prompts),
            initial=noise.initial().to(self.device),
            noise=noise,
            trained=none,
            stochastic=none,
        )
        process = ReverseProcess(velocity=self.policy, transition=ODE(), sigmas=sigmas)
        with self.evaluation_weights():
            return self.policy.decode(denoise(process, request))

    @contextmanager
    def _drawing_with(self, settings: DrawingSettings | None) -> Iterator[Tensor]:
        """Inside, the policy draws as ``settings`` say; yields the evaluation's noise grid."""
        chosen = settings or DrawingSettings()
        with self.policy.drawing_with(guidance=chosen.guidance, height=chosen.height, width=chosen.width):
            steps = chosen.num_steps or self.eval_num_steps
            yield self.eval_sigma_grid if settings is None else self.sigmas(steps, self.policy.num_tokens)

    def sampler(self, settings: DrawingSettings | None = None) -> dict[str, Any]:
        """What :meth:`sample` does under ``settings``, as plain values for result files. Errors: ``ValueError`` on settings
        that the policy or the noise grid cannot follow."""
        with self._drawing_with(settings) as sigmas:
            return {
                "name": "Euler, ODE",
                "num_steps": len(sigmas) - 1,
                "sigmas": [round(sigma, 9) for sigma in sigmas.tolist()],
                **self.policy.drawing(),
                "precision": None if self._trainer is None else str(self._trainer.precision),
            }

    def _encode(self, prompts: Sequence[str]) -> Conditioning:
        unique = list(dict.fromkeys(prompts))
        conditioning = self.policy.encode(unique)
        return conditioning.rows(torch.tensor([unique.index(p) for p in prompts]))

    def draw(self, batch: Any, settings: DrawingSettings | None = None, seed: int | None = None) -> Samples:
        """This rank's images of an ``EvalBatch``; none of a surplus one, which is drawn only where every rank must call the
        policy. ``seed``: key of the noise, by default :attr:`eval_seed`; ``settings`` as for :meth:`sample`."""
        images = torch.empty(0, 3, 1, 1)
        if self._kind == "sharded" or not batch.surplus:
            images = self.sample(
                batch.prompts,
                prompt_index=batch.prompt_index,
                image_index=batch.image_index,
                seed=self.eval_seed if seed is None else seed,
                settings=settings,
            )
        kept = slice(0, 0 if batch.surplus else len(images))
        return Samples(
            images=images[kept],
            prompts=tuple(batch.prompts[kept]),
            metadata=tuple(batch.metadata[kept]),
            rows=Rows(prompt=batch.prompt_index[kept], generation=batch.image_index[kept]),
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Samples:
        return self.draw(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Samples:
        return self.draw(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Samples:
        return self.draw(batch)
