"""The pages of many sequences: growth, shared prefixes, copy on write.

All of it is on the host, which knows what it has appended, so nothing here waits for a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType, OutOfPages
from ..launch.launcher import cdiv


class PagePool:
    """Pages 0 to num_pages - 1 with reference counts: how many sequences hold each of them.

    Parameters
    ----------
    num_pages : pages of the pool; all are free at first

    Examples
    --------
    >>> pool = PagePool(4)
    >>> pages = pool.take(3)
    >>> pool.share(pages[:1])
    >>> pool.give_back(pages)
    >>> pool.free_pages
    3
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        # a stack, lowest page on top: pages that were given back last may still be in the L2
        self._free = list(reversed(range(num_pages)))
        self._users = [0] * num_pages

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def users(self, page: int) -> int:
        """How many sequences hold `page`."""
        return self._users[page]

    def check_room(self, op: str, needed: int) -> None:
        """Raise `OutOfPages` unless `needed` pages are free."""
        if needed > len(self._free):
            problem = f"has too few free pages, of {self.num_pages} in all"
            expected = f"{needed} (release sequences, or make a larger cache)"
            raise OutOfPages(message(op, "cache", problem, expected, f"{len(self._free)} free"))

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, each for one user; the caller has called `check_room`."""
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one user to each of `pages`."""
        for page in pages:
            assert self._users[page] > 0
            self._users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove one user of each; pages without users are free again."""
        for page in pages:
            assert self._users[page] > 0
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)


NO_PAGE = -1


@dataclass
class SequenceState:
    """One sequence: its row in the device's table, its length, its pages in order."""

    row: int
    length: int = 0
    pages: list[int] = field(default_factory=list)


class Growth(NamedTuple):
    """The changes made by one reservation.

    `entries` are (row, ordinal, page) to be set in the table; `copies` are (from, to) of pages that
    other sequences still share. Both must reach the device before new tokens are written.
    """

    entries: list[tuple[int, int, int]]
    copies: list[tuple[int, int]]


