"""A radix trie over runs of tokens: which stored values share how long a prefix with a run. Free of arrays."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace_kvcache.errors import IntegrityError, InvalidPrefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Value = TypeVar("_Value")

# Bytes of a token in a key. Keys are bytes because slices of bytes are compared at the speed of memory.
TOKEN_BYTES = 8


def key_of(tokens: Sequence[int]) -> bytes:
    """Return the key of a run of tokens, 8 bytes each.

    Raises:
        InvalidPrefix: something else than integers of 64 bits.
    """
    try:
        return array("q", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvalidPrefix(f"tokens must be integers of at most 64 bits, in a list or a tuple: {error}") from error


def tokens_of(key: bytes) -> tuple[int, ...]:
    """Return the tokens of a key."""
    return tuple(array("q", key))


class _Node(Generic[_Value]):
    __slots__ = ("children", "edge", "parent", "values")

    def __init__(self, edge: bytes, parent: _Node[_Value] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, _Node[_Value]] = {}
        # One value or none; a tuple, so that None can be a value.
        self.values: tuple[_Value, ...] = ()


class RadixTrie(Generic[_Value]):
    """Values by key. Edges are runs of tokens, so that a walk costs one comparison of bytes per node.

    The structure is the usual compressed trie (Morrison, "PATRICIA", 1968) over whole tokens.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Node[_Value] = _Node(b"", None)

    @property
    def is_empty(self) -> bool:
        """Whether no value is held."""
        return not self._root.children and not self._root.values

    def insert(self, key: bytes, value: _Value) -> None:
        """Put a value at a key in place of the one that is there."""
        node, at = self._root, 0
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None:
                child = _Node(key[at:], node)
                node.children[key[at : at + TOKEN_BYTES]] = child
            shared = _num_shared(child.edge, key, at)
            if shared < len(child.edge):
                child = _split(child, shared)
            node, at = child, at + shared
        node.values = (value,)

    def get(self, key: bytes) -> _Value | None:
        """Return the value at a key, or None."""
        node = self._find(key)
        return node.values[0] if node is not None and node.values else None

    def remove(self, key: bytes) -> None:
        """Remove the value at a key.

        Raises:
            IntegrityError: there is none.
        """
        node = self._find(key)
        if node is None or not node.values:
            raise IntegrityError(f"no value at a key of {len(key) // TOKEN_BYTES} tokens")
        node.values = ()
        _close_up(node)

    def ancestors(self, key: bytes) -> list[_Value]:
        """Return the values at strict prefixes of a key, the shortest first."""
        path, _ = self._walk(key)
        return [value for node, end in path if end < len(key) for value in node.values]

    def matches(self, key: bytes) -> Iterator[tuple[int, Iterator[_Value]]]:
        """Yield groups of values by the number of tokens that they share with a key, the most first, none left out.

        Values that share nothing are not yielded. Consume a group before the next one; do not change the trie.
        """
        path, cut = self._walk(key)
        came_from = cut
        if cut is not None:
            end = path[-1][1]
            yield (end + _num_shared(cut.edge, key, end)) // TOKEN_BYTES, _values(cut, None)
        for node, end in reversed(path):
            if end:
                yield end // TOKEN_BYTES, _values(node, came_from)
            came_from = node

    def _walk(self, key: bytes) -> tuple[list[tuple[_Node[_Value], int]], _Node[_Value] | None]:
        """Return the nodes that a key passes, with the bytes up to each, and the node in whose edge it departs."""
        node, at = self._root, 0
        path = [(node, 0)]
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None:
                break
            if not key.startswith(child.edge, at):
                return path, child
            node, at = child, at + len(child.edge)
            path.append((node, at))
        return path, None

    def _find(self, key: bytes) -> _Node[_Value] | None:
        node, end = self._walk(key)[0][-1]
        return node if end == len(key) else None

    def items(self) -> Iterator[tuple[bytes, _Value]]:
        """Yield every key and value."""
        stack = [(self._root, b"")]
        while stack:
            node, prefix = stack.pop()
            key = prefix + node.edge
            for value in node.values:
                yield key, value
            stack.extend((child, key) for child in node.children.values())

    def check_integrity(self) -> None:
        """Check that every node is needed and lies where its edge says.

        Raises:
            IntegrityError: it does not.
        """
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node is not self._root and not node.values and len(node.children) < 2:
                raise IntegrityError("a node of the trie holds nothing and joins nothing")
            for first, child in node.children.items():
                if child.parent is not node or not child.edge or child.edge[:TOKEN_BYTES] != first:
                    raise IntegrityError("a node of the trie does not lie where its edge says")
            stack.extend(node.children.values())


def _num_shared(edge: bytes, key: bytes, at: int) -> int:
    """Return how many bytes of whole tokens an edge and the key from `at` on have in common."""
    most = min(len(edge), len(key) - at) // TOKEN_BYTES
    if edge[: most * TOKEN_BYTES] == key[at : at + most * TOKEN_BYTES]:
        return most * TOKEN_BYTES
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        start, stop = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if edge[start:stop] == key[at + start : at + stop]:
            low = middle
        else:
            high = middle
    return low * TOKEN_BYTES


def _split(node: _Node[_Value], length: int) -> _Node[_Value]:
    """Put a node into an edge after `length` bytes and return it."""
    assert node.parent is not None
    upper: _Node[_Value] = _Node(node.edge[:length], node.parent)
    node.parent.children[node.edge[:TOKEN_BYTES]] = upper
    node.edge, node.parent = node.edge[length:], upper
    upper.children[node.edge[:TOKEN_BYTES]] = node
    return upper


def _close_up(node: _Node[_Value]) -> None:
    """Take out a node that holds nothing and joins nothing, and then its parent likewise."""
    parent = node.parent
    if parent is None or node.values or len(node.children) > 1:
        return
    first = node.edge[:TOKEN_BYTES]
    if node.children:
        (child,) = node.children.values()
        child.edge, child.parent = node.edge + child.edge, parent
        parent.children[first] = child
    else:
        del parent.children[first]
        _close_up(parent)


def _values(node: _Node[_Value], skipped: _Node[_Value] | None) -> Iterator[_Value]:
    stack = [node]
    while stack:
        each = stack.pop()
        yield from each.values
        stack.extend(child for child in each.children.values() if child is not skipped)
