"""Compiled search for the best paths of a lattice under an n-gram model.

The paths of a lattice and the back-off of a model make a small graph. Its nodes at a
position are the histories of the model that end there: the empty one, one per
candidate token, one per pair of neighbouring candidates that is a history, and so on
up to N-1 tokens. The row of a node holds, for every candidate w of the next position,
log P(w | history) and the node that follows:

    row(a b)[w] = log P(w | a b)                 if `a b w` is an n-gram
                  log alpha(a b) + row(b)[w]     elsewhere

Two facts keep this small. Every suffix of an n-gram is an n-gram, so `a b w` is looked
for only where `b w` was found. And a node without an n-gram of its own for any
candidate needs no row of its own: its row is that of its suffix plus one weight.

A model is far larger than a processor's cache, and waiting for one number after the
other would take most of the time. So the work goes level by level, histories of one
length at all positions together, in loops whose loads do not wait for each other.

This module needs numba; import it where it is used.
"""

from typing import Any

import numba
import numpy as np

from bpd_jax.ngrams.search.table_kernels import FEW, mark_of, slot_of, walk

# Fields of a node: its position, the index of its n-gram, where the extensions of that
# begin and end, the row it uses, and the node of its longest suffix.
POSITION, INDEX, BEGIN, END, ROW, SUFFIX = range(6)
NODE_FIELDS = 6
# Fields of a query: its node, its candidate, the key (-1 once it is answered), the
# index of the n-gram, and where the extensions of that begin and end.
ASKER, CANDIDATE, KEY, PLACE, FIRST, PAST = range(6)
QUERY_FIELDS = 6
# Fields of the n-grams of a row: the node that owns it, the number of candidates with
# an n-gram of the row's own, and the list of these by symbol.
OWNER, NUMBER, LISTED = range(3)


@numba.njit(cache=True, nogil=True)
def _ask(
    keys: np.ndarray,
    width: int,
    symbols: np.ndarray,
    first: int,
    end: int,
    nodes: np.ndarray,
    own: np.ndarray,
    queries: np.ndarray,
) -> int:
    """Queries the n-grams of the nodes `first ... end - 1`; returns their number.

    If a suffix has no row of its own, it has no n-gram for any candidate, and neither
    has a longer history. If a node has few extensions, queries are answered at once.
    """
    for node in range(first, end):
        # Prefetches the memory.
        if nodes[BEGIN, node] < nodes[END, node]:
            queries[KEY, node - first] = keys[nodes[BEGIN, node]]
    number = 0
    for node in range(first, end):
        row = nodes[ROW, node]
        place, past = nodes[BEGIN, node], nodes[END, node]
        if place == past or own[row, OWNER] != nodes[SUFFIX, node]:
            continue
        start = nodes[INDEX, node] * width
        wanted = symbols[nodes[POSITION, node]]
        listed, listed_end = LISTED, LISTED + own[row, NUMBER]
        if past - place > FEW:
            while listed < listed_end:
                w = own[row, listed]
                queries[ASKER, number], queries[CANDIDATE, number] = node, w
                queries[KEY, number] = start + wanted[w]
                listed += 1
                number += 1
            continue
        # Both lists are in the order of symbols.
        while place < past and listed < listed_end:
            w = own[row, listed]
            key = start + wanted[w]
            if keys[place] < key:
                place += 1
                continue
            if keys[place] == key:
                queries[ASKER, number], queries[CANDIDATE, number] = node, w
                queries[KEY, number], queries[PLACE, number] = -1, place
                number += 1
            listed += 1
    return number


