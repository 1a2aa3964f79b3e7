"""`wb.verifiers.instructions`: each instruction of IFEval on a response that follows it and one that does not, and on a
table of what the authors' code decides.

`ifeval.json` holds answers, and for each instruction with arguments "1" for an answer that follows it and "0" for one
that does not, by `check_following` of the authors' code with nltk 3.10.4; the numbers of sentences and of words in
capitals are those of its `count_sentences` and `nltk.word_tokenize`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.data.instructions import INSTRUCTIONS, capital_word_count, sentence_count
from workbench.errors import BadInput

TABLE = json.loads(Path(__file__).with_name("ifeval.json").read_text())
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sun", "moon"]}, "Sunset and the moon.", "The son and the moon."),
    "keywords:frequency": ({"keyword": "a", "frequency": 2, "relation": "at least"}, "a b A", "a b"),
    "keywords:forbidden_words": ({"forbidden_words": ["no"]}, "Not now", "Now: no!"),
    "keywords:letter_frequency": ({"letter": "E", "let_frequency": 2, "let_relation": "less than"}, "hello", "eel"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "It's a well-known", "one, two"),
    "length_constraints:number_sentences": ({"num_sentences": 3, "relation": "less than"}, "A b. C!", "A. B? C"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}, "One.\n\nThen two.", "Then.\n\nOne."
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name] at [place"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Dear you.\nP. S. more", "Dear you. PS more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n- two", "* one\n**two**"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 a SECTION 2 b", "SECTION 1 a"
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<poem of joy>>\ntext", "<poem>\n<< >>"),
    "detectable_format:constrained_response": ({}, "Well: My answer is no.", "My answer is unclear."),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, "That is all. Any questions?", "Any questions? No."),
    "startend:quotation": ({}, ' "quoted" ', '"quoted'),
    "change_case:english_capital": ({}, "ALL 3 OF THEM!", "All"),
    "change_case:english_lowercase": ({}, "all 3 of them!", "All"),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "less than"}, "ONE two", "A B"),
    "punctuation:no_comma": ({}, "no commas; none", "one, two"),
}  # fmt: skip


def test_an_instruction() -> None:
    for name in INSTRUCTIONS:
        values, right, wrong = CASES[name]
        row: dict[str, Any] = {"instruction_id_list": [name], "kwargs": [{**values, "unused": None}]}
        assert wb.verifiers.instructions("", right, **row) == 1.0
        assert wb.verifiers.instructions("", wrong, **row) == 0.0
        assert wb.verifiers.instructions("", "", **row) == 0.0


def test_the_share_that_is_followed() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    assert wb.verifiers.instructions("", "No comma", instruction_id_list=names) == 0.5


def test_as_the_authors_code_decides() -> None:
    for case in TABLE["cases"]:
        row = {"instruction_id_list": [case["instruction"]], "kwargs": [case["kwargs"]]}
        decided = "".join(str(int(wb.verifiers.instructions("", answer, **row))) for answer in TABLE["answers"])
        assert decided == case["followed"]


def test_counts_by_rules_are_close_to_those_of_nltk() -> None:
    """Of 3,127 texts made from 540 answers of GPT-4 they are equal in 93 % (sentences) and 99 % (capitals)."""
    sentences = [sentence_count(answer) for answer in TABLE["answers"]]
    assert sum(a == b for a, b in zip(sentences, TABLE["sentences"], strict=True)) == 45
    assert [capital_word_count(answer) for answer in TABLE["answers"]] == TABLE["capital_words"]
    assert sentence_count(" ") == 0


UNITS: list[str] = ["a", "\n", " ", "*", "[", "<<", "a.", "! ", "a'", "\n ", "[a", "p."]


def test_time_grows_with_the_length() -> None:
    """A quadratic rule takes hours for these 100,000 characters."""
    for unit in UNITS:
        text, began = unit * (100_000 // len(unit)) + "x", time.process_time()
        for name in INSTRUCTIONS:
            wb.verifiers.instructions("", text, instruction_id_list=[name], kwargs=[CASES[name][0]])
        assert time.process_time() - began < 5


def test_rows_that_are_refused() -> None:
    with expect_error(BadInput, value="no_comma"):
        wb.verifiers.instructions("", "a", instruction_id_list=["punctuation:no_commas"])
    with expect_error(BadInput, rule="num_words"):
        wb.verifiers.instructions("", "a", instruction_id_list=["length_constraints:number_words"])
    row: dict[str, Any] = {"num_words": 1, "relation": "more"}
    with expect_error(BadInput, rule="'at least' or 'less than'"):
        wb.verifiers.instructions("", "a", instruction_id_list=["length_constraints:number_words"], kwargs=[row])
    with expect_error(BadInput, value="1 instructions with 0 kwargs"):
        wb.verifiers.instructions("", "a", instruction_id_list=["punctuation:no_comma"], kwargs=[])


@pytest.mark.parametrize("row", [{"instruction_id_list": None}, {"kwargs": 5}, {"kwargs": [5]}, {"kwargs": ["ab"]}])
def test_columns_of_another_kind(row: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(row))}.*must be"):
        wb.verifiers.instructions("", "a", **{"instruction_id_list": ["punctuation:no_comma"], **row})
