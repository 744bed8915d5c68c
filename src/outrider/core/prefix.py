"""Which pages hold the rows of which text: a tree of whole pages, so that texts that begin alike can share them.

A node is a page, under the node of the page before it; the branch to it are the tokens whose rows lie in it:

    root --tokens[0:P]--> page 7 --tokens[P:2P]--> page 2
                                 \\-other tokens--> page 9

A row depends on the tokens up to its own and on nothing else (the promise of `runtime.runner`), so a path from the root
says all that the rows of its last page depend on. Branches are compared token by token: equal hashes of unequal tokens
find nothing wrong. Where a row also depends on tokens behind its own (an EAGLE head's: one), branches lie that far
`ahead`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Prefixes"]

Branch = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    page: int  # -1 of the root
    parent: _Node | None = None
    branch: Branch = ()
    children: dict[Branch, _Node] = field(default_factory=dict)


class Prefixes:
    """The tree of one pool of pages. It knows nothing of who holds them."""

    def __init__(self, page_size: int, ahead: int = 0) -> None:
        self._size, self._ahead = page_size, ahead
        self._root = _Node(-1)
        self._nodes: dict[int, _Node] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def whole(self, rows: int, tokens: Sequence[int]) -> int:
        """How many pages the first `rows` rows of a text fill whose contents its tokens tell."""
        return min(rows, len(tokens) - self._ahead) // self._size

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """The pages, at most so many, that hold the first rows of the text."""
        node = self._root
        pages: list[int] = []
        while len(pages) < most:
            found = node.children.get(self._branch(tokens, len(pages)))
            if found is None:
                break
            node = found
            pages.append(node.page)
        return pages

    def add(self, tokens: Sequence[int], before: Sequence[int], page: int) -> int:
        """Enter a page that holds the text's rows behind those in the pages `before`, which are in the tree.

        Returns the page that is in the tree for them: another one, if their rows were there already.
        """
        parent = self._nodes[before[-1]] if before else self._root
        branch = self._branch(tokens, len(before))
        found = parent.children.get(branch)
        if found is None:
            found = self._nodes[page] = parent.children[branch] = _Node(page, parent, branch)
        return found.page

    def drop(self, page: int) -> None:
        """Take out a page that no other one stands behind."""
        node = self._nodes.pop(page)
        assert not node.children
        assert node.parent is not None
        del node.parent.children[node.branch]

    def behind(self, page: int) -> list[int]:
        """The pages that stand right behind this one."""
        return [child.page for child in self._nodes[page].children.values()]

    def _branch(self, tokens: Sequence[int], number: int) -> Branch:
        """What page `number` of a text adds to what the pages before it depend on."""
        start = number * self._size
        return tuple(tokens[start + self._ahead if number else 0 : start + self._size + self._ahead])
