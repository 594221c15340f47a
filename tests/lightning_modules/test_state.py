"""What a checkpoint of adapters holds, and that it is enough."""

import functools

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks.checkpoint import IterationCheckpoint
from callbacks.checkpoint_io import AtomicCheckpointIO
from datamodules.prompt_data import PromptDataModule
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from tests.loop import Scorer, module
from tests.tiny_models import PROMPTS, SIZE, pipeline, policy, tiny_lora


def brightness(images):
    return images.double().flatten(1).mean(1)


def tiny(family="sd3", **options):
    small = {"height": SIZE[family], "width": SIZE[family]} if family.startswith("wan") else {}
    return policy(family, **(small | options))


def train(root, mine, iterations, *, ckpt_path=None, callbacks=(), trainer=None, **options) -> LeanGRPO:
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    data = PromptDataModule(str(root / "prompts.txt"), prompts_per_step=2, iterations=iterations)
    model = module(policy=mine, num_steps=2, generations_per_prompt=2, **options)
    Trainer(**({
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": root, "plugins": [AtomicCheckpointIO()],
        "callbacks": [Scorer(brightness), IterationCheckpoint(), *callbacks],
    } | (trainer or {}))).fit(model, datamodule=data, ckpt_path=ckpt_path)  # fmt: skip
    return model


def last(root):
    return root / "checkpoints" / "last.ckpt"


def tensors(nest):
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (dict, list, tuple)):
        for part in nest.values() if isinstance(nest, dict) else nest:
            yield from tensors(part)


@pytest.fixture
def checkpoint(tmp_path):
    """A LoRA run's last checkpoint, after one iteration: its path."""
    train(tmp_path, tiny(), 1)
    return last(tmp_path)


@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
def test_a_checkpoint_holds_the_adapters_and_their_optimizer_alone(guided, tmp_path):
    mine = tiny()
    model = train(tmp_path, ClassifierFreeGuidance(mine, scale=2.0) if guided else mine, 1)
    content = torch.load(last(tmp_path), weights_only=True)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert content["state_dict"].keys() == adapters.keys() and all("lora_" in name for name in adapters)
    assert all(torch.equal(content["state_dict"][name], p) for name, p in adapters.items())
    elements = sum(p.numel() for p in adapters.values())
    assert sum(t.numel() for t in tensors(content["optimizer_states"])) == 2 * elements + len(adapters)  # AdamW's steps
    rest = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states", "lean_grpo")}
    assert sum(t.numel() for t in tensors(rest)) == 0


def test_full_weights_without_buffers_encoders_and_vae(tmp_path):
    model = train(tmp_path, tiny(trainable="full"), 1)
    names = torch.load(last(tmp_path), weights_only=True)["state_dict"].keys()
    assert names == {f"policy.transformer.{name}" for name, _ in model.policy.transformer.named_parameters()}
    assert "policy.transformer.pos_embed.pos_embed" in model.state_dict()
    assert sum(p.numel() for p in model.policy.frozen.vae.parameters()) > 0


@pytest.mark.parametrize(
    ("family", "trainable"), [("sd3", "lora"), ("sd3", "full"), ("flux", "lora"), ("wan22", "lora")]
)
def test_resumed_is_never_stopped(family, trainable, tmp_path):
    options = {"beta": 0.1, "lr": 0.05}
    runs = {name: tmp_path / name for name in ("whole", "parts")}
    for root in runs.values():
        root.mkdir()
    whole = train(runs["whole"], tiny(family, trainable=trainable), 3, **options)
    first = train(runs["parts"], tiny(family, trainable=trainable), 1, **options)
    resumed = train(runs["parts"], tiny(family, trainable=trainable), 3, ckpt_path=last(runs["parts"]), **options)
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.iteration == 3 and resumed.iteration_metrics["kl"] == whole.iteration_metrics["kl"] > 0
    assert any(not torch.equal(p, theirs[name]) for name, p in first.named_parameters())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weights: weights.popitem(), "1 tensors differ, first .*lora_"),
        (
            lambda weights: weights.update(extra=torch.zeros(1)),
            r"1 tensors differ, first extra \(checkpoint \(1,\), config None",
        ),
    ],
    ids=["one adapter missing", "one too many"],
)
def test_exactly_the_trained_tensors_have_to_be_there(spoil, message, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    spoil(content["state_dict"])
    torch.save(content, checkpoint)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, tiny(), 2, ckpt_path=checkpoint)


def test_adapters_of_another_rank_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds another policy: 30 tensors differ.*\(2, 16\), config \(3, 16\)"):
        train(tmp_path, tiny(lora=tiny_lora("sd3", rank=3)), 2, ckpt_path=checkpoint)


def test_adapters_of_another_base_model_are_refused(checkpoint, tmp_path):
    other = tiny()
    with torch.no_grad():
        other.transformer.proj_out.weight.mul_(1.01)
    with pytest.raises(ValueError, match="other frozen weights.*another base model, revision or dtype"):
        train(tmp_path, other, 2, ckpt_path=checkpoint)


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_every_precision_trains_and_resumes(trainable, precision, tmp_path):
    """Base weights as the trainer has them, adapters in fp32 under each; the frozen weights are recognised after the cast."""
    options = {"trainer": {"precision": precision}, "beta": 0.1}
    train(tmp_path, tiny(trainable=trainable), 1, **options)
    before = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    model = train(tmp_path, tiny(trainable=trainable), 2, ckpt_path=last(tmp_path), **options)
    half, single = torch.bfloat16, torch.float32
    expected = {p.requires_grad: p.dtype for p in model.policy.parameters()}
    base = half if precision == "bf16-true" else single
    assert expected == ({True: single, False: base} if trainable == "lora" else {True: base})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.isfinite().all() for p in trained.values()) and model.iteration_metrics["kl"] >= 0
    assert any(not torch.equal(p, before[name]) for name, p in trained.items())


@pytest.mark.parametrize("adapters", ["float32", "bfloat16"])
def test_bf16_weights_with_adapters_in_either_dtype(adapters, tmp_path):
    pipe = pipeline("sd3")
    pipe.transformer.to(torch.bfloat16)
    mine = policy("sd3", pipe, lora=tiny_lora("sd3", dtype=adapters))
    model = train(tmp_path, mine, 1, optimizer=functools.partial(torch.optim.SGD), lr=10.0)
    assert {p.requires_grad: p.dtype for p in model.policy.parameters()} == {
        True: getattr(torch, adapters), False: torch.bfloat16,
    }  # fmt: skip
    assert model.iteration_metrics["grad_norm"] > 0