@numba.njit(cache=True, nogil=True)
def _answer(
    table: np.ndarray,
    bits: int,
    shift: int,
    keys: np.ndarray,
    queries: np.ndarray,
    number: int,
) -> int:
    """Answers the open queries; returns the number of n-grams that exist.

    Their queries are moved to the front, in order.
    """
    low = (1 << shift) - 1
    for query in range(number):
        if queries[KEY, query] >= 0:
            queries[PLACE, query] = table[slot_of(queries[KEY, query], bits)]
    kept = 0
    for query in range(number):
        key, place = queries[KEY, query], queries[PLACE, query]
        if key >= 0 and place >= 0:
            if place & ~low == mark_of(key, bits, shift):
                place &= low
            else:
                place = walk(table, bits, shift, keys, key, 1)
        if place >= 0:
            for field in range(PLACE):
                queries[field, kept] = queries[field, query]
            queries[PLACE, kept] = place
            kept += 1
    number, kept = kept, 0
    for query in range(number):
        key, place = queries[KEY, query], queries[PLACE, query]
        # The mark is only a part of the key.
        if key >= 0 and keys[place] != key:
            place = walk(table, bits, shift, keys, key, 1)
        if place >= 0:
            for field in range(PLACE):
                queries[field, kept] = queries[field, query]
            queries[PLACE, kept] = place
            kept += 1
    return kept


@numba.njit(cache=True, nogil=True)
def _place_of_text(
    model: tuple[Any, ...],
    history: np.ndarray,
    length: int,
) -> int:
    """Returns the index of the n-gram of the text's last `length` symbols, or -1."""
    keys, _, _, offsets, unigrams, tables, bits, shift, width = model
    if length > len(history):
        return -1
    tail = history[len(history) - length :]
    place = unigrams[tail[0]]
    for order in range(1, length):
        if place < 0:
            return -1
        key = place * width + tail[order]
        first, past = offsets[order - 1][place], offsets[order - 1][place + 1]
        level = keys[order]
        if past - first > FEW:
            place = walk(tables[order - 1], bits[order - 1], shift, level, key, 0)
            continue
        while first < past and level[first] < key:
            first += 1
        place = first if first < past and level[first] == key else -1
    return place


@numba.njit(cache=True, nogil=True)
def _expand(
    model: tuple[Any, ...],
    history: np.ndarray,
    predicted: np.ndarray,
    followed: np.ndarray,
    graph: tuple[Any, ...],
    queries: np.ndarray,
    answers: np.ndarray,
    begins: np.ndarray,
) -> int:
    """Builds all nodes and rows.

    `begins[n, j]` receives the first node of the histories of length n at position j,
    and `begins[n, J + 1]` the end of that length.

    Returns:
      The node of the text before the lattice, or -1 if the capacity is too small.
    """
    keys, log_probs, log_backoffs, offsets, unigrams, tables, bits, shift, width = model
    nodes, weights, values, following, own, _ = graph
    positions, candidates = predicted.shape
    room = nodes.shape[1]
    highest = len(keys)
    if room < positions * (candidates + 1) + highest + 1:
        return -1
    # The empty histories, one per position, and their rows: the unigrams.
    count = positions + 1
    begins[:] = 0
    for position in range(count):
        nodes[:, position] = 0
        nodes[POSITION, position] = nodes[ROW, position] = position
        nodes[SUFFIX, position] = begins[0, position] = position
        weights[position] = 0.0
    begins[0, positions + 1] = count
    state = 0
    rows = positions
    for position in range(positions):
        by_symbol = np.argsort(predicted[position])
        number = 0
        for place in range(candidates):
            w = by_symbol[place]
            unigram = unigrams[predicted[position, w]]
            following[position, w] = position + 1
            values[position, w] = -np.inf
            if unigram >= 0:
                values[position, w] = log_probs[0][unigram]
                own[position, LISTED + number] = w
                number += 1
        own[position, NUMBER], own[position, OWNER] = number, position

    for length in range(1, highest):
        # The histories of this length: the one that ends the text, then those among
        # the n-grams that the queries of the length before have found.
        if count >= room:
            return -1
        first = count
        starts, level_weights = offsets[length - 1], log_backoffs[length - 1]
        place = _place_of_text(model, history, length)
        if place >= 0 and (
            starts[place] < starts[place + 1] or level_weights[place] != 0
        ):
            nodes[POSITION, count], nodes[SUFFIX, count] = 0, state
            nodes[INDEX, count], weights[count] = place, level_weights[place]
            nodes[BEGIN, count], nodes[END, count] = starts[place], starts[place + 1]
            state = count
            count += 1
        if length == 1:
            found = 0
            for position in range(positions):
                for w in range(candidates):
                    unigram = unigrams[followed[position, w]]
                    if unigram >= 0:
                        queries[ASKER, found], queries[CANDIDATE, found] = position, w
                        queries[PLACE, found] = unigram
                        found += 1
        if count + found > room:
            return -1
        for query in range(found):
            place = queries[PLACE, query]
            queries[FIRST, query], queries[PAST, query] = (
                starts[place],
                starts[place + 1],
            )
            answers[query] = level_weights[place]
        for query in range(found):
            asker, w = queries[ASKER, query], queries[CANDIDATE, query]
            position, row = nodes[POSITION, asker], nodes[ROW, asker]
            # After </s> the history begins anew; after the lattice nothing comes.
            ended = length > 1 and predicted[position, w] != followed[position, w]
            begin, end = queries[FIRST, query], queries[PAST, query]
            if (
                ended
                or position + 1 == positions
                or (begin == end and answers[query] == 0)
            ):
                continue
            nodes[POSITION, count], nodes[SUFFIX, count] = (
                position + 1,
                following[row, w],
            )
            nodes[INDEX, count], weights[count] = queries[PLACE, query], answers[query]
            nodes[BEGIN, count], nodes[END, count] = begin, end
            following[row, w] = count
            count += 1
        begins[length, :] = first
        for node in range(first, count):
            begins[length, nodes[POSITION, node] + 1] = node + 1
        for position in range(1, positions + 2):
            begins[length, position] = max(
                begins[length, position], begins[length, position - 1]
            )

        # The candidates that they have n-grams for.
        for node in range(first, count):
            suffix = nodes[SUFFIX, node]
            nodes[ROW, node] = nodes[ROW, suffix]
            weights[node] += weights[suffix]
        found = _answer(
            tables[length - 1],
            bits[length - 1],
            shift,
            keys[length],
            queries,
            _ask(keys[length], width, predicted, first, count, nodes, own, queries),
        )
        for query in range(found):
            answers[query] = log_probs[length][queries[PLACE, query]]
        for query in range(found):
            node, w = queries[ASKER, query], queries[CANDIDATE, query]
            row = nodes[ROW, node]
            if own[row, OWNER] != node:
                base, row = row, rows
                for other in range(candidates):
                    values[row, other] = weights[node] + values[base, other]
                    following[row, other] = following[base, other]
                own[row, OWNER], own[row, NUMBER] = node, 0
                nodes[ROW, node], weights[node] = row, 0.0
                rows += 1
            values[row, w] = answers[query]
            own[row, LISTED + own[row, NUMBER]] = w
            own[row, NUMBER] += 1
    return state


