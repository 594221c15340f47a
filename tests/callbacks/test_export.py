import pytest
import torch
from safetensors.torch import load_file

from callbacks.ema import EMA
from callbacks.export import Export
from tests.loop import fit, module
from tests.tiny_models import pipeline, policy

FILE = "pytorch_lora_weights.safetensors"
PROMPTS = ("a red circle", "cross")


def train(root, *callbacks, iterations=3):
    model = module(policy=policy("sd3"), num_steps=2, generations_per_prompt=2, lr=0.05)
    fit(model, iterations, root=root, prompts=PROMPTS, callbacks=callbacks)
    return model


def exports(root):
    return sorted(path.name for path in (root / "export").iterdir())


def in_the_file(model):
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name.removeprefix("policy.").replace(".default", ""): p for name, p in adapters.items()}


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, ["iteration_000003"]), (2, ["iteration_000002", "iteration_000003"]), (3, ["iteration_000003"])],
)
def test_when_it_exports(every, expected, tmp_path, capsys):
    model = train(tmp_path, Export(every))
    assert exports(tmp_path) == expected
    saved = load_file(tmp_path / "export" / "iteration_000003" / FILE)
    assert all(torch.equal(saved[name], p) for name, p in in_the_file(model).items())
    folder = tmp_path / "export" / "iteration_000003"
    assert f'exported to {folder}; open it with\n  pipe.load_lora_weights("{folder}")' in capsys.readouterr().out


def test_training_is_left_bitwise_as_it_was(tmp_path):
    ours, theirs = train(tmp_path, Export(every=1)), train(tmp_path / "plain")
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert ours.iteration_metrics["reward"] == theirs.iteration_metrics["reward"]
    assert len(exports(tmp_path)) == 3


def test_it_exports_the_average_where_there_is_one(tmp_path):
    ema = EMA(decay=0.9)
    model = train(tmp_path, ema, Export())
    saved = load_file(tmp_path / "export" / "iteration_000003" / FILE)
    averages = {name.removeprefix("policy.").replace(".default", ""): w for name, w in ema.weights.items()}
    assert saved.keys() == averages.keys() and all(torch.equal(saved[name], w) for name, w in averages.items())
    assert any(not torch.equal(p, saved[name]) for name, p in in_the_file(model).items())
    pipeline("sd3").load_lora_weights(str(tmp_path / "export" / "iteration_000003"), local_files_only=True)


def test_the_rollout_and_a_fresh_pipeline_with_the_export_have_one_velocity(tmp_path):
    """The second iteration rolls out with what the first has trained, which is what was exported after it."""
    model, calls = module(policy=policy("sd3"), num_steps=2, generations_per_prompt=2, lr=0.05), []
    model.policy.register_forward_hook(
        lambda _, asked, velocity: calls.append((model.iteration, asked, velocity.detach()))
    )
    fit(model, 2, root=tmp_path, prompts=PROMPTS, callbacks=[Export(every=1)])
    of_a_group = [call for call in calls if len(call[1][0]) == 2]  # the export's own questions have one row
    rollout = [(asked, velocity) for iteration, asked, velocity in of_a_group if iteration == 1]
    fresh = pipeline("sd3")
    fresh.load_lora_weights(str(tmp_path / "export" / "iteration_000001"), local_files_only=True)
    other = policy("sd3")
    base = [other(*asked) for asked, _ in rollout]
    other.transformer = fresh.transformer
    for (asked, velocity), start in zip(rollout, base, strict=True):
        assert torch.equal(other(*asked), velocity) and not torch.equal(start, velocity)
    assert len(rollout) == 4  # two groups, two steps


def test_impossible_argument():
    with pytest.raises(ValueError, match="every=-1"):
        Export(-1)
