"""Supervised flow matching: the loss against a closed form, the caption noise, and a short training."""

import lightning.pytorch as pl
import pytest
import torch

from datamodules.shapes import ShapesData
from lightning_modules.flow_matching import FlowMatching, shuffle_captions
from lightning_modules.policies.shapes import ShapesPolicy

TINY = {"num_layers": 1, "width": 32, "num_heads": 2}


def module(**settings) -> FlowMatching:
    torch.manual_seed(0)
    model = FlowMatching(ShapesPolicy(None, **TINY), lambda parameters: torch.optim.SGD(parameters, lr=0.5), **settings)
    model.log = lambda *_, **__: None
    return model


def fit(model: FlowMatching, folder, steps: int) -> None:
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ShapesData(batch_size=4))


class Oracle(torch.nn.Module):
    """Stands in for the policy's forward: knows the images, so its velocity is exact but for a planted error."""

    def __init__(self, x_0: torch.Tensor, error: float) -> None:
        super().__init__()
        self.x_0, self.error, self.sigmas = x_0, error, torch.empty(0)

    def embed(self, captions):
        return None

    def forward(self, x, sigma, conditioning):
        self.sigmas = sigma
        return (x - self.x_0) / sigma.view(-1, 1, 1, 1) + self.error


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_the_loss_is_the_squared_error_of_the_velocity(error):
    """The exact velocity is ``eps - x_0 = (x_sigma - x_0) / sigma``, whatever sigma and eps were drawn."""
    images = torch.rand(8, 3, 32, 32)
    model = module()
    model.policy = Oracle(2 * images - 1, error)
    loss = model.training_step({"images": images, "captions": ["a photo of a ring"] * 8}, 0)
    assert loss.item() == pytest.approx(error**2, abs=1e-3)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_noise_levels_are_shifted_uniform(shift):
    """Inverting the shift, ``u = sigma / (s - (s - 1) sigma)``, gives uniform numbers (Kolmogorov-Smirnov, 0.1 %)."""
    count = 4000
    model = module(shift=shift)
    oracle = model.policy = Oracle(torch.zeros(count, 3, 1, 1), 0.0)
    model.training_step({"images": torch.full((count, 3, 1, 1), 0.5), "captions": ["a ring"] * count}, 0)
    u = (oracle.sigmas / (shift - (shift - 1) * oracle.sigmas)).sort().values
    assert (u - (torch.arange(count) + 0.5) / count).abs().max() < 1.95 / count**0.5


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_of_the_captions_swaps_places(share):
    torch.manual_seed(0)
    captions = [str(i) for i in range(4000)]
    shuffled = shuffle_captions(captions, share)
    assert sorted(shuffled) == sorted(captions)
    moved = sum(a != b for a, b in zip(captions, shuffled, strict=True)) / len(captions)
    assert moved == pytest.approx(share, abs=4 * (0.25 / 4000) ** 0.5)


def test_training_moves_transformer_and_text_and_writes_the_weights(tmp_path):
    model = module()
    before = {name: t.detach().clone() for name, t in model.policy._weights().items()}
    fit(model, tmp_path, steps=2)
    after = model.policy._weights()
    for name in (
        "transformer.proj_out.weight",
        "transformer.pos_embed.proj.weight",
        "text.words.weight",
        "text.positions",
    ):
        assert not torch.equal(before[name], after[name]), name
    loaded = ShapesPolicy(str(tmp_path / "shapes_base.safetensors"), **TINY)
    for name, tensor in loaded._weights().items():
        torch.testing.assert_close(tensor, after[name].detach(), rtol=2**-8, atol=1e-8)


def test_the_lr_scheduler_steps_after_every_batch(tmp_path):
    model = module(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1))
    fit(model, tmp_path, steps=3)
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5e-3)


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    policy = ShapesPolicy(None, **TINY)
    model = FlowMatching(policy, caption_noise=0.0)
    model.log = lambda *_, **__: None
    batch = ShapesData(batch_size=16).train_dataloader().dataset.batch(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = model.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("bad", [{"caption_noise": 1.5}, {"caption_noise": -0.1}, {"shift": 0.0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} {next(iter(bad.values()))}"):
        module(**bad)
