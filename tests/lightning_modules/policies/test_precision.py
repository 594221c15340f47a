"""Each of the trainer's precisions trains a real family: the transformer computes in the dtype asked for, what is trained
moves, latents and log-probabilities stay in fp32."""

import pytest
import torch

from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.schedules.retain import Retain
from tests.loop import Scorer, fit, module, smooth_reward
from tests.tiny_models import PROMPTS, policy


class Watching(Retain):
    """Keeps the dtypes of what a rollout recorded."""

    def rollout(self, request):
        finished = super().rollout(request)
        self.dtypes = {t.dtype for s in finished.steps for t in (s.latents, s.next_latents, s.log_prob)}
        return finished


@pytest.mark.parametrize(
    ("family", "trainable", "precision", "base", "computes_in", "trained_in"),
    [
        ("sd3", "full", "32-true", torch.float32, torch.float32, torch.float32),
        ("sd3", "full", "bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
        ("flux", "full", "bf16-true", torch.float32, torch.bfloat16, torch.bfloat16),
        ("wan21", "lora", "32-true", torch.bfloat16, torch.bfloat16, torch.float32),  # bf16 base, fp32 adapters
        ("wan21", "lora", "bf16-true", torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_a_precision_of_the_trainer(family, trainable, precision, base, computes_in, trained_in, tmp_path):
    mine, asked, outputs = policy(family, trainable=trainable), [], []
    mine.to(base)
    before = {name: p.detach().float().clone() for name, p in mine.named_parameters() if p.requires_grad}
    projection = next(module for name, module in mine.named_modules() if name.endswith("to_q"))
    projection.register_forward_hook(lambda m, a, out: outputs.append(out.dtype))
    embed = mine._embed
    mine._embed = lambda prompts: asked.append(prompts) or embed(prompts)
    schedule = Watching()
    model = module(schedule, policy=mine, lr=1e-2, num_steps=3, generations_per_prompt=2)
    frame_by_frame = Scorer(lambda images: smooth_reward(images.flatten(2, -2)))
    metrics = fit(model, 1, root=tmp_path, scorer=frame_by_frame, prompts=PROMPTS[:2], precision=precision)
    assert set(outputs) == {computes_in} and schedule.dtypes == {torch.float32}
    assert {p.dtype for p in mine.parameters() if p.requires_grad} == {trained_in}
    moved = [
        name for name, p in mine.named_parameters() if p.requires_grad and not torch.equal(p.float(), before[name])
    ]
    assert moved and all(torch.isfinite(torch.tensor(list(m.values()))).all() for m in metrics)
    assert asked == [[PROMPTS[0]], [PROMPTS[1]]]  # once per group: neither per member nor per step


def test_a_guided_policy_trains(tmp_path):
    guided = ClassifierFreeGuidance(policy("sd3"), 4.5, "blue")
    (metrics,) = fit(module(policy=guided, num_steps=3), 1, root=tmp_path, prompts=PROMPTS[:2], precision="bf16-true")
    assert metrics["grad_norm"] > 0
