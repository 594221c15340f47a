import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from callbacks.checkpoint import IterationCheckpoint
from callbacks.ema import EMA
from callbacks.reward_scoring import RewardScoring
from tests.callbacks.miniature import MeanPixel, make_module
from tests.loop import fit, module
from tests.tiny_models import policy

BEFORE_A_RUN = SimpleNamespace(ckpt_path=None)
REWARD = RewardScoring({"mean": MeanPixel()})
IDS = torch.tensor([0, 1])


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def averaging(model, **options):
    """A callback that has begun with the model as it is."""
    ema = EMA(**options)
    ema.on_fit_start(BEFORE_A_RUN, model)
    return ema


def after_iteration(ema, model, value):
    fill(model, value)
    model.iteration += 1
    ema.on_train_batch_end(BEFORE_A_RUN, model, None, None, 0)


def the_value(ema):
    """What every element of every average is."""
    (value,) = torch.cat([w.flatten() for w in ema.weights.values()]).unique().tolist()
    return value


def draw(model):
    return model.sample(["a", "bb"], prompt_index=IDS, image_index=IDS)


def test_the_formula():
    """theta = 0; then 1, 2, 4. d = 2/11, 3/12, 0.3 (the ramp would be 4/13): 9/11, 75/44, 0.3 * 75/44 + 0.7 * 4."""
    model = make_module()
    fill(model, 0.0)
    ema = averaging(model, decay=0.3)
    assert the_value(ema) == 0.0
    for theta, expected in ((1.0, 9 / 11), (2.0, 75 / 44), (4.0, 0.3 * 75 / 44 + 2.8)):
        after_iteration(ema, model, theta)
        assert the_value(ema) == pytest.approx(expected, rel=1e-6)
    assert ema.updates == 3


def test_every_counts_iterations():
    model = make_module()
    fill(model, 0.0)
    ema = averaging(model, every=3)
    for _ in range(7):
        after_iteration(ema, model, 1.0)
    assert ema.updates == 2


def test_half_precision_is_averaged_in_fp32():
    model = make_module().to(torch.bfloat16)
    fill(model, 1.0)
    ema = averaging(model, decay=0.999)
    ema.updates = 100_000
    after_iteration(ema, model, 1.0 + 2**-7)  # bf16's next number; its average with 1 is none of bf16's
    assert the_value(ema) == pytest.approx(1 + 0.001 * 2**-7, abs=1e-7)
    assert {w.dtype for w in ema.weights.values()} == {torch.float32}
    assert {w.dtype for w in averaging(make_module().double()).weights.values()} == {torch.float64}


def test_inside_the_context_the_average_outside_the_very_tensors_of_before():
    model = make_module()
    ema = averaging(model)
    average = copy.deepcopy(ema.weights)
    fill(model, 7.0)
    before = [(p.data_ptr(), p._version) for p in model.parameters()]
    with pytest.raises(KeyError), ema.swapped(model):
        assert all(torch.equal(p, average[name]) for name, p in model.named_parameters())
        with ema.swapped(model):
            pass
        assert all(torch.equal(p, average[name]) for name, p in model.named_parameters())
        raise KeyError
    assert [(p.data_ptr(), p._version) for p in model.parameters()] == before
    assert all((p == 7.0).all() for p in model.parameters())


def test_a_graph_from_before_can_still_be_backpropagated():
    model = make_module()
    ema = averaging(model)
    x = torch.randn(1, *model.policy.latent_shape)
    loss = model.policy.eval()(x, torch.ones(1), model.policy.encode(["a"])).sum()
    with ema.swapped(model):
        pass
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


class Evaluating(EMA):
    """Draws after every iteration, with what evaluation uses and with the trained weights."""

    def __init__(self):
        super().__init__(decay=0.9)
        self.evaluated, self.trained = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        self.evaluated.append(draw(pl_module))
        use, pl_module.evaluation_weights = pl_module.evaluation_weights, nullcontext
        self.trained.append(draw(pl_module))
        pl_module.evaluation_weights = use


