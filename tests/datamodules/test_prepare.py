import csv
import hashlib
import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from datamodules.prepare import CATEGORIES, SETS, STYLES, main, prepare
from datamodules.prompts import load_prompts

GENEVAL = b"".join(
    json.dumps(
        {"tag": "colors", "include": [{"class": "kite", "count": 1, "color": c}], "prompt": f"a {c} kite"}
    ).encode()
    + b"\n"
    for c in ("red", "green", "blue")
)


@pytest.fixture
def geneval(monkeypatch):
    """GenEval's set with a small stand-in for the official file."""
    source = replace(SETS["geneval"].sources[0], sha256=hashlib.sha256(GENEVAL).hexdigest())
    monkeypatch.setitem(SETS, "geneval", replace(SETS["geneval"], sources=(source,)))
    return source


def write_hpdv2(folder, **changed):
    for style in STYLES:
        prompts = changed.get(style, [f"a {style} scene, number {i}" for i in range(800)])
        (folder / f"{style}.json").write_text(json.dumps(prompts, ensure_ascii=False), encoding="utf-8")


def drawbench(rows=200, header=("Prompts", "Category"), categories=CATEGORIES, tail=""):
    table = io.StringIO()
    writer = csv.writer(table, quoting=csv.QUOTE_ALL)
    writer.writerow(header)
    writer.writerows((f'A "quoted", odd\nprompt {i}', categories[i % len(categories)]) for i in range(rows))
    return table.getvalue() + tail


def test_geneval_is_written_byte_for_byte(tmp_path, geneval):
    (tmp_path / "evaluation_metadata.jsonl").write_bytes(GENEVAL)
    prepared = prepare("geneval", tmp_path / "to", tmp_path)
    assert prepared.file.read_bytes() == GENEVAL
    assert prepared.verified and prepared.prompts == 3
    assert prepared.sha256 == {"evaluation_metadata.jsonl": geneval.sha256}
    assert [prompt.text for prompt in load_prompts(prepared.file)] == ["a red kite", "a green kite", "a blue kite"]


def test_a_single_file_may_have_any_name(tmp_path, geneval):
    (tmp_path / "copy").write_bytes(GENEVAL)
    assert prepare("geneval", tmp_path, tmp_path / "copy").file == tmp_path / "geneval_metadata.jsonl"


@pytest.mark.parametrize("content", [GENEVAL[:-20], GENEVAL.replace(b"red", b"tan"), b"", GENEVAL + b"\n"])
def test_a_truncated_or_altered_file_is_refused_and_nothing_written(tmp_path, geneval, content):
    (tmp_path / "copy").write_bytes(content)
    with pytest.raises(
        ValueError, match=f"truncated or altered: .*official file's {geneval.sha256}; get it again from http"
    ):
        prepare("geneval", tmp_path / "to", tmp_path / "copy")
    assert not (tmp_path / "to").exists()


def test_hpdv2_keeps_styles_and_order(tmp_path):
    write_hpdv2(tmp_path, paintings=[f"Gemälde\u2028{i}" for i in range(800)])
    prepared = prepare("hpdv2", tmp_path / "to", tmp_path)
    prompts = load_prompts(prepared.file)
    assert len(prompts) == prepared.prompts == 3200 and not prepared.verified
    assert [prompts[i].metadata["style"] for i in (0, 799, 800, 1600, 2400, 3199)] == [STYLES[0], *STYLES, STYLES[3]]
    assert prompts[801].text == "a concept-art scene, number 1" and prompts[1602].text == "Gemälde\u20282"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (["one prompt"] * 799, "photo.json holds 799 prompts, the official file 800"),
        (["one prompt"] * 799 + [" "], "expected a list of prompts"),
        ([{"prompt": "a"}] * 800, "expected a list of prompts"),
        ({"prompts": []}, "expected a list of prompts"),
        (["a\0b"] * 800, r"hpdv2, prompt 2401: the prompt holds U\+0000"),
    ],
)
def test_hpdv2_of_another_form_is_refused(tmp_path, content, complaint):
    write_hpdv2(tmp_path, photo=content)
    with pytest.raises(ValueError, match=complaint):
        prepare("hpdv2", tmp_path / "to", tmp_path)
    assert not (tmp_path / "to").exists()


