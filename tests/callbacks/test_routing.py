import pytest

from callbacks.routing import check_routes, matches, unserved

GENEVAL, OCR, PLAIN = {"tag": "colors", "n": 2}, {"text": "exit"}, {}


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ({"tag": ["colors", "counting"]}, [True, False, False]),
        ({"tag": ["counting"]}, [False, False, False]),
        ({"tag": "present"}, [True, False, False]),
        ({"tag": "absent"}, [False, True, True]),
        ({"tag": "absent", "text": "present"}, [False, True, False]),
        ({"n": [2, 3], "tag": ["colors"]}, [True, False, False]),
        ({"n": [3], "tag": ["colors"]}, [False, False, False]),
        ({}, [True, True, True]),
    ],
)
def test_all_conditions_must_hold(route, expected):
    assert [matches(route, row) for row in (GENEVAL, OCR, PLAIN)] == expected


def test_values_that_cannot_be_hashed_are_compared():
    assert matches({"box": [[1, 2]]}, {"box": [1, 2]})
    assert not matches({"box": [[1, 2]]}, {"box": [1, 3]})


def test_unserved_prompts():
    rows = [GENEVAL, OCR, PLAIN]
    assert unserved(rows, [{"tag": "present"}, {"text": "present"}]) == [2]
    assert unserved(rows, [{"tag": "present"}, None]) == []
    assert unserved(rows, []) == [0, 1, 2]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"other": {"tag": "present"}}, r"routes of \['other'\].*among \['r'\]"),
        ({"r": {}}, "route of 'r' is {}"),
        ({"r": ["tag"]}, r"route of 'r' is \['tag'\]"),
        ({"r": {"tag": "colors"}}, "asks for tag: 'colors'; give a list"),
        ({"r": {"tag": []}}, r"asks for tag: \[\]"),
    ],
)
def test_routes_are_checked(routes, message):
    with pytest.raises(ValueError, match=message):
        check_routes(routes, ["r"])
