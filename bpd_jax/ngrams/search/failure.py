"""An n-gram automaton walked with failure arcs, which is what its back-off means.

The arc without label of a state is taken only for a symbol that no other arc of the
state has. Then every text has one path, and its cost is the model's own. (OpenFst's
composition takes that arc whenever it pays, see `bpd_jax.ngrams.formats.fst`.)
"""

import numpy as np

from bpd_jax.ngrams.formats.fst_format import Automaton


class FailureAutomaton:
    """Steps of many states with many labels at once, on the host."""

    def __init__(self, automaton: Automaton) -> None:
        """Indexes the arcs of an automaton in OpenGrm's layout.

        Args:
          automaton: arcs of a state sorted by label, 0 for the back-off.
        """
        sources = automaton.sources
        self._labels = int(automaton.labels.max(initial=0)) + 1
        self._keys = sources * self._labels + automaton.labels
        self._weights = automaton.weights
        self._targets = automaton.targets
        fails = automaton.labels == 0
        self._failure = np.full(automaton.arc_counts.size, -1, np.int32)
        self._failure[sources[fails]] = automaton.targets[fails]
        self._failure_cost = np.zeros(automaton.arc_counts.size, np.float32)
        self._failure_cost[sources[fails]] = automaton.weights[fails]

    def step(
        self, states: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns cost and next state of every state with every label.

        Args:
          states: `[S]` int.
          labels: `[W]` int, 1 and up.

        Returns:
          `[S, W]` float64 in nats, infinity where there is no path, and `[S, W]` int32.
        """
        shape = states.size, labels.size
        at = np.repeat(states, labels.size)
        asked = np.tile(labels, states.size)
        costs = np.zeros(at.size)
        targets = np.zeros(at.size, np.int32)
        open_ = np.flatnonzero(asked < self._labels)
        costs[asked >= self._labels] = np.inf
        while open_.size:
            wanted = at[open_] * np.int64(self._labels) + asked[open_]
            place = np.minimum(np.searchsorted(self._keys, wanted), self._keys.size - 1)
            hit = self._keys[place] == wanted
            done = open_[hit]
            costs[done] += self._weights[place[hit]]
            targets[done] = self._targets[place[hit]]
            open_ = open_[~hit]
            costs[open_] += self._failure_cost[at[open_]]
            at[open_] = self._failure[at[open_]]
            costs[open_[at[open_] < 0]] = np.inf
            open_ = open_[at[open_] >= 0]
        return costs.reshape(shape), targets.reshape(shape)
