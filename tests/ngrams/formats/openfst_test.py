import dataclasses

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.formats.openfst import (
    StateTable,
    automaton_of,
    encode,
    write_fst,
)
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune
from tests.ngrams.helpers import ODD_ARPA, tables_of

pynini = pytest.importorskip("pynini")


def built(model, *, continuous=False):
    automaton = automaton_of(model, continuous=continuous)
    return pynini.Fst.read_from_string(encode(automaton))


def histories(model):
    known = {gram[:-1] for gram in tables_of(model)[0]}
    if model.order > 1:
        known.add((model.bos,))
    return sorted(known, key=lambda history: (len(history), history))


def arc_by_arc(model):
    scores, weights = tables_of(model)
    states = histories(model)

    def longest(history):
        while history not in states:
            history = history[1:]
        return states.index(history)

    automaton = pynini.Fst()
    automaton.add_states(len(states))
    automaton.set_start(states.index((model.bos,)) if model.order > 1 else 0)
    for state, history in enumerate(states):
        if history:
            weight = pynini.Weight("tropical", -weights[history])
            automaton.add_arc(state, pynini.Arc(0, 0, weight, longest(history[1:])))
        for token in range(model.vocab_size):
            if (*history, token) in scores:
                weight = pynini.Weight("tropical", -scores[(*history, token)])
                target = longest((*history, token))
                arc = pynini.Arc(token + 1, token + 1, weight, target)
                automaton.add_arc(state, arc)
        if (*history, model.eos) in scores:
            automaton.set_final(state, -scores[(*history, model.eos)])
    return automaton


def forced_cost(automaton, tokens):
    state, cost = automaton.start(), 0.0
    for token in tokens:
        arcs = {arc.ilabel: arc for arc in automaton.arcs(state)}
        while token + 1 not in arcs:
            cost += float(arcs[0].weight)
            arcs = {arc.ilabel: arc for arc in automaton.arcs(arcs[0].nextstate)}
        cost += float(arcs[token + 1].weight)
        state = arcs[token + 1].nextstate
    return cost


def model_cost(model, text):
    return -sum(model.log_prob(text[:i], text[i]) for i in range(1, len(text)))


@pytest.fixture(params=["trigrams", "document_model", "pruned", "unigrams", "no start"])
def model(request, trigrams):
    if request.param == "pruned":
        return prune(trigrams, trigrams.sizes[0] + 30)
    if request.param == "unigrams":
        return prune(trigrams, trigrams.sizes[0])
    if request.param == "no start":
        # No remaining bigram begins with <s>.
        sequences = [[0, 1, 2, 3, 4], *([[token] for token in range(5)] * 3)]
        unpruned = estimate_katz(count_ngrams(sequences, order=2))
        keep = unpruned.keys[1] // unpruned.width != np.searchsorted(
            unpruned.keys[0], unpruned.bos
        )
        return NGramModel(
            unpruned.vocab_size,
            (unpruned.keys[0], unpruned.keys[1][keep]),
            (unpruned.log_probs[0], unpruned.log_probs[1][keep]),
            unpruned.log_backoffs,
        )
    return request.getfixturevalue(request.param)


def test_automaton_equals_one_built_arc_by_arc(model):
    automaton, expected = built(model), arc_by_arc(model)
    assert automaton.start() == expected.start()
    assert pynini.equal(automaton, expected, delta=1e-6)
    assert automaton.verify()
    # The properties in the file are those that OpenFst computes.
    expected = pynini.Fst.read_from_string(expected.write_to_string())
    mask = pynini.FST_PROPERTIES
    assert automaton.properties(mask, True) == expected.properties(mask, True)


def test_continuous_automaton_continues_after_end_of_text(document_model):
    automaton = built(document_model, continuous=True)
    assert automaton.verify()
    tokens = [0, 1, 9, 0, 9, 2, 0]
    expected = model_cost(document_model, [document_model.bos, *tokens])
    assert forced_cost(automaton, tokens) == pytest.approx(expected, abs=1e-4)
    assert all(float(automaton.final(state)) == 0 for state in automaton.states())
    after_end = {
        arc.nextstate
        for state in automaton.states()
        for arc in automaton.arcs(state)
        if arc.ilabel == 10
    }
    assert after_end == {automaton.start()}


def test_backoff_weights_without_extensions_are_kept(tmp_path):
    (tmp_path / "odd.arpa").write_text(ODD_ARPA.replace("-inf", "-2"))
    model = read_arpa(tmp_path / "odd.arpa", vocab_size=5)
    automaton = built(model)
    for tokens in ([2, 0], [2, 1], [0, 1, 0], [0, 1, 2]):
        expected = model_cost(model, [model.bos, *tokens])
        assert forced_cost(automaton, tokens) == pytest.approx(expected, abs=1e-5)


def test_names_of_tokens_are_the_symbols_of_the_file(trigrams, tmp_path):
    names = [*"abcdefghi", "é"]
    write_fst(trigrams, tmp_path / "model.fst", names)
    table = pynini.Fst.read(str(tmp_path / "model.fst")).input_symbols()
    assert dict(table) == dict(enumerate(["<epsilon>", *names]))


def test_weights_beyond_float32_are_refused(trigrams):
    """A cost that is too high is infinite; a weight that is too high is refused."""
    weights = trigrams.log_backoffs[0].copy()
    weights[:2] = -1e300
    changed = (weights, *trigrams.log_backoffs[1:])
    model = dataclasses.replace(trigrams, log_backoffs=changed)
    assert np.isposinf(automaton_of(model).weights).sum() == 2
    weights[0] = 3e38 * 10
    with pytest.raises(UserError, match="largest weight of an automaton"):
        automaton_of(model)


def state_by_definition(model, tokens):
    known = histories(model)
    tokens = [model.bos if token == model.end_of_text else token for token in tokens]
    for start in range(len(tokens) + 1):
        if tuple(tokens[start:]) in known:
            return known.index(tuple(tokens[start:]))
    raise AssertionError("the empty history is always there")


def test_of_history_is_the_longest_known_suffix(model):
    table = StateTable(model)
    rng = np.random.default_rng(3)
    for length in range(6):
        for _ in range(30):
            tokens = rng.integers(0, model.vocab_size, length).tolist()
            assert table.of_history(tokens) == state_by_definition(model, tokens)
    assert table.of_history([model.bos]) == table.start
    assert table.of_history(np.array([0, 1], np.int32)) == state_by_definition(
        model, [0, 1]
    )
