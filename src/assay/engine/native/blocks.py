"""KV-cache blocks: reference counts and the prefix cache. No tensors.

A block holds the keys and values of `size` consecutive tokens. Sequences with equal prefixes can share blocks. Full
blocks of prompts are registered in a prefix index. The key is the block's tokens and the entry of its parent block, so
equal keys mean equal prefixes, without relying on a hash. A registered block that no sequence uses stays valid until it
is evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

ROOT = 0  # the parent entry of a sequence's first block
Key = tuple[int, tuple[int, ...]]  # entry of the parent block, tokens


class Blocks:
    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.ref_counts = [0] * total
        self.free = list(range(total - 1, -1, -1))  # allocated from the end, so that low numbers are used most
        self.evictable: OrderedDict[int, None] = OrderedDict()  # registered and unused, least recently used first
        self.prefix_index: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}  # of registered blocks
        self.entries: dict[int, int] = {}  # unique numbers by which keys of child blocks name their parent
        self.next_entry = ROOT + 1

    @property
    def available(self) -> int:
        return len(self.free) + len(self.evictable)

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def needed(self, tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-tokens // self.size)

    def allocate(self, count: int) -> list[int]:
        """Empty blocks with one reference each."""
        assert count <= self.available, "more blocks were requested than are available"
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.evictable.popitem(last=False)
            self._unregister(block)
        self.ref_counts[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.evictable[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int], *, unregister: bool = False) -> list[int]:
        """Drop a reference to each block; returns the blocks that are now unused.

        `unregister`: remove them from the prefix index, because their contents are invalid.
        """
        unused = []
        ref_counts, keys = self.ref_counts, self.keys
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            left = ref_counts[block] = ref_counts[block] - 1
            assert left >= 0, "a block was released twice"
            if unregister:
                self._unregister(block)
            if left == 0:
                unused.append(block)
                if block in keys:
                    self.evictable[block] = None
                else:
                    self.free.append(block)
        return unused

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of these tokens, each with one more reference."""
        blocks = list(self._cached(tokens))
        self.share(blocks)
        return blocks

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        """Whether all of these tokens are cached."""
        return len(tokens) % self.size == 0 and len(list(self._cached(tokens))) == len(tokens) // self.size

    def _cached(self, tokens: Sequence[int]) -> Iterator[int]:
        parent = ROOT
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self.prefix_index.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                return
            yield block
            parent = self.entries[block]

    def register_prefix(self, tokens: Sequence[int], blocks: Sequence[int], computed: int) -> None:
        """Add the full blocks among the first `computed` tokens to the prefix index."""
        parent = ROOT
        for index in range(computed // self.size):
            block = blocks[index]
            if block not in self.keys:
                key = (parent, tuple(tokens[index * self.size : (index + 1) * self.size]))
                other = self.prefix_index.get(key)
                if other is None:
                    self.prefix_index[key], self.keys[block] = block, key
                    self.entries[block] = self.next_entry
                    self.next_entry += 1
                else:
                    block = other  # computed twice: the first one stays in the index
            parent = self.entries[block]

    def clear_prefix_index(self) -> None:
        """Remove all cached prefixes. Blocks that are in use stay allocated."""
        self.free.extend(self.evictable)
        self.evictable.clear()
        self.prefix_index.clear()
        self.keys.clear()
        self.entries.clear()

    def _unregister(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            del self.prefix_index[key], self.entries[block]
