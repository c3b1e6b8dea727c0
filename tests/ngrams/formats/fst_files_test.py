"""Tests of bpd_jax.ngrams.formats.fst_files."""

import itertools

import numpy as np
import pytest

from bpd_jax.ngrams.formats import fst_files
from bpd_jax.ngrams.prune import prune

pynini = pytest.importorskip("pynini")


def built(model, *, continuous=False):
    """The automaton of a model in pynini."""
    data = fst_files.fst_bytes(model, continuous=continuous)
    return pynini.Fst.read_from_string(data)


def arc_by_arc(model):
    """OpenGrm's layout built from dictionaries with one call per arc."""
    grams = {
        tuple(row): (
            model.log_probs[order - 1][index],
            model.log_backoffs[order - 1][index] if order < model.order else 0.0,
        )
        for order in range(1, model.order + 1)
        for index, row in enumerate(model.ngrams(order).tolist())
    }
    known = {gram[:-1] for gram in grams} | {(), (model.bos,)}
    states = sorted(known, key=lambda history: (len(history), history))

    def longest(history):
        while history not in known:
            history = history[1:]
        return states.index(history)

    automaton = pynini.Fst()
    automaton.add_states(len(states))
    automaton.set_start(states.index((model.bos,)))
    for state, history in enumerate(states):
        if history:
            weight = pynini.Weight("tropical", -grams[history][1])
            automaton.add_arc(state, pynini.Arc(0, 0, weight, longest(history[1:])))
        for token in range(model.vocab_size):
            if (*history, token) in grams:
                weight = pynini.Weight("tropical", -grams[(*history, token)][0])
                target = longest((*history, token))
                arc = pynini.Arc(token + 1, token + 1, weight, target)
                automaton.add_arc(state, arc)
        if (*history, model.eos) in grams:
            automaton.set_final(state, -grams[(*history, model.eos)][0])
    return automaton


def forced_cost(automaton, tokens):
    """Cost of the path that takes epsilon arcs only if there is no other arc."""
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


@pytest.mark.parametrize("extra", [25, 10_000])
def test_automaton_equals_one_built_arc_by_arc(trigrams, extra):
    model = prune(trigrams, trigrams.sizes[0] + extra)
    automaton, expected = built(model), arc_by_arc(model)
    assert automaton.start() == expected.start()
    assert pynini.equal(automaton, expected, delta=1e-6)
    assert automaton.verify()
    # The properties in the file are those that OpenFst computes.
    expected = pynini.Fst.read_from_string(expected.write_to_string())
    mask = pynini.FST_PROPERTIES
    assert automaton.properties(mask, True) == expected.properties(mask, True)


def test_automaton_of_unigrams_has_one_state(trigrams):
    model = prune(trigrams, trigrams.sizes[0])
    automaton = built(model)
    assert automaton.num_states() == 1
    assert automaton.num_arcs(0) == model.sizes[0] - 2  # all but <s> and </s>


def test_cheapest_path_never_costs_more_than_the_model(trigrams):
    automaton = built(trigrams)
    gaps = []
    for tokens in itertools.islice(itertools.product(range(4), repeat=4), 0, None, 5):
        string = pynini.accep("".join(f"[{token + 1}]" for token in tokens))
        lattice = pynini.compose(string, automaton)
        cheapest = float(pynini.shortestdistance(lattice, reverse=True)[0])
        text = [trigrams.bos, *tokens, trigrams.eos]
        gaps.append(model_cost(trigrams, text) - cheapest)
    assert min(gaps) > -1e-4
    assert min(np.abs(gaps)) < 1e-4  # For some texts the approximation is exact.


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
