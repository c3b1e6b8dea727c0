"""Base of the searches that propose P whole paths, and their sizes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChainSearch:
    """A search whose drafts are P paths, each a chain.

    Attributes:
      num_drafts: P, the paper's p.
    """

    num_drafts: int = 1

    @property
    def draws(self) -> bool:
        """Never: the best paths are taken without chance."""
        return False

    def max_nodes(self, block_size: int, width: int) -> int:
        """Different prefixes of P paths."""
        return most_prefixes(block_size, width, self.num_drafts)

    def max_drafts(self, block_size: int, width: int) -> int:
        """P, or all paths if they are fewer."""
        return most_paths(block_size, width, self.num_drafts)


def most_paths(block_size: int, width: int, count: int) -> int:
    """`count`, or the number of all paths if that is less."""
    # Python's integers do not overflow.
    return min(count, width ** (block_size - 1))


def most_prefixes(block_size: int, width: int, count: int) -> int:
    """The most different prefixes that `count` paths can have."""
    return sum(min(count, width**depth) for depth in range(block_size))
