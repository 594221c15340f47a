"""What a training run does to the parts of a policy that it does not train, and what of them it writes."""

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from torch.utils._pytree import tree_leaves

from lightning_modules.policies.base import Policy
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from tests.loop import Scorer, fit, module
from tests.tiny_models import FAMILIES, PROMPTS, TOKENS, flux_transformer, pipeline, policy


def brightness(images):
    return images.double().flatten(1).mean(1)


def train(model, root, *callbacks):
    return fit(model, 1, root=root, prompts=PROMPTS[:2], scorer=Scorer(brightness), callbacks=callbacks)


class Save(Callback):
    """Writes Lightning's own checkpoint when training ends, and whole ones at that."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("trainable", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_and_vae_get_no_gradient_and_are_in_no_checkpoint(family, trainable, tmp_path):
    pipe = pipeline(family)  # its own, so that nothing else can have touched it
    mine = policy(family, pipe, trainable=trainable)
    parts = {**mine.text.modules, "vae": pipe.vae}
    frozen = {f"{name}.{k}": t for name, part in parts.items() for k, t in part.state_dict(keep_vars=True).items()}
    before = {name: t.detach().clone() for name, t in frozen.items()}
    base = {name: p.detach().clone() for name, p in mine.named_parameters() if not p.requires_grad}
    model = module(Retain(), policy=mine, beta=0.1, num_steps=2, generations_per_prompt=2)
    metrics = train(model, tmp_path, Save(tmp_path / "run.ckpt"))

    assert metrics[0]["grad_norm"] > 0
    assert all(t.grad is None and not t.requires_grad and torch.equal(t, before[name]) for name, t in frozen.items())
    trained = {f"policy.{name}" for name, p in mine.named_parameters() if p.requires_grad}
    assert {id(p) for p in model.parameters()}.isdisjoint(id(t) for t in frozen.values())
    assert {name.split(".")[:2] == ["policy", "transformer"] for name in model.state_dict()} == {True}
    (optimizer,) = (model.optimizers(),)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)

    content = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert content["state_dict"].keys() == trained
    written = [t for t in tree_leaves(content) if isinstance(t, torch.Tensor)]
    anything_frozen = [t for t in [*before.values(), *base.values()] if t.numel() > 2]
    assert anything_frozen and not any(
        t.shape == other.shape and torch.equal(t.to(other.dtype), other) for t in written for other in anything_frozen
    )
    weights = sum(t.numel() for t in content["state_dict"].values())
    states = sum(t.numel() for t in written) - torch.get_rng_state().numel()
    assert states <= 3 * weights + len(trained)  # the weights, AdamW's two moments and its step counters


def from_yaml(folder, guidance):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Policy, "policy")
    written = f"""
policy:
  class_path: lightning_modules.policies.flux.FluxPolicy.from_pretrained
  init_args:
    path: {folder}
    height: 8
    width: 8
    dtype: float32
    max_sequence_length: {TOKENS}
    lora: {{rank: 2, alpha: 6, targets: [attn.to_q]}}
    guidance: {guidance}
"""
    return parser.instantiate(parser.parse_string(written)).policy


@pytest.mark.parametrize(("written", "meant"), [("0.0", 0.0), ("1.0", 1.0), ("3.5", 3.5), ("null", None)])
def test_embedded_guidance_is_the_same_in_rollout_update_reference_and_evaluation(written, meant, tmp_path):
    """Zero is not taken for none, nor one for no guidance."""
    pipeline("flux", transformer=flux_transformer(guidance_embeds=meant is not None)).save_pretrained(tmp_path / "base")
    mine, seen = from_yaml(tmp_path / "base", written), []
    assert mine.guidance == meant and type(mine.guidance) is type(meant)
    mine.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["guidance"]), with_kwargs=True)
    model = module(Native(), policy=mine, beta=0.1, num_steps=2, generations_per_prompt=2, eval_num_steps=3)
    train(model, tmp_path)
    forwards = 2 * (2 + 1 + 1)  # two groups: steps of the rollout, trained steps again, and the reference's
    assert len(seen) == forwards
    ids = torch.arange(2)
    model.sample(PROMPTS[:2], prompt_index=ids, image_index=ids)
    assert len(seen) == forwards + 3
    assert [None if g is None else g.tolist() for g in seen] == [None if meant is None else [meant] * 2] * len(seen)