def test_a_truncated_json_and_a_missing_style_are_refused(tmp_path):
    write_hpdv2(tmp_path)
    (tmp_path / "anime.json").write_bytes((tmp_path / "anime.json").read_bytes()[:-3])
    with pytest.raises(ValueError, match="anime.json is truncated or altered"):
        prepare("hpdv2", tmp_path / "to", tmp_path)
    with pytest.raises(ValueError, match="is no folder: give one that holds anime.json, concept-art.json"):
        prepare("hpdv2", tmp_path / "to", tmp_path / "anime.json")
    for content in (b"[" * 100_000, json.dumps(["\ud800"] * 800).encode()):
        (tmp_path / "anime.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"anime.json is truncated or altered|prompt 1: the prompt holds U\+D800"):
            prepare("hpdv2", tmp_path / "to", tmp_path)
    (tmp_path / "anime.json").unlink()
    with pytest.raises(
        ValueError, match=r"cannot read .*anime.json .*give a copy of https://huggingface.co/datasets/zhwang"
    ):
        prepare("hpdv2", tmp_path / "to", tmp_path)


def test_drawbench_keeps_prompts_as_written(tmp_path):
    (tmp_path / "drawbench.csv").write_text("\ufeff" + drawbench(tail='"",""\r\n'), encoding="utf-8", newline="")
    prepared = prepare("drawbench", tmp_path / "to", tmp_path)
    prompts = load_prompts(prepared.file)
    assert len(prompts) == 200
    assert prompts[12].metadata == {"prompt": 'A "quoted", odd\nprompt 12', "category": CATEGORIES[1]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (drawbench(199), "199 prompts"),
        (drawbench(200, categories=CATEGORIES[:10]), "in the categories"),
        ("Category,Prompts\n" + "Colors\n" * 200, r"200 prompts \(200 blank\)"),
        (drawbench(200, header=("Prompts", "Category", "Prompts")), "expected Prompts and Category once each"),
        (drawbench(200, header=("Prompts", "Kind")), r"has the columns \['prompts', 'kind'\]"),
        ("", r"has the columns \[\]"),
        (drawbench()[:-30], "truncated or altered"),  # inside a quoted field
        ("<html>Sign in</html>", "has the columns"),
    ],
)
def test_drawbench_of_another_form_is_refused(tmp_path, content, complaint):
    (tmp_path / "drawbench.csv").write_text(content, newline="")
    with pytest.raises(ValueError, match=complaint):
        prepare("drawbench", tmp_path / "to", tmp_path)


def test_files_without_a_known_checksum_are_recorded_and_held_to_it(tmp_path):
    write_hpdv2(tmp_path)
    first = prepare("hpdv2", tmp_path / "to", tmp_path)
    record = json.loads((tmp_path / "to" / "hpdv2.source.json").read_text())
    assert record["prompts"] == 3200
    assert {file["name"]: file["sha256"] for file in record["files"]} == first.sha256
    assert not any(file["known_sha256"] for file in record["files"])
    assert prepare("hpdv2", tmp_path / "to", tmp_path) == first  # again, unchanged
    write_hpdv2(tmp_path, photo=[f"another photo {i}" for i in range(800)])
    with pytest.raises(ValueError, match=r"photo.json has SHA-256 .*an earlier run got .*delete the record"):
        prepare("hpdv2", tmp_path / "to", tmp_path)
    (tmp_path / "to" / "hpdv2.source.json").unlink()
    assert prepare("hpdv2", tmp_path / "to", tmp_path).sha256 != first.sha256


@pytest.fixture
def served(monkeypatch, geneval):
    """Serve GenEval's stand-in over HTTP: ``served["announced"]`` bytes announced, ``served["status"]`` answered."""
    monkeypatch.setenv("no_proxy", "*")
    state = {"announced": len(GENEVAL), "status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(state["status"])
            self.send_header("Content-Length", str(state["announced"]))
            self.end_headers()
            self.wfile.write(GENEVAL)

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        source = replace(geneval, url=f"http://127.0.0.1:{server.server_port}/evaluation_metadata.jsonl")
        monkeypatch.setitem(SETS, "geneval", replace(SETS["geneval"], sources=(source,)))
        yield state
        server.shutdown()
        thread.join()


def test_the_network_is_used_without_a_local_copy(tmp_path, served):
    assert prepare("geneval", tmp_path).file.read_bytes() == GENEVAL


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"announced": len(GENEVAL) + 100}, "broke off 100 bytes before its end"),
        ({"announced": len(GENEVAL) - 100}, "truncated or altered"),
        ({"status": 404}, "cannot download http.*404.*--from FOLDER"),
    ],
)
def test_a_broken_download_is_refused(tmp_path, served, change, complaint):
    served.update(change)
    with pytest.raises(ValueError, match=complaint):
        prepare("geneval", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path, geneval, capsys):
    (tmp_path / "copy").write_bytes(GENEVAL)
    assert main(["geneval", "--to", str(tmp_path / "to"), "--from", str(tmp_path / "copy")]) == 0
    printed = capsys.readouterr().out
    assert "3 prompts, written to" in printed and geneval.sha256 in printed and "equal to the official" in printed
    (tmp_path / "copy").write_bytes(GENEVAL[:-1])
    assert main(["geneval", "--to", str(tmp_path / "other"), "--from", str(tmp_path / "copy")]) == 1
    assert "geneval: evaluation_metadata.jsonl is truncated or altered" in capsys.readouterr().err
    write_hpdv2(tmp_path)
    assert main(["hpdv2", "--to", str(tmp_path / "to"), "--from", str(tmp_path)]) == 0
    assert "no official checksum is known" in capsys.readouterr().out


def test_an_unknown_set(tmp_path):
    with pytest.raises(ValueError, match="'parti': choose one of geneval, hpdv2, drawbench"):
        prepare("parti", tmp_path)
