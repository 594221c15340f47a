import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from callbacks.evaluation import HeldOutEvaluation
from callbacks.reward_scoring import RewardScoring
from callbacks.sample_grid import SampleGrid
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module


def fit(trainer, data, **changes):
    module = make_module(**changes)
    trainer.fit(module, datamodule=data)
    return module


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())


@pytest.mark.parametrize(("every", "iterations"), [(0, [0, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_before_during_and_after(make_trainer, make_data, tmp_path, every, iterations):
    fit(make_trainer(RewardScoring({"mean": MeanPixel()}), SampleGrid(every=every)), make_data(iterations=4))
    assert names(tmp_path) == [f"iteration_{i:06d}.png" for i in iterations]


def test_the_same_prompts_and_noise_each_time(make_trainer, make_data, tmp_path):
    """With a learning rate of 0 the pictures differ in the title alone."""
    fit(
        make_trainer(RewardScoring({"mean": MeanPixel()}), SampleGrid(prompts=3)),
        make_data(iterations=2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    first, last = (np.asarray(Image.open(tmp_path / "run" / "samples" / name)) for name in names(tmp_path))
    assert (first[:50] != last[:50]).any()
    assert (first[50:] == last[50:]).all()


def test_prompts_are_spread_over_the_set_and_scored_like_the_evaluation(make_trainer, make_data):
    reward = ByPrompt({}, 0.5)
    evaluation = HeldOutEvaluation({"r": reward}, "r")
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), SampleGrid(prompts=3, images=7), evaluation)
    grid = trainer.callbacks[1]
    fit(trainer, make_data())
    rows = list(grid._loader)
    assert [len(batch) for batch in rows] == [5, 5, 5, 5, 1]  # never more at once than the test set's batches
    drawn = [prompt for batch in rows for prompt in batch.prompts]
    assert drawn == [PROMPTS[i]["prompt"] for i in (0, 2, 4) for _ in range(7)]
    assert drawn[:5] in [list(call) for call in reward.calls]


def test_the_picture_shows_what_the_evaluation_draws(make_trainer, make_data):
    """The first image of a prompt is image 0 of the held-out set, however many are drawn of it."""
    module, data = make_module(), make_data()
    trainer = make_trainer(SampleGrid(prompts=6, images=1))
    trainer.datamodule = data
    grid = trainer.callbacks[0]
    chosen = torch.cat([module.test_step(batch, 0).images for batch in grid._choose(trainer, module)])
    whole = torch.cat([module.test_step(batch, 0).images for batch in data.test_dataloader()])
    assert torch.allclose(chosen, whole[::2], atol=1e-6)


def test_training_is_bitwise_untouched(make_trainer, make_data):
    def run(*extra):
        torch.manual_seed(3)
        module = fit(make_trainer(RewardScoring({"mean": MeanPixel()}), *extra), make_data())
        return [p.detach().clone() for p in module.parameters()], torch.get_rng_state()

    plain, drawn = run(), run(SampleGrid(every=1))
    assert all(torch.equal(a, b) for a, b in zip(plain[0], drawn[0], strict=True))
    assert torch.equal(plain[1], drawn[1])


def test_tensorboard_gets_the_picture(make_trainer, make_data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="", version="run"), CSVLogger(tmp_path, name="", version="run")]
    fit(make_trainer(RewardScoring({"mean": MeanPixel()}), SampleGrid(), logger=loggers), make_data())
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [image.step for image in events.Images("samples")] == [0, 2]


@pytest.mark.parametrize("bad", [{"every": -1}, {"prompts": 0}, {"images": 0}])
def test_arguments_are_checked(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SampleGrid(**bad)
