"""KV-cache blocks: reference counts and the prefix cache. No tensors.

A block holds the keys and values of `size` consecutive tokens. Sequences with equal prefixes can share blocks. Full
blocks of prompts are registered in a prefix index. The key is the block's tokens and the entry of its parent block, so
equal keys mean equal prefixes, without relying on a hash. A registered block that no sequence uses stays valid until it
is evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

ROOT = 0  # the parent of a first block


Key = tuple[int, tuple[int, ...]]  # the parent's entry, and the tokens


class Blocks:
    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.users = [0] * total
        self.free = list(range(total - 1, -1, -1))  # the end is taken first, so that low numbers are used most
        self.idle: OrderedDict[int, None] = OrderedDict()  # remembered, used by nobody; longest unused first
        self.known: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.entries: dict[int, int] = {}  # what children name as their parent; never given twice
        self.next_entry = ROOT + 1

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Blocks with no contents, for one user."""
        assert count <= self.available, "asked for more blocks than there are"
        return [self.take_one() for _ in range(count)]

    def take_one(self) -> int:
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            self._forget(block)
        self.users[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more user."""
        for block in blocks:
            if self.users[block] == 0:
                del self.idle[block]
            self.users[block] += 1

    def release(self, blocks: Sequence[int], *, forget: bool = False) -> list[int]:
        """One user less; returns those that nobody uses now. `forget`: what they hold must not be found again."""
        unused = []
        users, keys = self.users, self.keys
        for block in reversed(blocks):  # so that the end of a prefix goes before its beginning
            left = users[block] = users[block] - 1
            assert left >= 0, "a block was released twice"
            if forget:
                self._forget(block)
            if left == 0:
                unused.append(block)
                if block in keys:
                    self.idle[block] = None
                else:
                    self.free.append(block)
        return unused

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The longest run of remembered blocks with which these tokens begin, each with one more user."""
        found = list(self._remembered(tokens))
        self.share(found)
        return found

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether remembered blocks hold all of these tokens."""
        return len(tokens) % self.size == 0 and len(list(self._remembered(tokens))) == len(tokens) // self.size

    def _remembered(self, tokens: Sequence[int]) -> Iterator[int]:
        parent = ROOT
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self.known.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                return
            yield block
            parent = self.entries[block]

    def remember(self, tokens: Sequence[int], blocks: Sequence[int], computed: int) -> None:
        """The full blocks among the first `computed` tokens can be found from now on."""
        parent = ROOT
        for index in range(computed // self.size):
            block = blocks[index]
            if block not in self.keys:
                key = (parent, tuple(tokens[index * self.size : (index + 1) * self.size]))
                other = self.known.get(key)
                if other is None:
                    self.known[key], self.keys[block] = block, key
                    self.entries[block] = self.next_entry
                    self.next_entry += 1
                else:
                    block = other  # computed twice; the first stays the one to be found
            parent = self.entries[block]

    def forget_all(self) -> None:
        """No prefix can be found again."""
        self.free.extend(self.idle)
        self.idle.clear()
        self.known.clear()
        self.keys.clear()
        self.entries.clear()

    def _forget(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            del self.known[key], self.entries[block]
