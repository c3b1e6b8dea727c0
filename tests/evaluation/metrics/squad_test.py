"""Tests of exact match and F1, by hand and by a second implementation."""

import string

import pytest

from bpd_jax.evaluation.metrics import squad


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("The  U.S.A.'s a-bomb", "usas abomb"),
        ("\tan apple,\n a pear and THE theme ", "apple pear and theme"),
        ("a.m.", "am"),
        ("The", ""),
        ("Łódź – “the” city", "łódź – “ ” city"),  # only ASCII punctuation is removed
        ("$1,000 (1.5%)", "1000 15"),
    ],
)
def test_texts_are_normalized(text, wanted):
    assert squad.normalize(text) == wanted


@pytest.mark.parametrize(
    "prediction, references, exact, f1",
    [
        ("the Nobel Prize.", ["Nobel Prize"], 1, 1),
        # 2 of 3 words are right, and 2 of 2 are found: 2 · 2 / (3 + 2).
        ("first Nobel prize", ["Nobel Prize"], 0, 4 / 5),
        # The best reference is used: 1 of 2 and 1 of 1 against 1 of 2 and 1 of 4.
        ("July 1776", ["1776", "the 4th of July of 1776"], 0, 2 / 3),
        # Words are compared as multisets: 2 of 3 and of 2.
        ("ha ha ha", ["ha, ha!"], 0, 4 / 5),
        ("", ["1745"], 0, 0),
        ("seven", ["1745"], 0, 0),
        ("the", ["A"], 1, 1),
    ],
)
def test_scores_of_examples_computed_by_hand(prediction, references, exact, f1):
    scores = squad.scores(prediction, references)
    assert scores == {"exact_match": exact, "f1": pytest.approx(f1)}


def perturbed(answer, number):
    """Variants of a correct answer."""
    words = answer.split()
    return [
        answer,
        f"The answer is {answer}.",
        answer.upper(),
        f" '{answer}' , an",
        " ".join(words[1:]),
        " ".join(reversed(words)),
        " ".join([*words, *words]),
        answer.replace("-", " "),
        "\u00a0".join(words),
        f"{words[0] if words else ''} {number}",
    ][number % 10]


@pytest.fixture(scope="module")
def cases(records):
    answers = []
    for number, record in enumerate(records("squad/validation", 3000)):
        references = record["answers"]["text"]
        answers.append(
            (perturbed(references[number % len(references)], number), references)
        )
    return answers


def restated(text):
    """A second implementation of the rules, without regular expressions."""
    kept = [c for c in text.lower() if c not in string.punctuation]
    words, word = [], []
    for character in [*kept, " "]:
        if character.isalnum() or character == "_":
            word.append(character)
            continue
        words.append("".join(word))
        words.append(character)
        word = []
    return "".join(" " if w in ("a", "an", "the") else w for w in words).split()


def restated_f1(predicted, wanted):
    if not predicted or not wanted:
        return float(predicted == wanted)
    remaining, shared = list(wanted), 0
    for word in predicted:
        if word in remaining:
            remaining.remove(word)
            shared += 1
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def test_scores_of_real_answers_match_the_rules(cases):
    exact = 0
    for prediction, references in cases:
        predicted = restated(prediction)
        correct = [restated(reference) for reference in references]
        expected = {
            "exact_match": float(predicted in correct),
            "f1": pytest.approx(
                max(restated_f1(predicted, words) for words in correct)
            ),
        }
        assert squad.scores(prediction, references) == expected, prediction
        exact += predicted in correct
    assert 0.2 * len(cases) < exact < 0.8 * len(cases)
