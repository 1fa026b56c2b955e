"""Which pages of a cache are free, and how many sequences share each of the others.

Kept on the host, which knows what it appended: nothing here waits for a device.
"""

from collections.abc import Sequence

from ..core.checks import message
from ..core.errors import OutOfPages


class PagePool:
    """Pages 0 to num_pages - 1 with reference counts.

    Parameters
    ----------
    num_pages : how many there are; all are free at first

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
        # the lowest are taken first, and what came back last is taken next: it may be in the L2
        self._free = list(reversed(range(num_pages)))
        self._users = [0] * num_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody uses."""
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
        """Take `count` free pages, each for one user; the caller has checked that there are."""
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
