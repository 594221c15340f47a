"""The user's own command lines, in this process and on the tiny policy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from callbacks.checkpoint_io import AtomicCheckpointIO
from callbacks.run_folder import new_run_folder
from tests.command_line import BRIGHTNESS, config, fit, load, rows, run_of, schedule, write
from train import files_first, main

EVALUATION = {
    "class_path": "callbacks.evaluation.HeldOutEvaluation",
    "init_args": {"rewards": {"brightness": BRIGHTNESS}, "main": "brightness"},
}
WATCHED = [
    EVALUATION,
    {"class_path": "callbacks.sample_grid.SampleGrid", "init_args": {"prompts": 2, "images": 2}},
    {"class_path": "callbacks.summary.Summary"},
    {"class_path": "callbacks.predict_writer.PredictWriter"},
]


def files(root: Path) -> set[str]:
    skip = {"__pycache__", ".git", ".pytest_cache", ".ruff_cache"}
    return {str(path) for path in root.rglob("*") if path.is_file() and not skip & set(path.parts)}


@pytest.fixture(scope="module")
def watched(tmp_path_factory, repository):
    """A run with all there is to see, started in an empty folder -> (CLI, its root, what lay around after it)."""
    root, elsewhere = tmp_path_factory.mktemp("watched"), tmp_path_factory.mktemp("elsewhere")
    splits = dict.fromkeys(("val", "test", "predict"), str(root / "prompts.txt"))
    path = write(root, callbacks=WATCHED, data=splits)
    before = files(repository)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        cli = fit(path)
    return cli, root, {"cwd": files(elsewhere), "repository": files(repository) - before}


def test_fit_writes_everything_into_one_folder_of_its_own(watched):
    cli, root, around = watched
    run = root / "runs" / "version_0"
    assert run_of(cli) == run
    assert {path.name for path in root.iterdir()} == {"prompts.txt", "tiny.yaml", "runs"}
    assert {path.name for path in (root / "runs").iterdir()} == {"version_0"}
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.csv", "checkpoints", "samples", "summary.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert around == {"cwd": set(), "repository": set()}


def test_fit_trains_and_reports(watched):
    cli, _, _ = watched
    run = run_of(cli)
    assert cli.model.iteration == 4
    assert list(rows(run)) == [1, 2, 3, 4]
    assert load(run / "checkpoints" / "last.ckpt")["lean_grpo"]["iteration"] == 4
    assert json.loads((run / "summary.json").read_text())["iterations"] == 4


def test_validate_and_test_judge_a_checkpoint_by_the_runs_own_config(watched):
    cli, _, _ = watched
    run = run_of(cli)
    options = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    after = json.loads((run / "summary.json").read_text())["held_out_reward"]["after"]
    for command, name in (("validate", "val/brightness"), ("test", "test/brightness")):
        judged = main([command, *options])
        assert run_of(judged).parent == run.parent
        assert run_of(judged) != run
        assert (run_of(judged) / "config.yaml").is_file()
        assert judged.trainer.callback_metrics[name].item() == pytest.approx(after, abs=1e-6)  # Lightning logs fp32
        assert judged.model.iteration == 4


def test_predict_writes_images(watched):
    cli, _, _ = watched
    run = run_of(cli)
    predicted = main(
        ["predict", "--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    )
    assert len(list((run_of(predicted) / "predictions").glob("*.png"))) == 4 * 2


def test_a_second_run_leaves_the_first_alone(tmp_path):
    path = write(tmp_path, iterations=2)
    first = run_of(fit(path))
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    second = run_of(fit(path, "--model.init_args.seed", "1"))
    assert (first.name, second.name) == ("version_0", "version_1")
    assert {file: file.read_bytes() for file in first.rglob("*") if file.is_file()} == before
    assert yaml.safe_load((second / "config.yaml").read_text())["model"]["init_args"]["seed"] == 1


def test_the_saved_config_repeats_the_run(tmp_path):
    first = run_of(
        fit(write(tmp_path, iterations=2), "--seed_everything", "11", "--model.init_args.max_grad_norm", "0.5")
    )
    shutil.move(tmp_path / "tiny.yaml", tmp_path / "gone.yaml")
    second = run_of(main(["fit", "--config", str(first / "config.yaml")]))
    assert rows(second) == rows(first)
    saved = yaml.safe_load((first / "config.yaml").read_text())
    assert saved["seed_everything"] == 11
    assert saved["model"]["init_args"]["max_grad_norm"] == 0.5
    assert (second / "config.yaml").read_text() == (first / "config.yaml").read_text()


# precedence


def resolved(capsys, *args):
    """What a command line resolves to, without running it."""
    with pytest.raises(SystemExit):
        main([*args, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_a_flag_beats_a_file_wherever_it_stands(tmp_path, capsys):
    path, flag = write(tmp_path), ["--model.init_args.num_steps", "6"]
    for args in (["--config", path, *flag], [*flag, f"--config={path}"], ["--model.init_args.num_steps=6", "-c", path]):
        assert resolved(capsys, "fit", *args)["model"]["init_args"]["num_steps"] == 6
    assert resolved(capsys, "fit", "--config", path)["model"]["init_args"]["num_steps"] == 4


def test_a_later_file_beats_an_earlier_one_and_flags_beat_both(tmp_path, capsys):
    path = write(tmp_path)
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {init_args: {num_steps: 5, seed: 3}}\ntrainer: {precision: bf16-true}\n")
    args = ["fit", "--model.init_args.seed", "9", "--config", path, "--config", str(overlay)]
    both = resolved(capsys, *args)
    assert both["model"]["init_args"]["num_steps"] == 5
    assert both["model"]["init_args"]["seed"] == 9
    assert both["trainer"]["precision"] == "bf16-true"
    assert both["model"]["init_args"]["generations_per_prompt"] == 4


def test_the_file_of_a_group_is_a_file_too(tmp_path, capsys):
    group = tmp_path / "data.yaml"
    group.write_text(yaml.safe_dump(config(tmp_path, iterations=50)["data"]))
    args = ["--data.init_args.iterations", "8", "--data", str(group), "--config", write(tmp_path, iterations=4)]
    assert resolved(capsys, "fit", *args)["data"]["init_args"]["iterations"] == 8
    assert resolved(capsys, "fit", *args[2:])["data"]["init_args"]["iterations"] == 50


def test_another_schedule_from_the_command_line(tmp_path, capsys):
    args = ["--model.init_args.schedule", "lightning_modules.schedules.native.Native",
            "--model.init_args.schedule.init_args.updates_per_rollout", "2"]  # fmt: skip
    native = resolved(capsys, "fit", *args, "--config", write(tmp_path))["model"]["init_args"]["schedule"]
    assert native["class_path"].endswith("Native")
    assert native["init_args"]["updates_per_rollout"] == 2


@pytest.mark.parametrize("word", ["null", "~", "None"])
def test_null_from_the_command_line_at_any_depth(word, tmp_path):
    path = write(
        tmp_path, iterations=1, model={"advantage": {"class_path": "lightning_modules.advantages.GroupAdvantage"}}
    )
    options = ("max_grad_norm", "lr_scheduler", "advantage.init_args.clip")
    cli = fit(path, *(part for option in options for part in (f"--model.init_args.{option}", word)))
    assert (cli.model.max_grad_norm, cli.model.lr_scheduler, cli.model.advantage.clip) == (None, None, None)


def test_the_order_of_all_else_is_kept():
    args = "fit --trainer.callbacks+=A --trainer.callbacks.x -1 --trainer.callbacks+=B --data d --config c --flag --config=e"
    expected = "fit --config c --config=e --data d --trainer.callbacks+=A --trainer.callbacks.x -1 --trainer.callbacks+=B --flag"
    assert files_first(args.split()) == expected.split()
    assert files_first(["--help"]) == ["--help"]


# refusals


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--trainer.max_epoch=1", "unrecognized arguments: --trainer.max_epoch=1"),  # no abbreviation either
        ("--model.init_args.lr=1", "Option 'lr' is not accepted"),
        ("--data.init_args.prompts=x", "Option 'prompts' is not accepted"),
        ("--model.init_args.window.init_args.size=1", "Option 'size' is not accepted"),
    ],
)
def test_an_unknown_option_is_refused(option, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        fit(write(tmp_path), option)
    assert exit.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("place", [("trainer",), ("model", "init_args"), ("data", "init_args", "nested"), ()])
def test_an_unknown_key_in_a_file_is_refused(place, tmp_path, capsys):
    path = Path(write(tmp_path))
    content = yaml.safe_load(path.read_text())
    node = content
    for key in place:
        node = node.setdefault(key, {})
    node["no_such_key"] = 1
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as exit:
        fit(str(path))
    assert exit.value.code == 2
    assert ("nested" if "nested" in place else "no_such_key") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("gradient_clip_val=1.0", r"trainer\.gradient_clip_val=1\.0: .*model\.init_args\.max_grad_norm"),
        ("accumulate_grad_batches=2", r"trainer\.accumulate_grad_batches=2: .*generations_per_prompt"),
        ("max_steps=10", r"trainer\.max_steps=10: .*data\.init_args\.iterations"),
        ("max_epochs=3", r"trainer\.max_epochs=3: one epoch is the whole run"),
    ],
)
def test_what_the_module_does_itself_is_refused_with_the_remedy(option, remedy, tmp_path):
    with pytest.raises(ValueError, match=remedy):
        fit(write(tmp_path), f"--trainer.{option}")


def test_a_refusal_has_the_last_word(tmp_path):
    with pytest.raises(ValueError, match=r"^beta=-1\.0: expected at least 0 \(and finite\)$"):
        fit(write(tmp_path), "--model.init_args.beta=-1")
    grid = {"class_path": "callbacks.sample_grid.SampleGrid", "init_args": {"every": -1}}
    with pytest.raises(ValueError, match=r"^every=-1: give an integer of at least 0$"):
        fit(write(tmp_path, callbacks=[grid]))


@pytest.mark.parametrize("command", ["fit", "test"])
def test_an_unusable_checkpoint_is_named(command, watched, tmp_path):
    cli, _, _ = watched
    run = run_of(cli)
    args = [
        command,
        "--config",
        str(run / "config.yaml"),
        "--trainer.default_root_dir",
        str(tmp_path / "runs"),
        "--ckpt_path",
    ]
    with pytest.raises(ValueError, match=r"there is no checkpoint .*nope\.ckpt; beside it: .*last\.ckpt"):
        main([*args, str(run / "checkpoints" / "nope.ckpt")])
    with pytest.raises(ValueError, match="there is no checkpoint last"):
        main([*args, "last"])  # Lightning's word for a search that would find nothing here, and start afresh
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.ckpt is no readable checkpoint"):
        main([*args, str(cut)])
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {}, "loops": {}, "pytorch-lightning_version": "2.6.6"}, foreign)
    with pytest.raises(ValueError, match=r"foreign\.ckpt was not written by LeanGRPO"):
        main([*args, str(foreign)])


def test_another_policys_checkpoint_is_named(watched, tmp_path):
    cli, _, _ = watched
    run = run_of(cli)
    args = ["--model.init_args.policy.init_args.hidden", "9", "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    with pytest.raises(ValueError, match=r"last\.ckpt holds another policy: 3 tensors differ"):
        fit(write(tmp_path), *args)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("optimizer", "torch.optim.SGD", "the state of AdamW, which is not that of SGD"),
        (
            "lr_scheduler",
            "torch.optim.lr_scheduler.LinearLR",
            "the state of ExponentialLR, which is not that of LinearLR",
        ),
    ],
)
def test_a_resume_with_another_optimizer_or_scheduler_is_refused(option, value, message, watched, tmp_path):
    last = run_of(watched[0]) / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=message):
        fit(write(tmp_path, iterations=6), f"--model.init_args.{option}", value, "--ckpt_path", str(last))


# loggers and folders


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_root_that_cannot_hold_a_run_is_named(below, tmp_path):
    path, root = write(tmp_path), tmp_path / "prompts.txt" / below
    with pytest.raises(ValueError, match=r"trainer\.default_root_dir=.*prompts\.txt.*a folder that can be written"):
        fit(path, "--trainer.default_root_dir", str(root))


def test_both_default_loggers_share_the_run_folder(watched):
    cli, _, _ = watched
    assert [type(logger) for logger in cli.trainer.loggers] == [CSVLogger, TensorBoardLogger]
    assert {Path(logger.log_dir) for logger in cli.trainer.loggers} == {run_of(cli)}
    assert isinstance(cli.trainer.strategy.checkpoint_io, AtomicCheckpointIO)


def test_without_loggers_a_run_still_has_its_folder(tmp_path):
    run = run_of(fit(write(tmp_path, iterations=1), "--trainer.logger=false"))
    assert run == tmp_path / "runs" / "version_0"
    assert {path.name for path in run.iterdir()} == {"config.yaml", "checkpoints"}


def test_a_logger_of_the_users_is_left_as_it_is(tmp_path):
    mine = tmp_path / "mine"
    cli = fit(
        write(tmp_path, iterations=1, schedule=schedule("Native")),
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={mine}",
    )  # fmt: skip
    assert [type(logger) for logger in cli.trainer.loggers] == [CSVLogger]
    assert (mine / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_run_folders_count_up_and_are_never_shared(tmp_path, monkeypatch):
    assert [new_run_folder(tmp_path / "r").name for _ in range(2)] == ["version_0", "version_1"]
    (tmp_path / "r" / "version_9").mkdir()
    (tmp_path / "r" / "version_old").mkdir()
    assert new_run_folder(tmp_path / "r").name == "version_10"
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # another run takes version_0 after we looked
    assert new_run_folder(tmp_path / "r").name == "version_2"
