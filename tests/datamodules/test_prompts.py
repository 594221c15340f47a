import json
import unicodedata
import warnings
from pathlib import Path

import pytest

from datamodules import prompts as module
from datamodules.prompts import Prompt, find_prompt_file, load_prompts


@pytest.fixture
def write(tmp_path):
    def _write(name: str, content: bytes | str) -> Path:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return _write


def texts(file: Path) -> list[str]:
    return [prompt.text for prompt in load_prompts(file)]


def test_text_file_is_a_prompt_a_line(write):
    file = write("p.txt", "a red circle\n  two squares \n")
    assert load_prompts(file) == [
        Prompt(text="a red circle", metadata={"prompt": "a red circle"}),
        Prompt(text="two squares", metadata={"prompt": "two squares"}),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", "_metadata.jsonl", ".JSONL"])
def test_json_lines_keep_the_whole_row_as_metadata(write, suffix):
    row = {"tag": "counting", "include": [{"class": "bench", "count": 2}], "prompt": "a photo of two benches"}
    (prompt,) = load_prompts(write(f"p{suffix}", json.dumps(row)))
    assert prompt.text == "a photo of two benches"
    assert prompt.metadata == row


def test_byte_order_mark_windows_line_ends_blank_lines_and_missing_last_line_end(write):
    assert texts(write("p.txt", b"\xef\xbb\xbffirst\r\n\r\n   \t\r\nsecond")) == ["first", "second"]
    assert texts(write("p.jsonl", b'\xef\xbb\xbf{"prompt": "first"}\r\n\r\n{"prompt": "second"}\r\n')) == [
        "first",
        "second",
    ]


def test_text_is_not_normalised_nor_split_at_unicode_separators(write):
    decomposed = unicodedata.normalize("NFD", "ein grüner Kreis")
    assert texts(write("p.txt", f"{decomposed}\n红色的圆 🔴\n")) == [decomposed, "红色的圆 🔴"]
    assert texts(write("p.jsonl", '{"prompt": "one\u2028two\x85three"}\n')) == ["one\u2028two\x85three"]


def test_duplicates_are_kept_with_one_warning_that_counts_them(write):
    file = write("p.txt", "a\nb\na\na\nc\nb\n")
    with pytest.warns(UserWarning, match="3 of 6 prompts repeat") as caught:
        assert texts(file) == ["a", "b", "a", "a", "c", "b"]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_prompts(write("q.txt", "a\nb\n"))


def test_a_line_of_megabytes_is_only_a_long_prompt(write):
    assert texts(write("p.txt", "x" * 5_000_000 + "\nshort\n"))[1] == "short"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.txt", b"", "holds no prompt"),
        ("p.jsonl", b"\xef\xbb\xbf\r\n \n", "holds no prompt"),
        ("p.txt", b"fine\nbroken \xff\n", "line 2: byte 7 .0xff. is not UTF-8; save"),
        ("p.txt", b"fine\n\nhalf \xe2\x82", "line 3: byte 5"),
        ("p.txt", "ab\n".encode("utf-16-le"), "line 1: .*U\\+0000.*save as UTF-8"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ("p.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("p.jsonl", '{"prompt": ' + "9" * 5000 + "}", "line 1: not valid JSON"),
        ("p.jsonl", '\n["prompt"]\n', "line 2: .* no JSON object; write"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b", "id": 1}\n', r"line 2: no field 'prompt' among \['id', 'text'\]"),
        ("p.jsonl", '{"prompt": 3}', "line 1: 'prompt' is 3; write it as a string"),
        ("p.jsonl", '{"prompt": null}', "line 1: 'prompt' is None"),
        ("p.jsonl", '{"prompt": ""}', "line 1: 'prompt' is blank"),
        ("p.jsonl", '{"prompt": " \\t"}', "line 1: 'prompt' is blank"),
        ("p.jsonl", '{"prompt": "a\\u0000b"}', "line 1: .*U\\+0000"),
        ("p.jsonl", '{"prompt": "half \\ud83d"}', "line 1: .*U\\+D83D"),
        ("p.csv", "prompt\na\n", r"\.txt .* or \.jsonl"),
    ],
)
def test_bad_files_are_refused_with_file_line_and_remedy(write, name, content, complaint):
    file = write(name, content)
    with pytest.raises(ValueError, match=complaint) as error:
        load_prompts(file)
    assert file.name in str(error.value)
    assert len(str(error.value)) < 500 + len(str(file))


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=r"folder\.txt is not a regular file"):
        load_prompts(tmp_path / "folder.txt")
    with pytest.raises(ValueError, match=r"not found.*nowhere\.jsonl.*correct the path"):
        load_prompts(tmp_path / "nowhere.jsonl")


def test_relative_paths_try_the_working_directory_then_the_packages_folder(tmp_path, monkeypatch):
    packages, elsewhere = tmp_path / "packages", tmp_path / "elsewhere"
    for folder in (packages, elsewhere):
        folder.mkdir()
    (packages / "p.txt").write_text("packaged")
    monkeypatch.setattr(module, "PACKAGE_ROOT", packages)
    monkeypatch.chdir(elsewhere)
    assert find_prompt_file("p.txt") == packages / "p.txt"
    (elsewhere / "p.txt").write_text("own")
    assert find_prompt_file("p.txt") == elsewhere / "p.txt"
    with pytest.raises(ValueError) as error:
        find_prompt_file("q.txt")
    assert str(packages / "q.txt") in str(error.value) and str(elsewhere / "q.txt") in str(error.value)


def test_the_packages_folder_is_the_repository(repository):
    assert repository == module.PACKAGE_ROOT