@numba.njit(cache=True, nogil=True)
def _without_repeats(
    symbols: np.ndarray,
    head_scores: np.ndarray,
) -> np.ndarray:
    """Scores, with -inf for a symbol that has a better score at its position."""
    scores = head_scores.copy()
    positions, candidates = scores.shape
    for position in range(positions):
        for w in range(1, candidates):
            for other in range(w):
                if symbols[position, w] == symbols[position, other]:
                    worse = scores[position, w] <= scores[position, other]
                    scores[position, w if worse else other] = -np.inf
    return scores


@numba.njit(cache=True, nogil=True)
def _complete(
    head_scores: np.ndarray,
    alphas: np.ndarray,
    graph: tuple[Any, ...],
    begins: np.ndarray,
) -> None:
    """Sets `best[node]` to the best score of a path from there to the end."""
    nodes, weights, values, following, own, best = graph
    positions, candidates = head_scores.shape
    best[positions] = 0.0
    for position in range(positions - 1, -1, -1):
        scored, alpha = head_scores[position], alphas[position]
        for length in range(begins.shape[0]):
            for node in range(begins[length, position], begins[length, position + 1]):
                row = nodes[ROW, node]
                if own[row, OWNER] != node:
                    suffix = nodes[SUFFIX, node]
                    best[node] = best[suffix] + alpha * (
                        weights[node] - weights[suffix]
                    )
                    continue
                top = -np.inf
                for w in range(candidates):
                    score = scored[w] + alpha * values[row, w] + best[following[row, w]]
                    top = max(top, score)
                best[node] = top


