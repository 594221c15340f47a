import json
import math

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from callbacks.run_folder import finite, replacing, run_folder, write_json


def test_the_loggers_folder_comes_before_the_root(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, name="", version="a"), CSVLogger(tmp_path, name="", version="a")]
    assert run_folder(Trainer(default_root_dir=tmp_path, logger=loggers, accelerator="cpu")) == tmp_path / "a"
    assert run_folder(Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")) == tmp_path


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    with replacing(path) as temporary:
        assert temporary.suffix == ".txt"
        temporary.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_json_holds_no_number_that_json_lacks(tmp_path):
    content = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, "nan")], 3: {"c": None, "d": True}}
    assert finite(content) == {"a": None, "b": [None, 1.5, [None, "nan"]], "3": {"c": None, "d": True}}
    write_json(tmp_path / "x.json", content)

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse) == finite(content)
