"""Draft trees: shapes, cuts and refusals."""

from __future__ import annotations

import pytest

from outrider.core.tree import Tree, TreeError

BUSHY = Tree((7, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 4))


def test_the_root_alone_is_plain_decoding() -> None:
    """A tree of one node has no guesses and a chain of none is the same tree."""
    assert Tree.root(5) == Tree.chain(5, [])
    assert Tree.root(5).guesses == 0


def test_paths_children_and_depths_describe_the_same_tree() -> None:
    """Walking down by children and up by parents agree."""
    assert BUSHY.path(5) == (1, 4, 5)
    assert BUSHY.path(0) == ()
    assert BUSHY.children() == [[1, 2], [3, 4], [], [], [5], []]
    assert BUSHY.depths() == [0, 1, 1, 2, 2, 3]


def test_merging_paths_gives_their_prefix_tree_within_the_budget() -> None:
    """Common prefixes are shared; the budget counts guesses, earlier paths first."""
    tree = Tree.merge(9, [(1, 2, 3), (1, 2, 4), (5,)])
    assert tree == Tree((9, 1, 2, 3, 4, 5), (-1, 0, 1, 2, 2, 0))
    assert Tree.merge(9, [(1, 2, 3), (1, 2, 4), (5,)], budget=4) == tree.cut(4)


def test_cutting_keeps_parents_and_laws() -> None:
    """Every cut of a tree is a tree, and keeps the laws of the nodes that are left."""
    tree = Tree(BUSHY.tokens, BUSHY.parents, {0: "law of 0", 4: "law of 4"})  # type: ignore[dict-item]
    assert tree.shallow(2).parents == (-1, 0, 0, 1, 1)
    assert tree.select([0, 1, 4, 5]) == Tree((7, 1, 4, 5), (-1, 0, 1, 2), {0: "law of 0", 2: "law of 4"})  # type: ignore[dict-item]
    for n in range(6):
        assert tree.cut(n).check(10).guesses == min(n, 5)


@pytest.mark.parametrize(
    ("tokens", "parents", "names"),
    [
        ((), (), "0 tokens"),
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1, 2), (0, 0), "the root's parent is 0"),
        ((1, 2, 3), (-1, 2, 0), "node 1 has parent 2"),
        ((1, 2, 2), (-1, 0, 0), "node 2 repeats its sibling's token 2"),
        ((1, 10), (-1, 0), "token 10, outside the vocabulary of 10"),
        ((1, -1), (-1, 0), "token -1, outside"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(tokens: tuple[int, ...], parents: tuple[int, ...], names: str) -> None:
    """The message names the first node that is wrong."""
    with pytest.raises(TreeError, match=names):
        Tree(tokens, parents).check(10)