@numba.njit(cache=True, nogil=True)
def best_paths(
    model: tuple[Any, ...],
    history: np.ndarray,
    predicted: np.ndarray,
    followed: np.ndarray,
    head_scores: np.ndarray,
    alphas: np.ndarray,
    graph: tuple[Any, ...],
    queries: np.ndarray,
    answers: np.ndarray,
    choices: np.ndarray,
    scores: np.ndarray,
) -> int:
    """Finds the P best paths of one lattice; exact, best first.

    Args:
      model: a tuple of
        keys: N arrays, as in `NGramModel`;
        log_probs: N arrays;
        log_backoffs: N-1 arrays;
        offsets: N-1 arrays, the `trie.child_offsets` of the orders 1 ... N-1;
        unigrams: `[width]` int64, the place of each symbol's unigram, -1 for none;
        tables: N-1 hash tables of bigrams and longer n-grams, see `table_kernels`;
        bits: `[N-1]` int64, the tables have 2^bits slots;
        shift: see `table_kernels`;
        width: number of symbols.
      history: `[H]` symbols of the text, oldest first.
      predicted: `[J, W]` int64, the symbols of the candidates when they are predicted.
      followed: `[J, W]` int64, the symbols they are as part of a history.
      head_scores: `[J, W]` float64; a candidate with -inf is not one, and of a symbol
        that a position has twice, the better one counts.
      alphas: `[J]` float64, weight of the n-gram's log-probability at each position.
      graph: memory for C nodes and their rows, a tuple of
        nodes: `[NODE_FIELDS, C]` int64;
        weights: `[C]` float64, what a node adds to its row;
        values: `[C, W]` float64, the rows;
        following: `[C, W]` int32, the nodes that follow;
        own: `[C, LISTED + W]` int32, what is known of the rows;
        best: `[C]` float64, the best completion of each node.
      queries: `[QUERY_FIELDS, C * W]` int64, room for look-ups.
      answers: `[C * W]` float64, room for their results.
      choices: `[P, J]` int32, receives the candidates' numbers.
      scores: `[P]` float64, receives the scores.

    Returns:
      The number of paths, at most P; -1 if there are more than C nodes.
    """
    positions, candidates = predicted.shape
    begins = np.empty((len(model[0]), positions + 2), np.int64)
    state = _expand(
        model, history, predicted, followed, graph, queries, answers, begins
    )
    if state < 0:
        return -1
    scored = _without_repeats(predicted, head_scores)
    _complete(scored, alphas, graph, begins)
    nodes, weights, values, following, _, best = graph

    # With exact completions, the P best prefixes of every length contain those of the
    # P best paths.
    most = len(scores)
    ends, gains = np.zeros(most, np.int64), np.zeros(most)
    new_ends, new_gains = np.zeros(most, np.int64), np.zeros(most)
    totals = np.empty(most)
    origins = np.empty((positions, most), np.int64)
    picks = np.empty((positions, most), np.int64)
    ends[0] = state
    number = 1
    for position in range(positions):
        origin, pick = origins[position], picks[position]
        alpha = alphas[position]
        kept = 0
        for path in range(number):
            row, weight = nodes[ROW, ends[path]], weights[ends[path]]
            for w in range(candidates):
                step = scored[position, w] + alpha * (weight + values[row, w])
                gain = gains[path] + step
                total = gain + best[following[row, w]]
                if total == -np.inf or (kept == most and total <= totals[most - 1]):
                    continue
                place = kept if kept < most else most - 1
                while place > 0 and totals[place - 1] < total:
                    totals[place] = totals[place - 1]
                    origin[place], pick[place] = origin[place - 1], pick[place - 1]
                    new_gains[place] = new_gains[place - 1]
                    new_ends[place] = new_ends[place - 1]
                    place -= 1
                totals[place], origin[place], pick[place] = total, path, w
                new_gains[place], new_ends[place] = gain, following[row, w]
                kept = min(kept + 1, most)
        number = kept
        ends[:number], gains[:number] = new_ends[:number], new_gains[:number]
    for path in range(number):
        scores[path] = gains[path]
        at = path
        for position in range(positions - 1, -1, -1):
            choices[path, position] = picks[position, at]
            at = origins[position, at]
    return number
