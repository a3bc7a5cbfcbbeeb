"""Question files are read as PIQA publishes them, and a broken one is answered with the line that is wrong."""

import json

import pytest

from plansmith.config import ChoicesCheck
from plansmith.verify.questions import read_questions
from plansmith_errors import ConfigError

ROW = {"goal": "Open a jar.", "sol1": "Twist the lid.", "sol2": "Paint the lid."}


def read(tmp_path, questions, labels):
    files = {"questions": tmp_path / "q.jsonl", "labels": tmp_path / "l.lst"}
    for path, content in zip(files.values(), (questions, labels), strict=True):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_questions(ChoicesCheck(**files))


def test_questions_become_the_prompts_of_the_harness(tmp_path):
    rows = [ROW, {**ROW, "id": 7, "goal": "Glue\u2028it"}]  # U+2028 ends no line of JSON
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    first, second = read(tmp_path, text, "1\r\n0\r\n")
    assert first.context == "Question: Open a jar.\nAnswer:"
    assert first.choices == ("Twist the lid.", "Paint the lid.")
    assert (first.answer, second.answer) == (1, 0)
    assert second.context == "Question: Glue\u2028it\nAnswer:"


LINE = json.dumps(ROW)


@pytest.mark.parametrize(
    ("questions", "labels", "expected"),
    [
        ("", "", r"q\.jsonl has no question"),
        ("\n \n", "0\n", r"q\.jsonl has no question"),
        (LINE, "", r"l\.lst has 0 labels for the 1 questions"),
        (f"{LINE}\n{LINE}", "0\n1\n1", r"l\.lst has 3 labels for the 2 questions"),
        (f"{LINE}\n{LINE[:20]}", "0\n1", r"q\.jsonl line 2: not valid JSON; expected an object with goal, sol1, sol2"),
        ("[" * 100_000, "0", r"q\.jsonl line 1: not valid JSON"),
        ("[1]", "0", r"line 1: found \[1\]; expected an object"),
        ('{"goal": "x", "sol1": "y"}', "0", r"line 1: 'sol2' is None; expected a text"),
        ('{"goal": "x", "sol1": " ", "sol2": "y"}', "0", r"line 1: 'sol1' is ' '; expected a text"),
        ('{"goal": 3, "sol1": "y", "sol2": "y"}', "0", r"line 1: 'goal' is 3; expected a text"),
        (LINE, "2", r"l\.lst line 1: the label is '2'; expected 0"),
        (f"{LINE}\n\n{LINE}", "0\n\nsol1" + "!" * 99, r"l\.lst line 3: the label is 'sol1!!*\.\.\.; expected 0"),
        (b"\xff\xfe", "0", r"verify\.choices\.questions: .*q\.jsonl is not UTF-8"),
        (LINE, b"\xff", r"verify\.choices\.labels: .*l\.lst is not UTF-8"),
    ],
)
def test_a_broken_file_is_answered_with_one_line(tmp_path, questions, labels, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        read(tmp_path, questions, labels)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"verify\.choices\.questions: .*absent: No such file"):
        read_questions(ChoicesCheck(questions=tmp_path / "absent", labels=tmp_path / "absent"))
