import base64
import io
import json
import time

import numpy as np
import pytest
import torch
from PIL import Image

from callbacks.reward_scoring import RewardScoring
from rewards.endpoint import EndpointError
from rewards.vlm import JsonParser, RegexParser, VLMJudge
from tests.loop import fit, module
from tests.rewards.loopback import free_port, scripted

pytestmark = pytest.mark.timeout(20)
SCORE = RegexParser(r"final score:\s*(?P<score>-?\d+(\.\d+)?)")
IMAGES = torch.rand(3, 3, 4, 6)
PROMPTS = ["a cat", "a dog", "{prompt} in braces"]


def completion(text, finish="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


def judge_server(reply):
    """Lists the model ``judge``; answers a question by ``reply(text, number)``: the answer's text, or (status, content)."""
    asked = []

    def script(number, handler, body):
        if handler.path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "judge"}, {"id": "other"}]}
        assert handler.path == "/v1/chat/completions"
        asked.append(json.loads(body))
        said = reply(asked[-1]["messages"][-1]["content"][-1]["text"], len(asked) - 1)
        return (200, completion(said)) if isinstance(said, str) else said

    context = scripted(script)
    context.asked = asked
    return context


def judge(server, **options):
    url = server if isinstance(server, str) else server.url
    defaults = {"model": "judge", "template": 'Rate "{prompt}" {1-5}.', "parser": SCORE, "low": 1.0, "high": 5.0}
    return VLMJudge(f"{url}/v1", **(defaults | {"backoff_s": 0.0, "timeout_s": 5.0} | options))


def score(reward, images=IMAGES, prompts=PROMPTS):
    return reward(images, prompts, [{}] * len(prompts))


def decoded(part):
    head, data = part["image_url"]["url"].split(",")
    assert (part["type"], head) == ("image_url", "data:image/png;base64")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_the_question_holds_image_prompt_and_settings():
    with (context := judge_server(lambda text, number: "Final score: 3")) as server:
        scores = score(judge(server, system="Be fair.", max_tokens=9, concurrency=1))
    assert scores.tolist() == [0.5] * 3
    for asked, image, prompt in zip(context.asked, IMAGES, PROMPTS, strict=True):
        assert {key: asked[key] for key in asked if key != "messages"} == {
            "model": "judge",
            "temperature": 0,
            "max_tokens": 9,
        }
        system, user = asked["messages"]
        assert system == {"role": "system", "content": "Be fair."}
        picture, text = user["content"]
        assert text == {"type": "text", "text": f'Rate "{prompt}" {{1-5}}.'}
        assert np.array_equal(decoded(picture), (image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))


def test_of_a_video_every_nth_frame_is_shown():
    video = (torch.arange(7) / 6).reshape(1, 1, 7, 1, 1).expand(1, 3, 7, 2, 2)
    with (context := judge_server(lambda text, number: "Final score: 5")) as server:
        assert score(judge(server, frames_every=3), video, ["p"]).tolist() == [1.0]
    (user,) = context.asked[0]["messages"]
    *frames, text = user["content"]
    assert [decoded(frame)[0, 0, 0] for frame in frames] == [0, 128, 255]
    assert text["type"] == "text"


def test_scores_come_in_order_whatever_answers_first():
    def reply(text, number):
        time.sleep(0.02 * (5 - int(text)))
        return f"Final score: {text}"

    with judge_server(reply) as server:
        scores = score(judge(server, template="{prompt}"), torch.rand(5, 3, 2, 2), list("12345"))
    assert scores.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("Final score: 4", 4.0),
        ("FINAL SCORE:4.5, surely", 4.5),
        ("At first I thought final score: 2, but no.\nFinal score: 4", 4.0),
        ("final score: -3", -3.0),
    ],
)
def test_the_pattern_finds_the_last_number(answer, number):
    assert SCORE.parse(answer) == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ('{"score": 4}', 4.0),
        ('```json\n{"why": "a {brace}", "score": "4.5"}\n```', 4.5),
        ('{"score": 1} no: {"score": 2} {"other": 9} { broken', 2.0),
        ('{"broken": {"score": 3}', 3.0),
    ],
)
def test_the_json_field_is_found_whatever_stands_around(answer, number):
    assert JsonParser("score").parse(answer) == number


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        (SCORE, "It is good."),
        (SCORE, ""),
        (RegexParser("score (?P<score>.*)"), "score many"),
        (RegexParser("none|score (?P<score>.*)"), "none"),
        (JsonParser(), "4"),
        (JsonParser(), '{"grade": 4}'),
        (JsonParser(), '{"score": true}'),
        (JsonParser(), '{"score": [4]}'),
        (JsonParser(), '{"score": ' + "9" * 400 + "}"),
        (JsonParser(), '{"score": 4'),
        (JsonParser(), '{"a":' * 5000),
    ],
)
def test_an_answer_without_a_number_is_refused(parser, answer):
    with pytest.raises(ValueError):
        parser.parse(answer)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("I cannot tell.", "unusable answer .no match of"),
        ("Final score: 6", r"6.0 lies outside \[1.0, 5.0\]"),
        ("Final score: 0", r"0.0 lies outside"),
        ((200, completion("Final score: 3", "length")), "cut at max_tokens=512"),
        ((200, completion(None)), "the answer is no text: None"),
        ((200, {"choices": []}), "no chat completion"),
        ((200, {"error": "overloaded"}), "no chat completion: .*overloaded"),
        ((400, {"error": {"message": "image too small"}}), "status 400: image too small"),
        ((200, b"garbage"), "no JSON.*garbage"),
    ],
)
def test_a_sample_without_a_usable_answer_is_nan_and_the_others_keep_theirs(bad, reason):
    with (
        judge_server(lambda text, number: bad if "a dog" in text else "Final score: 2") as server,
        pytest.warns(
            UserWarning, match=f"judge judge: no score for 1 of 3 samples; the first, prompt 'a dog': .*{reason}"
        ),
    ):
        scores = score(judge(server))
    assert scores.isnan().tolist() == [False, True, False]
    assert scores[[0, 2]].tolist() == [0.25, 0.25]