class SequencePages:
    """Sequences by id over one pool of pages.

    Ids are never reused, so that the id of a released sequence cannot refer to another one.

    Parameters
    ----------
    pool : the pages
    page_size : tokens in a page
    max_sequences : rows of the table
    max_pages : pages that one sequence may have
    """

    def __init__(self, pool: PagePool, page_size: int, max_sequences: int, max_pages: int):
        self.pool = pool
        self.page_size = page_size
        self.max_sequences = max_sequences
        self.max_pages = max_pages
        self._states: dict[int, SequenceState] = {}
        self._free_rows = list(reversed(range(max_sequences)))
        self._next_id = 0

    def saved(self) -> dict[str, Any]:
        """Everything but the sizes of the pool, as plain data; `restored` is the inverse."""
        return {
            "max_sequences": self.max_sequences,
            "max_pages": self.max_pages,
            "next_id": self._next_id,
            "free_pages": list(self.pool._free),
            "free_rows": list(self._free_rows),
            "sequences": {
                sequence: [state.row, state.length, list(state.pages)]
                for sequence, state in self._states.items()
            },
        }

    @classmethod
    def restored(cls, saved: dict[str, Any], num_pages: int, page_size: int) -> "SequencePages":
        """The accounts that `saved` was made from; the caller has checked it."""
        book = cls(PagePool(num_pages), page_size, saved["max_sequences"], saved["max_pages"])
        book._next_id = saved["next_id"]
        book._free_rows = list(saved["free_rows"])
        book.pool._free = list(saved["free_pages"])
        for sequence, (row, length, pages) in saved["sequences"].items():
            book._states[sequence] = SequenceState(row, length, list(pages))
            for page in pages:
                book.pool._users[page] += 1
        return book

    def all_entries(self) -> Growth:
        """Every page of every sequence, for a table that holds nothing yet."""
        states = self._states.values()
        return Growth([(s.row, i, page) for s in states for i, page in enumerate(s.pages)], [])

    @property
    def ids(self) -> list[int]:
        """All sequences in use."""
        return list(self._states)

    def states(self, op: str, sequences: Sequence[int]) -> list[SequenceState]:
        """The states of ids, each of which must be in use."""
        try:
            return [self._states[sequence] for sequence in sequences]
        except KeyError as error:
            (sequence,) = error.args
            known = isinstance(sequence, int) and 0 <= sequence < self._next_id
            problem = "was released" if known else "is unknown"
            expected = "an id that add_sequences or fork returned and release has not taken back"
            raise InvalidInput(message(op, "sequence", problem, expected, sequence)) from None
        except TypeError:
            expected = "ids that add_sequences or fork returned"
            got = type(sequences).__name__
            raise InvalidType(message(op, "sequences", "are no ids", expected, got)) from None

    def distinct_states(self, op: str, sequences: Sequence[int]) -> list[SequenceState]:
        """The states of ids, each of which may occur only once."""
        states = self.states(op, sequences)
        if len(set(sequences)) != len(sequences):
            got = list(sequences)
            raise InvalidInput(message(op, "sequences", "name one twice", "each at most once", got))
        return states

    def add(self, op: str, count: int) -> list[int]:
        """Ids of `count` new empty sequences."""
        if count > len(self._free_rows):
            expected = f"at most {len(self._free_rows)} more (max_sequences={self.max_sequences})"
            raise InvalidInput(message(op, "sequences", "are too many", expected, count))
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        for sequence in ids:
            self._states[sequence] = SequenceState(self._free_rows.pop())
        return ids

    def grow(self, op: str, sequences: Sequence[int], counts: Sequence[int]) -> Growth:
        """Make room for `counts` more tokens, or raise and change nothing."""
        states = self.distinct_states(op, sequences)
        grown = list(zip(sequences, states, counts, strict=True))
        for sequence, state, count in grown:
            if state.length + count > self.max_pages * self.page_size:
                expected = f"at most {self.max_pages * self.page_size} (max_tokens)"
                got = f"{state.length} + {count} for sequence {sequence}"
                raise InvalidInput(message(op, "tokens", "are too many", expected, got))
        shared = self._last_pages_to_copy(grown)
        new = [
            self._pages_for(state.length + count) - len(state.pages) for _, state, count in grown
        ]
        self.pool.check_room(op, sum(new) + sum(shared))
        entries: list[tuple[int, int, int]] = []
        copies: list[tuple[int, int]] = []
        for (_, state, count), more, copy_last in zip(grown, new, shared, strict=True):
            first = len(state.pages) - copy_last
            if copy_last:
                old = state.pages.pop()
                state.pages += self.pool.take(1)
                copies.append((old, state.pages[-1]))
                self.pool.give_back([old])
            state.pages += self.pool.take(more)
            entries += [(state.row, i, state.pages[i]) for i in range(first, len(state.pages))]
            state.length += count
        return Growth(entries, copies)

    def _pages_for(self, tokens: int) -> int:
        return cdiv(tokens, self.page_size)

    def _last_pages_to_copy(self, grown: list[tuple[int, SequenceState, int]]) -> list[bool]:
        """Whether each sequence would write into a page that another one still reads."""
        left: dict[int, int] = {}
        copied = []
        for _, state, count in grown:
            partly_filled = count > 0 and state.length % self.page_size > 0
            if not partly_filled:
                copied.append(False)
                continue
            last = state.pages[-1]
            users = left.setdefault(last, self.pool.users(last))
            copied.append(users > 1)
            left[last] = users - (users > 1)
        return copied

    def fork(self, op: str, sequence: int) -> tuple[int, Growth]:
        """The id of a new sequence with the same tokens, in the same pages."""
        (state,) = self.states(op, [sequence])
        (child,) = self.add(op, 1)
        copy = self._states[child]
        copy.length, copy.pages = state.length, list(state.pages)
        self.pool.share(copy.pages)
        return child, Growth([(copy.row, i, page) for i, page in enumerate(copy.pages)], [])

    def truncate(self, op: str, sequences: Sequence[int], lengths: Sequence[int]) -> Growth:
        """Forget the tokens past `lengths`; pages without tokens are given back."""
        states = self.distinct_states(op, sequences)
        for sequence, state, length in zip(sequences, states, lengths, strict=True):
            if not 0 <= length <= state.length:
                got = f"{length} for sequence {sequence}"
                expected = f"0 to {state.length}"
                raise InvalidInput(message(op, "lengths", "are out of range", expected, got))
        entries: list[tuple[int, int, int]] = []
        for state, length in zip(states, lengths, strict=True):
            kept = self._pages_for(length)
            entries += [(state.row, i, NO_PAGE) for i in range(kept, len(state.pages))]
            self.pool.give_back(state.pages[kept:])
            del state.pages[kept:]
            state.length = length
        return Growth(entries, [])

    def release(self, op: str, sequences: Sequence[int]) -> Growth:
        """End sequences and give back the pages that only they used."""
        states = self.distinct_states(op, sequences)
        emptied = self.truncate(op, sequences, [0] * len(sequences))
        for sequence, state in zip(sequences, states, strict=True):
            self._free_rows.append(state.row)
            del self._states[sequence]
        return emptied
