import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.formats import openfst
from bpd_jax.ngrams.formats.openfst_reader import model_from_fst, model_of
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.prune import prune
from tests.ngrams.helpers import assert_same

pynini = pytest.importorskip("pynini")


def assert_same_to_float32(actual, expected):
    rounded = {
        name: tuple(array.astype(np.float32) for array in getattr(expected, name))
        for name in expected.values
    }
    assert_same(actual, dataclasses.replace(expected, **rounded))


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(0, 60),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_round_trip_restores_the_model_to_float32(sequences, order, extra):
    complete = estimate_katz(count_ngrams(sequences, order=order, vocab_size=5))
    for model in (complete, prune(complete, complete.sizes[0] + extra)):
        automaton = openfst.automaton_of(model)
        assert_same_to_float32(model_of(automaton, vocab_size=5), model)


def built(model, **options):
    automaton = openfst.automaton_of(model, **options)
    return pynini.Fst.read_from_string(openfst.encode(automaton))


def test_model_is_read_from_a_file(document_model, tmp_path):
    path = tmp_path / "model.fst"
    openfst.write_fst(document_model, path)
    for name in (path, str(path)):
        model = model_from_fst(name, vocab_size=10, end_of_text=9)
        assert_same_to_float32(model, document_model)
        assert model.end_of_text == 9
    assert model_from_fst(path).vocab_size == 9  # 9 stands for the boundaries


def test_numbering_of_states_does_not_matter(trigrams, tmp_path):
    automaton = built(trigrams)
    states = automaton.num_states()
    new_states = np.random.default_rng(1).permutation(states).tolist()
    shuffled = pynini.Fst()
    shuffled.add_states(states)
    shuffled.set_start(new_states[automaton.start()])
    for state in automaton.states():
        shuffled.set_final(new_states[state], automaton.final(state))
        for arc in automaton.arcs(state):
            target = new_states[arc.nextstate]
            shuffled.add_arc(
                new_states[state],
                pynini.Arc(arc.ilabel, arc.olabel, arc.weight, target),
            )
    shuffled.write(str(tmp_path / "shuffled.fst"))
    model = model_from_fst(tmp_path / "shuffled.fst", vocab_size=10)
    assert_same_to_float32(model, trigrams)


def test_damaged_files_are_refused(trigrams, tmp_path):
    path = tmp_path / "model.fst"
    small = prune(trigrams, trigrams.sizes[0] + 12)
    openfst.write_fst(small, path)
    data = path.read_bytes()
    # Truncated; an arc to a state that does not exist; more arcs than memory, for which
    # OpenFst ends the process.
    first = 66
    many = data[: first + 4] + (1 << 60).to_bytes(8, "little") + data[first + 12 :]
    for damaged in (data[:50], data[:-3], data[:-4] + b"\1\1\1\1", many):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.fst is not an acceptor"):
            model_from_fst(path)


def test_missing_pynini_is_one_sentence(trigrams, tmp_path, monkeypatch):
    openfst.write_fst(trigrams, tmp_path / "model.fst")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="read with the package pynini: pip install"):
        model_from_fst(tmp_path / "model.fst")


MISPLACED = "longest history|its suffix is missing"


@pytest.mark.parametrize(
    "field, backs_off, value, message",
    [
        ("weights", False, np.nan, "a weight is NaN"),
        ("weights", True, -np.inf, "back-off arc is NaN or -inf"),
        ("weights", False, -0.5, "a probability exceeds 1"),
        ("labels", False, 0, "exactly one back-off arc"),
        ("labels", False, 12, "a label is outside 0 ... 10"),
        ("targets", True, 2, MISPLACED),
        ("targets", False, 0, MISPLACED),
    ],
)
def test_other_automata_are_refused(trigrams, field, backs_off, value, message):
    """An arc of the first state is changed: its back-off arc, or one with a token."""
    automaton = openfst.automaton_of(trigrams)
    arcs = (automaton.sources == automaton.start) & (
        (automaton.labels == 0) == backs_off
    )
    array = getattr(automaton, field).copy()
    array[np.flatnonzero(arcs)[0]] = value
    with pytest.raises(ValueError, match=message):
        model_of(automaton._replace(**{field: array}), vocab_size=10)
    with pytest.raises(ValueError, match=MISPLACED):
        model_of(automaton._replace(start=0), vocab_size=10)


def test_cycle_of_back_off_arcs_is_refused(trigrams):
    automaton = openfst.automaton_of(trigrams)
    targets = automaton.targets.copy()
    first, second = np.flatnonzero((automaton.labels == 0) & (automaton.sources > 1))[
        :2
    ]
    targets[first] = automaton.sources[second]
    targets[second] = automaton.sources[first]
    with pytest.raises(ValueError, match="form a cycle"):
        model_of(automaton._replace(targets=targets), 10)


def test_files_of_other_formats_are_refused(document_model, tmp_path):
    path = tmp_path / "other.fst"
    with pytest.raises(UserError, match="cannot read"):
        model_from_fst(path)
    for fst, message in (
        (pynini.cross("a", "b"), "different input and output labels"),
        (pynini.accep("abc"), "every state but one"),
        (pynini.Fst(), r"other\.fst"),
        (pynini.accep("a", arc_type="log"), "not an acceptor with standard arcs"),
        (built(document_model, continuous=True), "is not an n-gram model"),
    ):
        fst.write(str(path))
        with pytest.raises(UserError, match=message):
            model_from_fst(path)