def test_nan_in_the_answer_is_no_score():
    with (
        judge_server(lambda text, number: "score nan") as server,
        pytest.warns(UserWarning, match="nan lies outside"),
    ):
        assert score(judge(server, parser=RegexParser("score (?P<score>.*)"))).isnan().all()


def test_what_passes_is_asked_again_and_a_dead_judge_is_an_error():
    with (context := judge_server(lambda t, n: (429, b"") if n < 2 else "Final score: 1")) as server:
        assert score(judge(server, concurrency=1)).tolist() == [0.0] * 3
    assert len(context.asked) == 5
    with (context := judge_server(lambda t, n: (500, {"error": "out of memory"}))) as server:
        with pytest.raises(EndpointError, match=r"out of memory \(2 attempts\)"):
            score(judge(server, concurrency=1, retries=1))
        assert len(context.asked) == 2  # the endpoint rests: the other samples are not tried


def test_the_check_before_the_first_rollout(monkeypatch):
    with judge_server(lambda text, number: "Final score: 3") as server:
        judge(server).load()
        with pytest.raises(ValueError, match="serves no 'jugde', but .'judge', 'other'"):
            judge(server, model="jugde").load()
        with pytest.raises(ValueError, match="variable JUDGE_KEY is not set"):
            judge(server, api_key_env="JUDGE_KEY").load()
        monkeypatch.setenv("JUDGE_KEY", "sk-1")
        judge(server, api_key_env="JUDGE_KEY").load()
        assert [headers["Authorization"] for _, headers, _ in server.seen] == [None, None, "Bearer sk-1"]
    with pytest.raises(ValueError, match="no judge to be had .*up to /v1"):
        judge(f"http://127.0.0.1:{free_port()}", retries=0).load()
    for answer, message in (((200, {"models": []}), "is no list of models"), ((404, b""), "status 404")):
        with scripted(lambda *request, answer=answer: answer) as server, pytest.raises(ValueError, match=message):
            judge(server).load()


def test_the_identity_is_plain_and_holds_no_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    identity = judge("http://localhost:1", api_key_env="JUDGE_KEY").identity()
    assert "sk-secret" not in json.dumps(identity)
    assert identity["parser"] == {"class": "RegexParser", "pattern": SCORE.pattern.pattern}
    assert (identity["model"], identity["low"], identity["high"]) == ("judge", 1.0, 5.0)
    assert judge("http://localhost:1", parser=JsonParser("grade")).identity()["parser"]["field"] == "grade"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Rate this."}, "has no {prompt}"),
        ({"low": 5.0}, r"low=5.0, high=5.0"),
        ({"high": float("inf")}, "finite"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"frames_every": 0}, "frames_every=0"),
        ({"concurrency": 0}, "concurrency=0"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        judge("http://localhost:1", **options)


@pytest.mark.parametrize("pattern", ["(", r"score (\d+)"])
def test_a_pattern_must_have_the_group(pattern):
    with pytest.raises(ValueError, match="no regular expression|no group"):
        RegexParser(pattern)


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_training_stops_at_an_unusable_answer_or_drops_it(on_error, tmp_path):
    with judge_server(lambda text, number: "Hm." if number % 8 == 0 else "Final score: 4") as server:
        scoring = RewardScoring({"judge": judge(server, concurrency=1)}, on_error=on_error)
        with pytest.warns(UserWarning, match="no match of"):
            if on_error == "raise":
                with pytest.raises(ValueError, match="reward 'judge' failed in iteration 0 on prompt"):
                    fit(module(), 1, root=tmp_path, scorer=scoring)
            else:
                metrics = fit(module(), 1, root=tmp_path, scorer=scoring)
                assert metrics[0]["dropped_samples"] == 1.0 and metrics[0]["reward/judge"] == 0.75