def test_evaluation_uses_the_average_and_training_never_does(tmp_path):
    plain, averaged, ema = module(lr=0.05), module(lr=0.05), Evaluating()
    assert fit(plain, 3, root=tmp_path)[-1]["reward"] == fit(averaged, 3, root=tmp_path, callbacks=[ema])[-1]["reward"]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), averaged.parameters(), strict=True))
    assert torch.equal(ema.trained[-1], draw(averaged))  # the run is over, and with it the averages
    assert not any(torch.equal(e, t) for e, t in zip(ema.evaluated, ema.trained, strict=True))
    with ema.swapped(averaged):
        assert torch.equal(ema.evaluated[-1], draw(averaged))


def test_a_resumed_average_is_that_of_a_run_never_stopped(make_trainer, make_data, tmp_path):
    def train(iterations, *callbacks, ckpt_path=None):
        ema = EMA(every=2)
        trainer = make_trainer(REWARD, ema, *callbacks, enable_checkpointing=bool(callbacks))
        trainer.fit(make_module(), datamodule=make_data(iterations=iterations), ckpt_path=ckpt_path)
        return ema

    whole, first = train(5), train(3, IterationCheckpoint())
    second = train(5, ckpt_path=next(tmp_path.rglob("last.ckpt")))
    assert (first.updates, second.updates, whole.updates) == (1, 2, 2)
    assert all(torch.equal(second.weights[name], w) for name, w in whole.weights.items())
    assert any(not torch.equal(first.weights[name], w) for name, w in whole.weights.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_checkpoint_is_evaluated_with_its_average(stage, dtype, make_trainer, make_data, tmp_path):
    data = make_data(iterations=4)
    ema = EMA()
    make_trainer(REWARD, ema, IterationCheckpoint(), enable_checkpointing=True).fit(make_module(), datamodule=data)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    model, images = make_module(), []
    model.policy.to(dtype)
    evaluate = model.draw

    def watched(batch):
        images.append((samples := evaluate(batch)).images)
        return samples

    model.draw = watched
    trainer = make_trainer(EMA(), limit_val_batches=None)
    options = {"return_predictions": False} if stage == "predict" else {}
    getattr(trainer, stage)(model, datamodule=data, ckpt_path=checkpoint, **options)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, ema.weights[name].to(dtype))  # the run is over, and with it the average
        parameter.data = ema.weights[name].to(dtype)
    loader = getattr(data, f"{stage.removesuffix('idate')}_dataloader")()
    seen = torch.cat(images)
    assert torch.equal(seen, torch.cat([evaluate(batch).images for batch in loader]))


def test_adapters_alone_are_averaged():
    model = make_module(policy=policy("sd3"))
    names = set(averaging(model).weights)
    assert names == {f"policy.{n}" for n, p in model.policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in names) and len(names) == 2 * 15


def test_a_checkpoint_without_an_average_is_no_average(make_trainer, make_data, tmp_path):
    data = make_data()
    trainer = make_trainer(REWARD, IterationCheckpoint(), enable_checkpointing=True)
    trainer.fit(make_module(), datamodule=data)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    with pytest.raises(ValueError, match="last.ckpt holds no averaged weights"):
        make_trainer(EMA()).test(make_module(), datamodule=data, ckpt_path=checkpoint)
    make_trainer(EMA()).test(make_module(), datamodule=data)  # before training there is none to expect


def test_an_average_of_other_parameters_is_refused():
    ema = averaging(make_module())
    other = EMA()
    other.load_state_dict(ema.state_dict())
    with pytest.raises(ValueError, match="other parameters: use the run's own config.yaml"):
        other.on_fit_start(BEFORE_A_RUN, make_module(policy=policy("sd3")))


@pytest.mark.parametrize(
    ("options", "message"), [({"decay": 1.0}, "decay=1.0"), ({"decay": -0.1}, "decay=-0.1"), ({"every": 0}, "every=0")]
)
def test_impossible_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        EMA(**options)
